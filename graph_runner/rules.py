"""Which differences from a reference are right: one rule for every op."""

from __future__ import annotations

from pathlib import Path

from ggml_backend_npu import Node, Tensor
from graph_runner.compare import Comparison
from graph_runner.results import dominant_type
from graph_runner.tolerances import Tolerances


class Rules:
    """Which differences from a reference are right: by op and type.

    extra  a TOML file whose values take the place of ours
    """

    def __init__(self, extra: str | Path | None = None) -> None:
        self._tolerances = Tolerances(None if extra is None else Path(extra))

    def allows(self, node: Node, expected: Tensor, actual: Tensor, found: Comparison) -> bool:
        """Whether a result whose bytes are not the reference's is right.

        node              its sources hold what they held before it ran
        expected, actual  the reference's result and the device's, like node.dst, over memory of their own
        found             compare(expected, actual)
        """
        return found.within(self.bound(node.op, dominant_type(node)))

    def bound(self, op: str, type: str) -> float:
        """The normalised mean squared error that is allowed; 0 where every byte has to be the same."""
        return self._tolerances.nmse(op, type)

    def describe(self, op: str, type: str) -> str:
        """The rule in words."""
        bound = self.bound(op, type)
        return f"within NMSE {bound:g} of the reference" if bound else "same bytes"
