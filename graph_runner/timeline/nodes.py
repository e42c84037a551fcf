"""What the nodes of a step are called, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.profiles.clock import cost_of, touched_by
from graph_runner.judging.results import types_of


@dataclass(frozen=True)
class Copied:
    """A tensor that the scheduler has copied for a split."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class StepNode:
    """A node that the scheduler comes to in a step.

    place  among those of the step that compute something, as a diff counts them; -1: it computes nothing
    nbytes, operations  what it reads and writes, and the operations of a matrix product: a multiplication and an
           addition are two
    reads  copies that it reads, by their addresses
    """

    address: int
    place: int
    op: str
    name: str
    types: str
    ne: tuple[int, ...]
    nbytes: float
    operations: float
    reads: dict[int, Copied]

    @property
    def computes(self) -> bool:
        """Whether it computes something."""
        return self.place >= 0 and 0 not in self.ne


class StepNodes:
    """The nodes of steps, by the addresses of their ggml_tensors: those of equal graphs are the same."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._known: dict[int, list[StepNode]] = {}

    def of(self, addresses: Sequence[int]) -> list[StepNode]:
        """Returns the nodes that the scheduler has come to, in order. The graph must still be there."""
        size = structs.TENSOR.size
        key = xxhash.xxh3_64_intdigest(b"".join(convert.bytes_at(address, size) for address in addresses))
        if key not in self._known:
            self._known[key] = [*self._read(addresses)]
        return self._known[key]

    def _read(self, addresses: Sequence[int]) -> list[StepNode]:
        found, place = [], 0
        for address in addresses:
            op = convert.op_name(self._ggml, address)
            reads = self._copies(address)
            if not convert.computes(op):
                found.append(StepNode(address, -1, op, convert.name_of(address), "", (), 0, 0, reads))
                continue
            node = convert.node(self._ggml, address)
            cost = cost_of(node)
            operations = 0.0 if cost.matrix is None else cost.operations
            costs = touched_by(node, cost), operations
            found.append(StepNode(address, place, op, node.name, types_of(node), node.dst.ne, *costs, reads))
            place += 1
        return found

    def _copies(self, address: int) -> dict[int, Copied]:
        found = {}
        for source in filter(None, convert.sources_of(address)):
            name = convert.copied_name(convert.name_of(source))
            if name and convert.op_name(self._ggml, source) == "NONE":
                found[source] = Copied(name, convert.tensor(self._ggml, source).nbytes)
        return found
