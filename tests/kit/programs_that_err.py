"""Devices whose programs are right as long as they are small: what they do wrong, no single node does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ggml_backend_npu import Graph, Node, Tensor
from ggml_backend_npu.device.device import Program
from ggml_backend_npu.device.sim import Simulator, _moved
from quant.kernels.threads import POOL

Call = Callable[[], None]


class Programs(Simulator):
    """Does something else than it is told in programs of more than `most` nodes."""

    op = ""  # of the node that is wrong

    def __init__(self, most: int, **options: Any) -> None:
        super().__init__(**options)
        self._most = most

    def compile(self, graph: Graph) -> Program:
        nodes = _moved(graph).nodes
        calls = [self._backend.bind(node) for node in nodes]
        if len(nodes) > self._most:
            calls = self.altered(nodes, calls)

        def run() -> None:
            with POOL.working():
                for call in calls:
                    call()

        return lambda: self._later(run)

    def altered(self, nodes: Sequence[Node], calls: list[Call]) -> list[Call]:
        raise NotImplementedError


class LeavesOutTheLastAdd(Programs):
    op = "ADD"

    def altered(self, nodes: Sequence[Node], calls: list[Call]) -> list[Call]:
        adds = [at for at, node in enumerate(nodes) if node.op == "ADD"]
        return [call for at, call in enumerate(calls) if at not in adds[-1:]]


class IdsOfTheLastCall(Programs):
    op = "GET_ROWS"

    def __init__(self, most: int, **options: Any) -> None:
        super().__init__(most, **options)
        self._kept: dict[tuple[int, ...], Any] = {}

    def altered(self, nodes: Sequence[Node], calls: list[Call]) -> list[Call]:
        first = next((at for at, node in enumerate(nodes) if node.op == "GET_ROWS"), None)
        if first is None:
            return calls
        table, ids = nodes[first].src
        assert ids is not None

        def get_rows() -> None:
            now = ids.view().copy()
            before = self._kept.get(ids.ne, now)
            self._kept[ids.ne] = now
            old = Tensor.of(np.ascontiguousarray(before), ids.type)
            self._backend.bind(Node("GET_ROWS", nodes[first].dst, (table, old), nodes[first].params))()

        return [*calls[:first], get_rows, *calls[first + 1 :]]


class CopiesLate(Programs):
    """A copy to contiguous memory is done when the rest is."""

    op = "CONT"

    def altered(self, nodes: Sequence[Node], calls: list[Call]) -> list[Call]:
        late = [at for at, node in enumerate(nodes) if node.op == "CONT"][:1]
        return [*(call for at, call in enumerate(calls) if at not in late), *(calls[at] for at in late)]


PROGRAMS: tuple[type[Programs], ...] = LeavesOutTheLastAdd, IdsOfTheLastCall, CopiesLate
