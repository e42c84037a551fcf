"""What a run could not have shown: parameters and sources that a device may ignore without any node being wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from graph_runner.diff.turns import Compared
from graph_runner.judging import noise
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import Copied, copy
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.rules import Rules

_SMALL = 1 << 18  # elements of a node's tensors; larger ones take too long
_FLOATS = ("f32", "f16")

_Kind = tuple[str, bytes, tuple[bool, ...]]  # of nodes: op, parameters, which sources there are


@dataclass
class Sight:
    """What a parameter or source of an op's nodes does to their results.

    n_tried  nodes in which a device that ignores it was tried, until one showed it
    is_shown  whether one has: its result without it is wrong by the rules
    is_synthetic  whether a synthetic node has, as no node of the run did
    """

    op: str
    what: str
    n_tried: int = 0
    is_shown: bool = False
    is_synthetic: bool = False

    @property
    def is_blind(self) -> bool:
        """Whether a device could have ignored it unseen."""
        return self.n_tried > 0 and not self.is_shown and not self.is_synthetic

    def __str__(self) -> str:
        return f"{self.op} {self.what}"


class Blindness:
    """Tries for each node that was judged right, with its real inputs, what a device would give that ignores one of its
    parameters or sources: the op's formula without it.

    sights    what was tried, by op and parameter, and what nodes have that are too large for it
    examples  a node of each op, over copies, that has not shown all of them
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._sights: dict[tuple[str, str], Sight] = {}
        self._done: set[_Kind] = set()  # kinds of nodes of which all has been shown
        self.examples: dict[str, Node] = {}

    @property
    def sights(self) -> list[Sight]:
        return [*self._sights.values()]

    def look(self, right: Compared) -> None:
        """Called with a node that was judged right."""
        node = right.node
        kind = node.op, node.params, tuple(source is None for source in node.src)
        if kind in self._done:
            return
        op = OWN.get(node.op)
        if op is None or not op.has_formula or right.expected.type not in _FLOATS:
            return
        is_large = sum(each.n_elements for each in (node.dst, *node.src) if each is not None) > _SMALL
        is_done = True
        for what, without in ignored(node):
            sight = self._sights.get((node.op, what), Sight(node.op, what))
            shows = None if is_large or sight.is_shown else self.shows(node, right.expected, without)
            if is_large or shows is not None:
                self._sights[node.op, what] = sight
            if shows is not None:
                sight.n_tried += 1
                sight.is_shown = shows
                is_done &= shows
        if is_done and not is_large:
            self._done.add(kind)
        elif node.op not in self.examples and not is_large:
            self.examples[node.op] = Copied.of(node).node

    def shows(self, node: Node, expected: Tensor, without: Node) -> bool | None:
        """Whether a device that computes the node without something would be wrong; None if there is no such node."""
        numbers = noise.exact(without)
        if numbers is None:
            return None
        bad = _rounded(numbers, expected)
        found = compare(expected, bad)
        return not found and not self._rules.allows(node, expected, bad, found)


def _rounded(numbers: NDArray[np.float64], like: Tensor) -> Tensor:
    """Returns numbers as a result that is laid out as another one."""
    made = copy(like)
    with np.errstate(all="ignore"):
        made.view()[...] = numbers.astype(made.view().dtype)
    return made
