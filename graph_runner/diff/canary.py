"""Canaries: known small faults, planted into copies of what the device computed. The judge must call each of them
wrong, by the code that judges nodes; if it does not, it is blind, and its verdicts say nothing.

Nodes are drawn at random while the run goes on: the n-th that will do is taken with a chance of 1 in n. Those with a
bound come before those of which every byte counts; small ones and such with several rows come before others. Of large
ones, which take longest to judge, the n-th is taken with a chance of 1 in n squared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.exact import values
from graph_runner.base.errors import BlindError
from graph_runner.diff.turns import Compared
from graph_runner.judging import noise
from graph_runner.judging.copies import copy
from graph_runner.judging.results import NodeResult
from graph_runner.judging.rules import Rules, type_of

_SMALL = 1 << 16  # elements of a node's tensors, of which a judgement takes some milliseconds
_WIDEST = 1e-2  # of a user's bounds; beyond it a small fault is right
_OUR_WIDEST = 1e-4  # of the bounds of ops in this project
_FAR = 256.0  # times the bound, in squares, which a fault is beyond it; what rounding there is does not hide it
_OUTLIER = 64  # times, as a rule has it for a single element
_AS_NEAR = 1e-4  # of the reference's own error, as a rule has it
_TRIES = 4  # of places for a fault, where rows are alike
_FLOATS = ("f32", "f16", "bf16")
_HALF_STEPS = {"f16": 2.0**-10, "bf16": 2.0**-7}  # of rounding to these types, in parts of an element
_LARGEST_SCALE = 0.5
_LARGEST_TERMS = 1e6  # times a result's numbers; that more of them cancel is not believed

Again = Callable[[Tensor], NodeResult]  # judges a node again with another result
_Faults = Iterator[Tensor]


@dataclass(frozen=True)
class Planted:
    """A fault that was planted into a copy of a node's result.

    kind  what it is: "swapped rows"
    way   how the node was judged: "alone", "in the own run"
    """

    kind: str
    op: str
    name: str
    step: int
    index: int
    way: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.op} {self.name!r}"


@dataclass
class Canaries:
    """What became of the faults that were planted in a run.

    seed    of the draws: the same seed plants the same faults
    seen    faults that were called wrong
    missed  faults that were called right
    hidden  how many were called right since what is rounded on the way to a result is much larger than the result
    named   one of those seen, drawn at random
    """

    seed: int
    seen: list[Planted] = field(default_factory=list)
    missed: list[Planted] = field(default_factory=list)
    hidden: int = 0
    named: Planted | None = None

    def refuse_a_blind_judge(self) -> None:
        """Raises BlindError if a fault was called right, or none was called wrong."""
        if self.missed:
            first = self.missed[0]
            where = f"step {first.step} node {first.index}, {first.way}"
            what = f"{first.op} {first.name!r} ({where}) with {first.kind}"
            raise BlindError(f"the judge is blind: it calls right what is wrong: {what}; --canary {self.seed}")
        if self.hidden and not self.seen:
            raise BlindError(
                f"the judge is blind: it calls each of {self.hidden} planted faults right; --canary {self.seed}"
            )

    def __str__(self) -> str:
        if self.named is None:
            return "none planted, as no node was judged right in which a small fault is wrong"
        return f"{self.named} seen, as were all {len(self.seen):,} planted faults (--canary {self.seed})"


class Planter:
    """Plants faults into copies of results that were judged right, and has them judged again.

    found    what became of them
    example  the verdict on one that was called wrong
    """

    def __init__(self, rules: Rules, seed: int) -> None:
        self._rules, self._random = rules, np.random.default_rng(seed)
        self._draws: dict[str, _Draw] = {}
        self._known: dict[object, tuple[float, _Rank] | None] = {}  # bound and rank, by op, ne and types
        self.found = Canaries(seed)
        self.example: NodeResult | None = None

    def look(self, way: str, right: Compared, again: Again) -> None:
        """Called with a node that was judged right. If it is drawn, plants faults: into the first small node one of
        each kind, one after the other; into a later or a large node one of a kind that is drawn too.

        way    how it was judged; each way has a draw of its own
        again  judges the node as it was judged, but with another result of the device's
        """
        node = right.node
        alike = node.op, right.actual.ne, tuple(source and (source.ne, source.type) for source in node.src)
        if alike not in self._known:
            bound = self._bound(node)
            self._known[alike] = None if bound is None else (bound, _rank(right, bound))
        known = self._known[alike]
        if known is None:
            return
        bound, rank = known
        draw = self._draws.setdefault(way, _Draw())
        if not draw.takes(rank, self._random):
            return
        if draw.rank == rank or not rank.is_small:
            faults = [*islice(self._faults(right, bound, self._random.permutation([*_KINDS])), 1)]
        else:
            faults = [*self._faults(right, bound, _KINDS)]
        seen = [planted for kind, bad in faults if (planted := self._planted(way, kind, bad, right, again)) is not None]
        if seen:
            draw.rank = rank
            self.found.seen += seen
            self.found.named = seen[self._random.integers(len(seen))]

    def _planted(self, way: str, kind: str, bad: Tensor, right: Compared, again: Again) -> Planted | None:
        """Has a fault judged. Returns it if it is called wrong."""
        result = again(bad)
        planted = Planted(kind, result.op, result.name, result.step, result.index, way)
        if not result:
            self.example = result
            return planted
        if self._is_hidden(bad, right):
            self.found.hidden += 1
        else:
            self.found.missed.append(planted)
        return None

    def _bound(self, node: Node) -> float | None:
        """Returns the bound that small faults of a node are beyond; None if no fault is certain to be. It is not asked
        of the rules that judge, unless it is the user's."""
        op = OWN.get(node.op)
        if op is None or op.order is not None:
            return None
        if self._rules.are_given:
            bound = self._rules.bound(node.op, type_of(node))
            return bound if bound <= _WIDEST else None
        return min(op.bound.get(type_of(node), op.bound.get("*", 0.0)), _OUR_WIDEST)

    def _faults(self, right: Compared, bound: float, kinds: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields those of some kinds of faults that are certain to be wrong, each with the result that has one."""
        good, before = right.actual.unpacked(), right.before()
        if before is not None:
            before = before.unpacked() if (before.type, before.ne) == (good.type, good.ne) else None
        numbers = values(good)
        if not numbers.any() or not np.isfinite(numbers).all() or _may_be_undefined(right.node):
            return
        size = float(np.abs(numbers).max())
        for kind in kinds:
            for bad in _KINDS[kind](_Good(good, numbers, before, bound), self._random):
                if _is_beyond(_FAR * bound, size, bad, good) and _is_beyond(_FAR * bound, size, bad, right.expected):
                    yield kind, bad
                    break

    def _is_hidden(self, bad: Tensor, right: Compared) -> bool:
        """Whether terms cancel in a node so that a fault is within what rounding may do."""
        bound, expected = self._bound(right.node), values(right.expected)
        truth = noise.exact(right.node) if bound else None
        if not bound or truth is None or truth.shape != expected.shape:
            return False
        size = float(np.abs(expected).max())
        terms = float(noise.size(right.node, truth).max(initial=0.0))
        size = max(size, terms) if terms < _LARGEST_TERMS * size else size
        with np.errstate(all="ignore"):
            own = np.square(expected - truth).sum(axis=-1) / np.square(expected).sum(axis=-1)
        own_error = min(1.0, float(np.nan_to_num(own, posinf=1.0).max(initial=0.0)))
        return not _is_beyond(max(bound, _AS_NEAR * own_error), size, bad, right.expected)


@dataclass(frozen=True, order=True)
class _Rank:
    """How well a node will do."""

    has_bound: bool
    is_small: bool
    has_rows: bool


@dataclass
class _Draw:
    """The draw among nodes of the best rank so far.

    rank  of the node that was drawn last; None if faults were planted into none
    """

    rank: _Rank | None = None
    n: int = 0

    def takes(self, rank: _Rank, random: np.random.Generator) -> bool:
        if self.rank is None or rank > self.rank:
            self.n = 1
            return True
        if rank < self.rank:
            return False
        self.n += 1
        return bool(random.random() * (self.n if rank.is_small else self.n**2) < 1)


def _rank(right: Compared, bound: float) -> _Rank:
    tensors = [right.actual, *(source for source in right.node.src if source is not None)]
    n_rows = right.actual.n_elements // max(1, right.actual.ne[0])
    return _Rank(bound > 0, sum(each.n_elements for each in tensors) <= _SMALL, n_rows >= _TRIES)


def _may_be_undefined(node: Node) -> bool:
    """Whether ggml may leave a part of a node's result undefined: it quantises a source that is not finite."""
    if OWN[node.op].unset is None:
        return False
    floats = [source for source in node.src if source is not None and source.type in _FLOATS]
    return not all(np.isfinite(values(source)).all() for source in floats)


# kinds of faults: each yields results, the smaller faults first


@dataclass(frozen=True)
class _Good:
    """A result that is right, its numbers, what its memory held before or None, and the bound that it has."""

    tensor: Tensor
    numbers: NDArray[np.float64]
    before: Tensor | None
    bound: float

    def bad(self) -> Tensor:
        """Returns a copy in which a fault is to be planted."""
        return copy(self.tensor)

    @property
    def is_float(self) -> bool:
        """Whether NumPy computes with its elements."""
        return self.tensor.view().dtype.kind == "f"

    @property
    def n_bits(self) -> int:
        """Bits of an element or block."""
        return 8 * self.tensor.codec.block_bytes

    def row(self, random: np.random.Generator) -> tuple[int, ...]:
        """Draws a row, not the first if there are others, as (i3, i2, i1)."""
        shape = self.tensor.ne[:0:-1]
        n = int(np.prod(shape))
        return tuple(int(i) for i in np.unravel_index(int(random.integers(1, n)) if n > 1 else 0, shape))


def _flipped(good: _Good, random: np.random.Generator) -> _Faults:
    """Flips a bit of an element, or of a block."""
    first, needed = 0, float(np.sqrt(_FAR * _OUTLIER * good.bound))
    if good.is_float and needed:
        first = int(np.finfo(good.tensor.view().dtype).nmant + np.floor(np.log2(needed)))
    yield from _with_flipped(good, range(max(first, 0), good.n_bits), random)


def _negated(good: _Good, random: np.random.Generator) -> _Faults:
    """Flips the sign of an element."""
    if good.is_float:
        yield from _with_flipped(good, range(good.n_bits - 1, good.n_bits), random)


def _with_flipped(good: _Good, bits: range, random: np.random.Generator) -> _Faults:
    """Flips each of some bits of one element, a large one, or of one block."""
    size, shape = np.abs(good.numbers), good.tensor.view().shape[:4]
    at = tuple(int(random.integers(n)) for n in shape)
    if good.is_float:
        at = tuple(int(i) for i in np.unravel_index(int(random.choice(np.flatnonzero(size >= size.max() / 2))), shape))
    for bit in bits:
        bad = good.bad()
        target = bad.view()
        one = np.array(target[at]).reshape(-1)
        one.view(np.uint8)[bit // 8] ^= 1 << bit % 8
        target[at] = one.reshape(np.shape(target[at]))
        yield bad


def _swapped(good: _Good, random: np.random.Generator) -> _Faults:
    """Swaps two rows."""
    for _ in range(_TRIES):
        bad, a, b = good.bad(), good.row(random), good.row(random)
        view = bad.view()
        view[a], view[b] = np.array(view[b]), np.array(view[a])
        yield bad


def _stale(good: _Good, random: np.random.Generator) -> _Faults:
    """Leaves what was there before."""
    if good.before is not None:
        bad = good.bad()
        bad.view()[...] = good.before.view()
        yield bad


def _left_out(good: _Good, random: np.random.Generator) -> _Faults:
    """Leaves what was there before in one row; zeros if that is not known or the same."""
    row = good.row(random)
    for before in (None, 0) if good.before is None else (good.before.view()[row], 0):
        if before is not None:
            bad = good.bad()
            bad.view()[row] = before
            yield bad


def _scaled(good: _Good, random: np.random.Generator) -> _Faults:
    """Multiplies all elements with a number near 1."""
    if not good.is_float:
        return
    sign, off = float(random.choice([-1.0, 1.0])), 2.0**-20 if not good.bound else np.sqrt(_FAR * good.bound)
    while off < _LARGEST_SCALE:
        bad = good.bad()
        bad.view()[...] = (good.numbers * (1 + sign * off)).astype(bad.view().dtype)
        yield bad
        off *= 2


_KINDS: dict[str, Callable[[_Good, np.random.Generator], _Faults]] = {
    "a flipped bit": _flipped,
    "a flipped sign": _negated,
    "swapped rows": _swapped,
    "a stale tensor": _stale,
    "a row left out": _left_out,
    "a scale slightly off": _scaled,
}


def _is_beyond(limit: float, size: float, bad: Tensor, good: Tensor) -> bool:
    """Whether a result is off by more than a limit, as a rule has it, if numbers as large as `size` are rounded on the
    way to it; with a limit of 0, whether any element has other bytes."""
    if not limit:
        a, b = (np.ascontiguousarray(each.view()).view(np.uint8) for each in (bad, good))
        return not np.array_equal(a, b)
    x, right = values(bad), values(good)
    with np.errstate(all="ignore"):
        off = np.abs(x - right) - _HALF_STEPS.get(bad.type, 0.0) * np.abs(right)
        parts = np.square(np.where(np.isfinite(x), np.maximum(off, 0.0), np.inf) / size)
    return bool(max(parts.mean(axis=-1).max(), parts.max() / _OUTLIER) >= limit)
