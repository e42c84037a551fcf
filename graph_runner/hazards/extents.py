"""The bytes of a tensor, by its strides: exact sets, compared by arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from ggml_backend_npu import Tensor

Steps = tuple[tuple[int, int], ...]  # (number, stride in bytes), the innermost first


@dataclass(frozen=True)
class Extent:
    """A set of bytes: runs of `run` bytes from `begin` on, repeated by `steps`, the smallest stride first.

    Two tensors have the same bytes if their extents are equal. A stride may be smaller than what it repeats.
    """

    begin: int
    run: int
    steps: Steps = ()

    @staticmethod
    def of(tensor: Tensor, begin: int | None = None) -> Extent:
        """The bytes of a tensor's elements, without those between them.

        begin  of its first byte; None: its address
        """
        run = tensor.codec.block_bytes
        steps: list[tuple[int, int]] = []
        begin = tensor.address if begin is None else begin
        if not tensor.nbytes:
            return Extent(begin, 0)
        by_stride = sorted(zip((tensor.n_blocks, *tensor.ne[1:]), tensor.nb, strict=True), key=lambda step: step[1])
        for number, stride in by_stride:
            if number == 1:
                continue
            if not steps and stride <= run:
                run += (number - 1) * stride
            elif steps and stride == steps[-1][0] * steps[-1][1]:
                steps[-1] = steps[-1][0] * number, steps[-1][1]
            elif steps and stride == steps[-1][1]:
                steps[-1] = steps[-1][0] + number - 1, stride
            else:
                steps.append((number, stride))
        return Extent(begin, run, tuple(steps))

    @cached_property
    def end(self) -> int:
        """The address after its last byte."""
        return self.begin + self.run + sum((number - 1) * stride for number, stride in self.steps)

    @property
    def is_solid(self) -> bool:
        """Whether it has every byte from begin to end."""
        return not self.steps

    def moved(self, by: int) -> Extent:
        """The same bytes, so many further on."""
        return Extent(self.begin + by, self.run, self.steps)

    def meets(self, other: Extent) -> bool:
        """Whether two sets share a byte."""
        begin, end = max(self.begin, other.begin), min(self.end, other.end)
        if begin >= end:
            return False
        if (self.is_solid and other.is_solid) or self == other:
            return True
        return not self._passes(other) and self.meets_within(other, begin, end)

    def _passes(self, other: Extent) -> bool:
        """Whether both keep to different bytes of each period that all their strides are multiples of."""
        period = gcd(*(stride for _, stride in (*self.steps, *other.steps)))
        after = (other.begin - self.begin) % period
        return self.run <= after and after + other.run <= period

    def meets_within(self, other: Extent, begin: int, end: int) -> bool:
        """Whether two sets share a byte of [begin, end)."""
        return any((self.held(a, b) & other.held(a, b)).any() for a, b in windows(begin, end))

    def held(self, begin: int, end: int) -> NDArray[np.bool_]:
        """For each byte of [begin, end) whether the set has it."""
        found = np.zeros(end - begin, bool)
        _mark(found, self.begin - begin, self.run, self.steps)
        return found


_WINDOW = 1 << 24  # bytes that are looked at at once


def windows(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in parts that fit into memory."""
    for at in range(begin, end, _WINDOW):
        yield at, min(end, at + _WINDOW)


def _mark(found: NDArray[np.bool_], begin: int, run: int, steps: Steps) -> None:
    """Sets the bytes of a set that lie within an array: whole repetitions at once, and those at its ends by
    themselves."""
    if not steps:
        found[max(0, begin) : max(0, begin + run)] = True
        return
    (number, stride), inner = steps[-1], steps[:-1]
    size = run + sum((n - 1) * s for n, s in inner)
    first = max(0, -(-(1 - size - begin) // stride))  # the first repetition that ends within the array
    last = min(number, -(-(len(found) - begin) // stride))
    whole_first = min(last, max(first, -(begin // stride)))
    whole_last = max(whole_first, min(last, (len(found) - size - begin) // stride + 1))
    for place in (*range(first, whole_first), *range(whole_last, last)):
        _mark(found, begin + place * stride, run, inner)
    if whole_last > whole_first:
        shape = (whole_last - whole_first, *(n for n, _ in reversed(inner)), run)
        strides = (stride, *(s for _, s in reversed(inner)), 1)
        as_strided(found[begin + whole_first * stride :], shape, strides)[...] = True


def layout(tensor: Tensor) -> tuple[int, Steps]:
    """In which order the elements of a tensor follow each other: equal if the elements of the same numbers, of tensors
    at the same address, lie at the same addresses."""
    steps: list[tuple[int, int]] = []
    for number, stride in zip((tensor.n_blocks, *tensor.ne[1:]), tensor.nb, strict=True):
        if number == 1:
            continue
        if steps and stride == steps[-1][0] * steps[-1][1]:
            steps[-1] = steps[-1][0] * number, steps[-1][1]
        else:
            steps.append((number, stride))
    return tensor.codec.block_bytes, tuple(steps)
