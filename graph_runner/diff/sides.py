"""The two sides of a diff."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_runner.base.errors import BadInputError
from graph_runner.diff.kinds import Cpu, Elsewhere, Foreign, Own
from graph_runner.diff.side import Side, Wanted

KINDS: tuple[type[Side], ...] = (Own, Elsewhere, Cpu, Foreign)
"""The first whose `of` gives a side is taken."""


@dataclass(frozen=True)
class Sides:
    """Both sides: the device is compared with the reference, which is taken to be right."""

    reference: Side
    device: Side

    @classmethod
    def of(cls, wanted: Wanted) -> Sides:
        """Returns the sides of two names. Raises BadInputError for names and settings that no kind of side has, and for
        a reference that does not work in the host's memory."""
        device, reference = (_side(replace(wanted, is_reference=each)) for each in (False, True))
        if reference.foreign is not None and reference.foreign.takes_layers:
            why = "its memory is its own; a reference works in the host's"
            raise BadInputError(f"--reference {wanted.reference!r}: {why}")
        return cls(reference, device)


def _side(wanted: Wanted) -> Side:
    return next(side for kind in KINDS if (side := kind.of(wanted)) is not None)
