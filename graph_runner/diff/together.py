"""Nodes that run together on the device, as in a run that nobody observes: each result that is read after its group is
judged from what the group read.

A device that compiles graphs rounds otherwise when it sees more of them: it fuses, keeps intermediate results in other
precision, adds up in another order. So what follows from equal inputs is compared, and may be off by what errors that
the nodes may make by themselves, each within its bound, make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ggml_backend_npu import KernelError, Node, Tensor
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Exact
from ggml_backend_npu.registry.exact import values
from graph_runner.diff.side import Side
from graph_runner.diff.walks import Course, Place, Walk
from graph_runner.judging import noise
from graph_runner.judging.compare import compare
from graph_runner.judging.copies import copy
from graph_runner.judging.footprints import Footprints
from graph_runner.judging.rules import Rules, free_order, half_ulp, type_of
from graph_runner.judging.spans import within

_DRAWS = 3  # of errors, to find out how far they move a result
_FAR = 16.0  # times the squared error that the furthest draw makes, which a result may be off
_AS_FAR = (
    1.5  # times the reference's own squared error: what is rounded to the other neighbour is as far from the truth
)
_ULP = 2.0**-23  # of float32
_SHORT = 32  # elements of a row: fewer say little about how far a row may be off
_OUTLIER = 64  # times the mean of its row, which a squared difference may be


@dataclass(frozen=True)
class Computer:
    """The reference, as one that computes a node, the rules for its results, and who is told before nodes run."""

    reference: Side
    rules: Rules
    footprints: Footprints


@dataclass(frozen=True)
class Unlike:
    """A result whose bytes are not the expected ones, and its NMSE. Falsy if it is not only rounded otherwise.

    since  place and node of the first of its group; None if it ran by itself
    why    there is no result
    """

    place: Place
    node: Node
    right: bool
    error: float
    since: tuple[Place, Node] | None
    why: str = ""

    def __bool__(self) -> bool:
        return self.right


@dataclass
class _Together:
    """Nodes that run together, and the storages that they use, as they were before.

    held  by address of the storage: its content, in ggml's layout
    """

    reads: list[Read] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    held: dict[int, Tensor] = field(default_factory=dict)
    constant: set[int] = field(default_factory=set)

    @property
    def since(self) -> tuple[Place, Node] | None:
        """Place and node of the first of several; None if there is only one."""
        return (self.places[0], self.reads[0].node) if len(self.reads) > 1 else None

    def nodes(self) -> list[Node]:
        """Returns the nodes over memory of their own, with what they read before them in it."""
        room = {at: held if at in self.constant else copy(held) for at, held in self.held.items()}

        def over(tensor: Tensor, storage: Storage) -> Tensor:
            return within(tensor, storage.tensor, room[storage.address])

        return [
            replace(
                read.node,
                dst=over(read.node.dst, read.dst),
                src=tuple(
                    None if source is None or storage is None else over(source, storage)
                    for source, storage in zip(read.node.src, read.src, strict=True)
                ),
            )
            for read in self.reads
        ]


class Grouped(Walk):
    """Observes the last node of each group, and judges the results of the group that are read after it.

    device    the side whose run it is
    computer  the reference and the rules
    ends      whether a group ends with a node
    left_out  nodes that another device computes: they are in no group
    before    digests of results in an earlier run, which the same bytes are right by
    course    of an earlier run; of this one if omitted
    changed   the first result that is not that of the earlier run
    found     results whose bytes are not those of the reference from the same inputs, up to the first wrong one
    """

    def __init__(
        self,
        ggml: Ggml,
        device: Side,
        computer: Computer,
        ends: Callable[[Place, Node], bool],
        *,
        left_out: Collection[Place] = (),
        before: Mapping[Place, int] | None = None,
        course: Course | None = None,
    ) -> None:
        super().__init__(ggml)
        self._computer, self._ends, self.side = computer, ends, device
        self._left_out, self._before, self._known = left_out, before or {}, course
        self._group, self._constants = _Together(), dict[int, Tensor]()
        self.course = Course()
        self.changed: tuple[Place, Node] | None = None
        self.found: list[Unlike] = []

    def looks_at(self, place: Place, address: int) -> bool:
        read = self.read(address)
        self.course.add(place, read)
        if place in self._left_out:
            return False
        self._add(place, read)
        is_end = self._ends(place, read.node)
        if is_end and self._known is None:
            self._computer.footprints.begin("own", *place, read.node)
        return is_end

    def failed(self) -> Unlike | None:
        """Returns the last node of the group that was to run, as a wrong one; None if none was."""
        group = self._group
        return Unlike(group.places[-1], group.reads[-1].node, False, np.inf, group.since) if group.places else None

    def saw(self, place: Place, address: int) -> None:
        group, self._group = self._group, _Together()
        if self._known is None:
            self._computer.footprints.end()
        asked = [i for i, at in enumerate(group.places) if group.reads[i].node.dst.nbytes and self._is_asked(at, place)]
        changed = [i for i in asked if self._before.get(group.places[i]) != self.digest(group.reads[i].address)]
        known = [i for i in changed if group.places[i] in self._before]
        if known and self.changed is None:
            self.changed = group.places[known[0]], group.reads[known[0]].node
        if changed and all(self.found):
            self.found += self._unlike(group, asked)

    def _is_asked(self, place: Place, last: Place) -> bool:
        """Whether the result of a node is read after its group."""
        return place == last or (self._known is not None and self._known.is_read_after(place, last[1]))

    def _add(self, place: Place, read: Read) -> None:
        group = self._group
        for storage in (read.dst, *read.src):
            if storage is None or storage.address in group.held:
                continue
            if storage.is_weight:  # which no node writes to
                group.constant.add(storage.address)
                group.held[storage.address] = self._constant(storage)
            else:
                group.held[storage.address] = copy(storage.tensor)
        group.reads.append(read)
        group.places.append(place)

    def _constant(self, storage: Storage) -> Tensor:
        if storage.tensor.apart is None:
            return storage.tensor
        if storage.address not in self._constants:
            self._constants[storage.address] = copy(storage.tensor)
        return self._constants[storage.address]

    def _unlike(self, group: _Together, asked: list[int]) -> Iterator[Unlike]:
        expected = group.nodes()
        try:
            for node in expected:
                self._computer.reference.compute(node)
        except KernelError:  # a node that only the device takes
            return
        draws: list[list[Node]] = []
        for i in asked:
            node, e = expected[i], expected[i].dst
            actual = _laid_out(self.read(group.reads[i].address).node.dst, e)
            found = compare(e, actual)
            if found:
                continue
            right = self._computer.rules.allows(node, e, actual, found)
            if not right and len(group.reads) > 1:
                draws = draws or [self._drawn(group, seed) for seed in range(_DRAWS)]
                right = _is_moved_as_far(node, actual, [drawn[i] for drawn in draws])
            yield Unlike(group.places[i], group.reads[i].node, right, found.nmse, group.since)
            if not right:
                return

    def _drawn(self, group: _Together, seed: int) -> list[Node]:
        """Returns the nodes of a group with results that are each off by as much as may be: from the reference's, or
        from the exact value, which the rules allow as well. With seed 0 all are exact."""
        random = np.random.default_rng(seed)
        nodes = group.nodes()
        for node in nodes:
            self._computer.reference.compute(node)
            part = self._may_be_off(node)
            if part and node.dst.type in ("f32", "f16", "bf16"):
                truth = noise.exact(node) if seed == 0 or random.random() < 0.5 else None
                x = values(node.dst) if truth is None else truth
                size = np.maximum(np.abs(x), np.median(np.abs(x), axis=-1, keepdims=True))
                with np.errstate(all="ignore"):
                    moved = x + random.standard_normal(x.shape) * part * np.where(np.isfinite(size), size, 0)
                    node.dst.view()[...] = moved.astype(node.dst.view().dtype)
        return nodes

    def _may_be_off(self, node: Node) -> float:
        """Returns the part of its elements by which a node's result may be off: 0 if it only moves data."""
        bound = self._computer.rules.bound(node.op, type_of(node))
        own = OWN.get(node.op)
        rounds = own is None or own.exact is not None or own.wide
        return max(float(np.sqrt(bound)), _ULP if rounds else 0.0)


