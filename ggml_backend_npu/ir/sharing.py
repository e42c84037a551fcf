"""Tensors that share memory: their groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ggml_backend_npu.ir.graph import Memory, Tensor


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
    groups: list[list[tuple[Tensor, Memory]]] = []
    ends: list[int] = []
    for member in sorted(((tensor, memory(tensor)) for tensor in tensors), key=lambda member: member[1].address):
        begin, end = member[1].address, member[1].address + member[1].size
        if groups and begin < ends[-1]:
            groups[-1].append(member)
            ends[-1] = max(ends[-1], end)
        else:
            groups.append([member])
            ends.append(end)
    return [Group(tuple(group), group[0][1].address, end) for group, end in zip(groups, ends, strict=True)]
