"""Observers that count the nodes of a run as a diff does, and note what the run is like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from graph_runner.diff.side import Side
from graph_runner.judging.copies import digest_of

Place = tuple[int, int]  # a node's step, and its place in that


class Walk:
    """An observer that counts nodes in the same way as a diff.

    step  the current step; incremented before each step but the first
    side  whose memory the run's tensors may lie in; None: the host's
    """

    side: Side | None = None

    def __init__(self, ggml: Ggml) -> None:
        self.ggml, self.step, self._place = ggml, 0, -1

    @cached_property
    def read(self) -> Callable[[int], convert.Read]:
        """Reads a node of the run by its address."""
        return Reader(self.ggml) if self.side is None else self.side.reader(self.ggml)

    def next_step(self) -> None:
        self.step, self._place = self.step + 1, -1

    def begins_again(self) -> None:
        """Called before the first step, if other tokens ran before."""
        self.step, self._place = 0, -1

    def before(self, address: int) -> bool:
        """Returns whether to observe the node after it has run."""
        if not convert.computes(self.read(address).node.op):
            return False
        self._place += 1
        return self.looks_at((self.step, self._place), address)

    def after(self, address: int) -> None:
        self.saw((self.step, self._place), address)

    def digest(self, address: int) -> int:
        """Returns the digest of a node's result."""
        dst = self.read(address).node.dst
        return digest_of(dst.address, dst.nbytes, convert.bytes_at if self.side is None else self.side.bytes_at)

    def looks_at(self, place: Place, address: int) -> bool:
        """Returns whether to observe the node after it has run."""
        return True

    def saw(self, place: Place, address: int) -> None:
        """Called after an observed node has run."""


@dataclass
class Course:
    """The nodes of a run in order, and which results are read by whom.

    ops     the op of each node that computes something
    read_until  for each result, the last place of its step at which it is read; of one that stays after its step, such
                as a cell of a cache, every place comes before
    """

    ops: dict[Place, str] = field(default_factory=dict)
    read_until: dict[Place, float] = field(default_factory=dict)
    _made: dict[int, Place] = field(default_factory=dict)

    def add(self, place: Place, read: convert.Read) -> None:
        """Adds the next node."""
        if place[1] == 0:
            self._made.clear()
        self.ops[place] = read.node.op
        for root in read.roots:
            if root in self._made:
                self.read_until[self._made[root]] = place[1]
        stays = read.view_source != 0 and read.dst.is_leaf
        self.read_until[place] = float("inf") if stays else place[1]
        self._made[read.address] = place

    def is_read_after(self, place: Place, last: int) -> bool:
        """Whether a node's result is read after the node at `last` of its step, or stays after the step."""
        return self.read_until.get(place, 0.0) > last
