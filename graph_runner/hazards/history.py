"""Who wrote each byte last: kept by ranges of addresses, not byte by byte."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from graph_runner.hazards.extents import Extent


class Write(NamedTuple):
    """A write that may still be seen.

    writer  a number for each writer
    shift   the address of the first byte of the tensor that it is a write to, or is a view of: with it, whether a byte
            is the byte of a tensor that it should be
    """

    writer: int
    shift: int
    extent: Extent


Writes = tuple[Write, ...]  # of a range, the oldest first


class Piece(NamedTuple):
    """A range of addresses, and the writes to it."""

    begin: int
    end: int
    writes: Writes


class History:
    """The writes to an address space. A write to all of a range hides those before it."""

    def __init__(self) -> None:
        self._cuts: list[int] = [-1]
        self._writes: list[Writes] = [()]

    def add(self, write: Write) -> None:
        """Adds a write, the newest."""
        extent = write.extent
        if extent.begin >= extent.end:
            return
        first, last = self._cut(extent.begin), self._cut(extent.end)
        if extent.is_solid:
            self._cuts[first:last] = [extent.begin]
            self._writes[first:last] = [(write,)]
            return
        for place in range(first, last):
            older = (each for each in self._writes[place] if each.extent != extent)
            self._writes[place] = (*older, write)

    def _cut(self, address: int) -> int:
        """The place of the range that begins at an address."""
        place = bisect_left(self._cuts, address)
        if place == len(self._cuts) or self._cuts[place] != address:
            self._cuts.insert(place, address)
            self._writes.insert(place, self._writes[place - 1])
        return place

    def over(self, begin: int, end: int) -> Iterator[Piece]:
        """The ranges of [begin, end), in order."""
        place = bisect_right(self._cuts, begin) - 1
        while begin < end:
            following = self._cuts[place + 1] if place + 1 < len(self._cuts) else end
            yield Piece(begin, min(end, following), self._writes[place])
            begin, place = following, place + 1


def together(one: Iterator[Piece], other: Iterator[Piece]) -> Iterator[tuple[int, int, Writes, Writes]]:
    """Two lists of ranges that begin and end together, cut at the borders of both."""
    a, b = next(one, None), next(other, None)
    while a is not None and b is not None:
        end = min(a.end, b.end)
        yield max(a.begin, b.begin), end, a.writes, b.writes
        a = a if a.end > end else next(one, None)
        b = b if b.end > end else next(other, None)
