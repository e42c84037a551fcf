"""The bounds of `Rules` alone."""

from __future__ import annotations

from pathlib import Path

from graph_runner.rules import Rules, ToleranceError

__all__ = ["ToleranceError", "Tolerances"]


class Tolerances:
    """Bounds of the normalised mean squared error: of `Rules` of the same file."""

    def __init__(self, extra: Path | None = None) -> None:
        self._rules = Rules(extra)

    def nmse(self, op: str, type: str) -> float:
        """The bound of an op's nodes whose first source has a type; 0 where every byte has to be the same."""
        return self._rules.bound(op, "f16" if op == "FLASH_ATTN_EXT" else type)  # of v, which is not known here
