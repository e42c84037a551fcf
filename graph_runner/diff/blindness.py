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
from graph_runner.judging.copies import copy
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.rules import Rules

_SMALL = 1 << 18  # elements of a node's tensors; larger ones take too long
_FLOATS = ("f32", "f16")


@dataclass
class Sight:
    """What a parameter or source of an op's nodes does to their results.

    n_tried  nodes in which a device that ignores it was tried, until one showed it
    is_shown  whether one has: its result without it is wrong by the rules
    """

    op: str
    what: str
    n_tried: int = 0
    is_shown: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.what}"


class Blindness:
    """Tries for each node that was judged right, with its real inputs, what a device would give that ignores one of its
    parameters or sources: the op's formula without it.

    sights  what was tried, by op and parameter
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._sights: dict[tuple[str, str], Sight] = {}
        self._done: set[tuple[str, bytes, tuple[bool, ...]]] = set()  # kinds of nodes of which all has been shown

    @property
    def sights(self) -> list[Sight]:
        return [*self._sights.values()]

    def look(self, right: Compared) -> None:
        """Called with a node that was judged right."""
        node = right.node
        alike = node.op, node.params, tuple(source is None for source in node.src)
        if alike in self._done:
            return
        op = OWN.get(node.op)
        if op is None or not op.has_formula or right.expected.type not in _FLOATS:
            return
        if sum(each.n_elements for each in (node.dst, *node.src) if each is not None) > _SMALL:
            return
        is_done = True
        for what, without in ignored(node):
            sight = self._sights.setdefault((node.op, what), Sight(node.op, what))
            is_done &= sight.is_shown or not self._is_hidden(sight, without, right)
        if is_done:
            self._done.add(alike)

    def _is_hidden(self, sight: Sight, without: Node, right: Compared) -> bool:
        """Tries a node without something. Returns whether it is right like this; False if there is no such node."""
        numbers = noise.exact(without)
        if numbers is None:
            return False
        bad = _rounded(numbers, right.expected)
        found = compare(right.expected, bad)
        sight.n_tried += 1
        sight.is_shown = not found and not self._rules.allows(right.node, right.expected, bad, found)
        return not sight.is_shown


def _rounded(numbers: NDArray[np.float64], like: Tensor) -> Tensor:
    """Returns numbers as a result that is laid out as another one."""
    made = copy(like)
    with np.errstate(all="ignore"):
        made.view()[...] = numbers.astype(made.view().dtype)
    return made