def ends_of(course: Course, size: int, shift: int, left_out: Collection[Place]) -> set[Place]:
    """Returns the last nodes of groups of `size` nodes that one device runs one after the other.

    shift  by how many nodes the groups begin earlier

    An op whose result is an order or a set is a group by itself: the least rounding may give another one.
    """
    found, n = set[Place](), shift
    for place, op in course.ops.items():
        following = place[0], place[1] + 1
        if place in left_out:
            n = shift
            continue
        n += 1
        next_op = course.ops.get(following)
        if n >= size or next_op is None or following in left_out or free_order(op) or free_order(next_op):
            found.add(place)
            n = 0
    return found


def _is_moved_as_far(node: Node, actual: Tensor, drawn: list[Node]) -> bool:
    """Whether a result is no further off than errors of the nodes before it move it; or, as one that is rounded to the
    other neighbour, no further from the exact value than the reference is and they move that.

    node   the reference's result is its output
    drawn  the node with errors in what it reads
    """
    a, e = values(actual), values(node.dst)
    may = _FAR * np.max([_off(values(each.dst), e) for each in drawn], axis=0)
    if (_off(a, e) <= may).all():
        return True
    truth, moved = _unrounded(node), [_unrounded(each) for each in drawn]
    if truth is None:
        return False
    may = np.maximum(may, _FAR * np.max([_off(each, truth) for each in moved if each is not None], axis=0))
    own, off = (_off(x, truth, half_ulp(x, actual.type)) for x in (e, a))
    return bool((off <= _AS_FAR * own + may).all())


def _off(actual: Exact, right: Exact, rounding: Exact | float = 0.0) -> Exact:
    """Returns for each row the mean squared difference beyond `rounding`, or a 64th of an element's if that is more. If
    rows are short, all of them together are one."""
    with np.errstate(all="ignore"):
        same = (actual == right) | (np.isnan(actual) & np.isnan(right))
        squares = np.where(same, 0.0, np.square(np.maximum(np.abs(actual - right) - rounding, 0.0)))
    squares = np.where(np.isnan(squares), np.inf, squares)
    rows = squares.reshape(-1, squares.shape[-1] if squares.shape[-1] >= _SHORT else max(1, squares.size))
    found: Exact = np.maximum(rows.mean(axis=-1), rows.max(axis=-1, initial=0.0) / _OUTLIER)
    return found


def _unrounded(node: Node) -> Exact | None:
    """Returns a node's result in float64; of one that moves data, before it is rounded to the output's type."""
    truth = noise.exact(node)
    source = node.src[0] if node.src else None
    if truth is not None or source is None or source.type not in ("f32", "f16") or node.op not in OWN:
        return truth
    wide = Tensor.of(values(node.dst).astype(np.float32))
    try:
        OWN[node.op].bind(replace(node, dst=wide))()
    except (KernelError, ValueError, TypeError):
        return None
    return values(wide)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the tensor in ggml's layout, with the strides of another one of its ne."""
    plain = tensor.unpacked()
    if plain.nb == like.nb:
        return plain
    made = copy(like)
    OWN["CONT"].define(made, plain)
    return made
