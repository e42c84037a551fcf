"""Tensors that share memory: their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ggml_backend_npu.ir.graph import Memory, Tensor
from quant.kernels.jit import array_at, callback, inlined
from quant.kernels.late import types


@dataclass(frozen=True, eq=False)
class Group:
    """Tensors whose memory overlaps, directly or through others: together [begin, end).

    members  the tensors by address, each with the memory that counts as its own: its span, or what it is a view of
    """

    members: tuple[tuple[Tensor, Memory], ...]
    begin: int
    end: int

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors by address."""
        return [tensor for tensor, _ in self.members]

    @cached_property
    def size(self) -> int:
        """Bytes from the first to the last one."""
        return self.end - self.begin

    def __contains__(self, tensor: Tensor) -> bool:
        return self.begin <= tensor.address < self.end

    @cached_property
    def memory(self) -> Memory:
        """The group in host memory, not a copy. It may be written if that of one of its tensors may."""
        writable = any(tensor.memory.writable for tensor, _ in self.members)
        return Memory(self.begin, self.size, writable, [tensor.memory for tensor, _ in self.members])

    def held(self) -> Memory:
        """The group's content in ggml's layout: a copy if its bytes lie apart."""
        apart = self.members[0][0].apart
        if apart is None:
            return self.memory
        return Memory.of(np.ascontiguousarray(apart.read(self.begin - apart.address, self.size)))


def span(tensor: Tensor) -> Memory:
    """The memory from a tensor's first byte to its last one, gaps included; not a copy."""
    return Memory(tensor.address, tensor.nbytes, tensor.memory.writable, tensor.memory)


def viewed(tensor: Tensor) -> Memory:
    """The memory that a tensor is a view of; its own span if it does not lie in that memory."""
    inside = tensor.offset >= 0 and tensor.offset + tensor.nbytes <= tensor.memory.size
    return tensor.memory if inside else span(tensor)


def sharing(tensors: Iterable[Tensor], memory: Callable[[Tensor], Memory] = span) -> list[Group]:
    """Groups of tensors that share memory, by address. Two tensors that lie side by side share none.

    memory  what counts as a tensor's own: `span`, or `viewed` if views of the same memory are to stay together
    """
    members = [(tensor, memory(tensor)) for tensor in tensors]
    spans = np.array([(own.address, own.address + own.size, 0, 0) for _, own in members], np.int64).reshape(-1, 4)
    _group_spans(spans.ctypes.data, len(spans))
    groups = groupby(spans[:, 3].tolist(), lambda place: spans[place, 2])
    return [_group([members[place] for place in places]) for _, places in groups]


def _group(members: list[tuple[Tensor, Memory]]) -> Group:
    return Group(tuple(members), members[0][1].address, max(own.address + own.size for _, own in members))


@inlined
def group_spans(spans: int, n: int) -> None:
    """Groups n spans of memory that overlap, directly or through others: int64 begin, end, group, order of each at an
    address. Writes the group of each, numbered by address, and as order the numbers of the spans by address."""
    span = array_at(spans, types.int64, 4 * n)
    for i in range(n):
        j = i
        while j > 0 and span[4 * span[4 * (j - 1) + 3]] > span[4 * i]:
            span[4 * j + 3] = span[4 * (j - 1) + 3]
            j -= 1
        span[4 * j + 3] = i
    group, end = types.int64(-1), types.int64(-1)
    for j in range(n):
        i = 4 * span[4 * j + 3]
        if group < 0 or span[i] >= end:
            group, end = group + 1, span[i + 1]
        end = max(end, span[i + 1])
        span[i + 2] = group


@callback(types.void(types.int64, types.int64))
def _group_spans(spans: int, n: int) -> None:
    group_spans(spans, n)
