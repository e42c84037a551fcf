"""What two runs begin with: weights, caches and states, compared once by name before a node reads or writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ggml_backend_npu.device.faults import MemoryFault, differing
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ir import Tensor
from graph_runner.judging.copies import digest_of, span

_Key = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class _Leaf:
    """A tensor that no node computes, as a run begins with it; `is_clear` if all its bytes are 0."""

    tensor: Tensor
    digest: int
    is_clear: bool


class Leaves:
    """Compares what the device's run begins with, tensor by tensor, with the reference's.

    found  called with each that differs: of a weight it is `copy_in`'s fault, of what ggml has cleared `fill`'s
    off    called with a cache or state of the device's that differs
    """

    def __init__(self, found: Callable[[MemoryFault], None], off: Callable[[Tensor], None]) -> None:
        self._found, self._off = found, off
        self._theirs: dict[_Key, _Leaf] = {}
        self._early: dict[_Key, tuple[Tensor, int]] = {}  # of the device's run, where that is ahead
        self._seen: set[Read | int] = set()

    def reference(self, read: Read) -> None:
        """Called before the reference computes a node."""
        for storage in self._new(read):
            tensor, key = storage.tensor, _key(storage.tensor)
            if key in self._theirs:
                continue
            is_clear = not (bytes := np.frombuffer(convert.bytes_at(tensor.address, tensor.nbytes), np.uint8))[
                :64
            ].any()
            is_clear = is_clear and not bytes.any()
            self._theirs[key] = leaf = _Leaf(tensor, digest_of(tensor.address, tensor.nbytes), is_clear)
            if key in self._early:
                self._compare(leaf, *self._early.pop(key))

    def own(self, read: Read) -> None:
        """Called before the device's run computes a node."""
        for storage in self._new(read):
            tensor, key = storage.tensor, _key(storage.tensor)
            plain = tensor.unpacked()
            now = tensor, digest_of(plain.address, plain.nbytes)
            if key in self._theirs:
                self._compare(self._theirs[key], *now)
            else:
                self._early.setdefault(key, now)

    def _new(self, read: Read) -> Iterator[Storage]:
        """Yields the leaves of a node that were not seen before: not inputs, and not what lies in memory of a graph."""
        if read in self._seen:
            return
        self._seen.add(read)
        for storage in (read.dst, *read.src):
            if storage is None or storage.is_set or storage.address in self._seen or not storage.tensor.nbytes:
                continue
            if storage.is_leaf and storage.buffer:
                self._seen.add(storage.address)
                yield storage

    def _compare(self, theirs: _Leaf, own: Tensor, digest: int) -> None:
        if digest == theirs.digest:
            return
        mine = span(own.unpacked())
        expected = np.zeros_like(mine) if theirs.is_clear else span(theirs.tensor)
        if mine.size != expected.size or np.array_equal(mine, expected):
            return
        method, kind = ("fill", "the cache or state") if theirs.is_clear else ("copy_in", "the weights")
        what = f"{differing(expected, mine, 0)}, when it was first used"
        self._found(MemoryFault(method, f"{kind} {own.name!r}", 0, mine.size, what))
        if theirs.is_clear:
            self._off(own)


def _key(tensor: Tensor) -> _Key:
    return tensor.name, tensor.type, tensor.ne
