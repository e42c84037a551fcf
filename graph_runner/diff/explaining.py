"""What a wrong node's result tells: where its errors are, which mistake gives them, and how to compute it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ggml_backend_npu import Graph, Node, Tensor
from graph_runner.diagnosis import diagnose, quantised_values
from graph_runner.diff.turns import Compared
from graph_runner.judging.blocks import compare_blocks
from graph_runner.judging.compare import heat
from graph_runner.judging.copies import restored
from graph_runner.judging.noise import noise_multiple
from graph_runner.judging.reproduce import backend_ops_line
from graph_runner.judging.results import NodeResult, Verdict
from graph_runner.judging.rules import Rules

_HEATS = 200  # nodes that differ of which a heat map is kept
_EXPLANATIONS = 3  # nodes of an op, its types and a verdict that are explained

Pair = tuple[Tensor, Tensor]


class Keeper(Protocol):
    """Saves nodes so that they can be computed again. Each method returns the path, or None if nothing is saved."""

    def node(self, node: Node, expected: Tensor, found: NodeResult) -> str | None:
        """Saves a node as it was before it ran, with its expected output."""

    def span(self, graph: Graph, expected: dict[int, Tensor], found: NodeResult) -> str | None:
        """Saves nodes that run as one operator, as they were before, with the expected outputs by place."""


class Explainer:
    """Adds to results of nodes that differ what takes time to find."""

    def __init__(self, rules: Rules, keeper: Keeper) -> None:
        self._rules, self._keeper = rules, keeper
        self._heats = 0
        self._explanations: Counter[tuple[str, str, Verdict]] = Counter()

    def with_heat(self, found: NodeResult, wrong: Compared | None, ends: Callable[[], Pair | None]) -> NodeResult:
        """Returns the result with a heat map, for the first nodes.

        wrong  the comparison that shows an error, if one does
        ends   returns the results of the two runs; None if there are not both
        """
        if self._heats >= _HEATS:
            return found
        self._heats += 1
        shown = wrong is not None and wrong.found is not None and not wrong.found
        both = (wrong.expected, wrong.actual) if wrong is not None and shown else ends()
        return found if both is None else replace(found, heat=heat(*both))

    def explained(self, found: NodeResult, wrong: Compared, again: Callable[[], Pair | None] | None) -> NodeResult:
        """Returns the result with details, for the first nodes of each op, type and verdict.

        again  has the device compute the node over another content of dst; returns that and the result
        """
        kind = (found.op, found.types, found.verdict)
        self._explanations[kind] += 1
        if self._explanations[kind] > _EXPLANATIONS:
            return found
        node, result = wrong.node, wrong.actual
        blocks, diagnosis, line, kept = None, None, None, None
        if not found:
            kept = self._kept(wrong, found)
            line = backend_ops_line(node)
        if wrong.found is None:
            return replace(found, test=line, reproducer=kept)
        if wrong.expected.codec.is_quantized:
            blocks = compare_blocks(wrong.expected, result, quantised_values(node))
        if found.verdict is Verdict.INTRODUCED:
            diagnosis = diagnose(node, wrong.expected, result, wrong.before(), wrong.found.outside, again)
        return replace(
            found, blocks=blocks, diagnosis=diagnosis, test=line, reproducer=kept,
            judged=self._rules.judged(node, wrong.expected, result),
            noise=noise_multiple(node, wrong.expected, result),
        )  # fmt: skip

    def _kept(self, wrong: Compared, found: NodeResult) -> str | None:
        if wrong.whole is not None:
            return self._keeper.span(wrong.whole.graph, wrong.whole.expected, found)
        held = replace(wrong.node, dst=wrong.before() or wrong.node.dst)
        return self._keeper.node(restored(wrong.like, held), wrong.expected, found)
