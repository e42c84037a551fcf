"""SET, ACC, PAD, PAD_REFLECT_1D, ROLL: a tensor copied into a part of another one or added to it, or moved inside
itself. Byte for byte what ggml's CPU backend writes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels import elements, strided
from ggml_backend_npu.ops.kernels.sides import next_row
from ggml_backend_npu.ops.kernels.tiles import bind_elementwise
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, copy
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import copy_run


@dataclass(frozen=True)
class SetPart(Params):
    """op_params of SET and ACC, in bytes: ggml_set_impl, ggml_acc_impl. inplace: dst holds src0 already."""

    nb1: i32
    nb2: i32
    nb3: i32
    offset: i32
    inplace: i32


@dataclass(frozen=True)
class Pad(Params):
    """op_params of PAD: how many elements to add left and right in each dimension; ggml_pad_ext.

    circular  they are x's own, which comes around again
    """

    lp0: i32
    rp0: i32
    lp1: i32
    rp1: i32
    lp2: i32
    rp2: i32
    lp3: i32
    rp3: i32
    circular: i32

    @property
    def before(self) -> tuple[int, int, int, int]:
        """Elements added before x, in dimensions 0 to 3."""
        return self.lp0, self.lp1, self.lp2, self.lp3

    @property
    def behind(self) -> tuple[int, int, int, int]:
        """Elements added after x, in dimensions 0 to 3."""
        return self.rp0, self.rp1, self.rp2, self.rp3


@dataclass(frozen=True)
class PadReflect(Params):
    """op_params of PAD_REFLECT_1D: how many elements to add left and right; ggml_pad_reflect_1d."""

    p0: i32
    p1: i32


@dataclass(frozen=True)
class Roll(Params):
    """op_params of ROLL: ggml_roll."""

    shift0: i32
    shift1: i32
    shift2: i32
    shift3: i32

    @property
    def shifts(self) -> Dims:
        """Shifts of dimensions 0 to 3, in elements."""
        return self.shift0, self.shift1, self.shift2, self.shift3


def _part(dst: Tensor, b: Tensor, params: SetPart) -> Tensor:
    """The part of dst that b is copied into."""
    nb = dst.nb[0], params.nb1, params.nb2, params.nb3
    return replace(dst, ne=b.ne, nb=nb, offset=dst.offset + params.offset)


def _refuse_set(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> str | None:
    part = _part(dst, b, params)
    if part.offset < dst.offset or min(part.nb) < 0 or part.end > dst.end:
        return f"src1 of ne {b.ne} at {part.offset - dst.offset}, nb {part.nb}, is not inside dst of {dst.nbytes} bytes"
    return other_ne(src0=a, dst=dst) or gaps(src0=a, dst=dst) or gaps_in_rows(src1=b)


@op(
    "SET",
    types=[(type, type, type) for type in ("f32", "i32")],
    refuse=_refuse_set,
    params=SetPart,
    keeps=True,
    built_by={"ggml_set": "ctt zzzz", "ggml_set_inplace": "ctt zzzz"},
)
def set_part(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> None:
    """dst = a, with b in place of a part: b's ne at op_params' offset and strides. a and dst have one ne.

    In place, dst holds a already. Equals ggml_compute_forward_set.
    """
    added = b.view().copy()
    if not params.inplace:
        dst.view()[...] = a.view()
    _part(dst, b, params).view()[...] = added


@set_part.compiled
def _set_part(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> Call | None:
    if b.overlaps(dst):
        return None
    part = _part(dst, b, params)
    moves = [strided.bind_move(part, b)] if params.inplace else [strided.bind_move(dst, a), strided.bind_move(part, b)]
    return Job(*(work for move in moves if move is not None for work in move.works))


def _overlaps_itself(x: Tensor) -> bool:
    """Whether elements of a tensor may share bytes."""
    end = 0
    for stride, n in sorted((stride, n) for stride, n in zip(x.nb, x.ne, strict=True) if n > 1):
        if stride < end + x.codec.block_bytes:
            return True
        end += stride * (n - 1)
    return False


def _refuse_acc(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> str | None:
    part = _part(dst, b, params)
    if _overlaps_itself(part):
        return f"src1 of ne {b.ne} at nb {part.nb} lies on itself"
    return _refuse_set(dst, a, b, params)


@op(
    "ACC",
    types=[("f32", "f32", "f32")],
    refuse=_refuse_acc,
    keeps=True,
    params=SetPart,
    built_by={"ggml_acc": "ctt zzzz", "ggml_acc_inplace": "ctt zzzz"},
)
def acc(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> None:
    """dst = a, with b added to a part: b's ne at op_params' offset and strides. a and dst have one ne.

    In place, dst holds a already. Equals ggml_compute_forward_acc.
    """
    with np.errstate(all="ignore"):
        total = _part(a, b, params).view() + b.view()
    if not params.inplace:
        dst.view()[...] = a.view()
    _part(dst, b, params).view()[...] = total


@acc.compiled
def _acc(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> Call | None:
    if b.overlaps(dst):
        return None
    added = bind_elementwise(elements.add, _part(dst, b, params), _part(a, b, params), b)
    if added is None or params.inplace:
        return added
    moved = strided.bind_move(dst, a)
    return None if moved is None else Job(*moved.works, *added.works)


def _refuse_pad(dst: Tensor, x: Tensor, params: Pad) -> str | None:
    before, behind = params.before, params.behind
    if dst.ne != tuple(n + left + right for n, left, right in zip(x.ne, before, behind, strict=True)):
        return f"x of ne {x.ne}, {before} before and {behind} behind, does not fit dst of ne {dst.ne}"
    if params.circular and not x.n_elements:
        return f"x of ne {x.ne} comes around"
    return gaps(dst=dst)


@op(
    "PAD",
    types=[("f32", "f32")],
    refuse=_refuse_pad,
    params=Pad,
    built_by={"ggml_pad_ext": "ct iiiiiiii", "ggml_pad_ext_circular": "ct iiiiiiii"},
)
def pad(dst: Tensor, x: Tensor, params: Pad) -> None:
    """dst = x with zeros, or x again if circular, before and after it in each dimension; a negative number removes
    elements.

    dst.ne[i] = x.ne[i] + before[i] + behind[i]. Equals ggml_compute_forward_pad.
    """
    places = [np.arange(n) - left for n, left in zip(dst.ne[::-1], params.before[::-1], strict=True)]
    sizes = x.ne[::-1]
    if params.circular:
        dst.view()[...] = x.view()[np.ix_(*(place % n for place, n in zip(places, sizes, strict=True)))]
        return
    inside = [(place >= 0) & (place < n) for place, n in zip(places, sizes, strict=True)]
    dst.view()[...] = 0
    taken = x.view()[np.ix_(*(place[kept] for place, kept in zip(places, inside, strict=True)))]
    dst.view()[np.ix_(*inside)] = taken


class Shifted(NamedTuple):
    """Element i of x is element i + shifts of dst, whose rows have no gaps; ne: of dst, x_ne: of x."""

    ne: Dims
    x_ne: Dims
    shifts: Dims
    x: Place
    dst: Place


@compiled
def pad_rows(p, begin, end, scratch):
    """A unit is a row of dst."""
    of = record_at(p, Shifted)
    n0, n1, n2, _ = of.ne
    m0, m1, m2, m3 = of.x_ne
    s0, s1, s2, s3 = of.shifts
    nb0 = of.x.nb[0]
    i1, i2, i3 = index_of(begin, n1, n2)
    for _ in range(begin, end):
        y, first, last = row_of(of.dst, i1, i2, i3), n0, n0
        if 0 <= i1 - s1 < m1 and 0 <= i2 - s2 < m2 and 0 <= i3 - s3 < m3:
            first = min(max(0, s0), n0)
            last = min(max(first, s0 + m0), n0)
            x = row_of(of.x, i1 - s1, i2 - s2, i3 - s3)
            copy_run(4, x + (first - s0) * nb0, nb0, y + 4 * first, 4, last - first)
        array_at(y, types.float32, first)[:] = types.float32(0)
        array_at(y + 4 * last, types.float32, n0 - last)[:] = types.float32(0)
        i1, i2, i3 = next_row(of, i1, i2, i3)
    return 0


@pad.compiled
def _pad(dst: Tensor, x: Tensor, params: Pad) -> Call | None:
    if x.overlaps(dst) or not dst.n_elements:
        return None
    of = Shifted(dst.ne, x.ne, params.before, x.place, dst.place)
    kernel = roll_rows if params.circular else pad_rows
    return Job(Work(kernel, of, dst.n_elements // dst.ne[0], dst.nbytes, keep=(dst, x)))


def _refuse_reflect(dst: Tensor, x: Tensor, params: PadReflect) -> str | None:
    p0, p1 = params.p0, params.p1
    if min(p0, p1) < 0 or max(p0, p1) >= x.ne[0]:
        return f"rows of {x.ne[0]} reflected by {p0} and {p1}"
    if dst.ne != (x.ne[0] + p0 + p1, *x.ne[1:]):
        return f"x of ne {x.ne} does not fit dst of ne {dst.ne}"
    return gaps_in_rows(x=x, dst=dst)


@op("PAD_REFLECT_1D", types=[("f32", "f32")], refuse=_refuse_reflect, params=PadReflect)
def pad_reflect_1d(dst: Tensor, x: Tensor, params: PadReflect) -> None:
    """dst = rows of x, mirrored at their first and last element, which are not repeated: p0 elements before, p1 after.

    Equals ggml_compute_forward_pad_reflect_1d.
    """
    (p0, p1), n, rows, y = (params.p0, params.p1), x.ne[0], x.view(), dst.view()
    y[..., p0 : p0 + n] = rows
    y[..., :p0] = rows[..., p0:0:-1]
    y[..., p0 + n :] = rows[..., n - 1 - p1 : n - 1][..., ::-1]


class ReflectRows(NamedTuple):
    """ne: of x; p0, p1: how many elements dst adds to the left and right of a row of x."""

    ne: Dims
    p0: int
    p1: int
    x: Place
    dst: Place


@compiled
def reflect_rows(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, ReflectRows)
    n0, p0, p1 = of.ne[0], of.p0, of.p1
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        x, y = row_of(of.x, i1, i2, i3), row_of(of.dst, i1, i2, i3)
        copy(x, y + 4 * p0, 4 * n0)
        for i in range(p0):
            copy(x + 4 * (p0 - i), y + 4 * i, types.int64(4))
        for i in range(p1):
            copy(x + 4 * (n0 - 2 - i), y + 4 * (p0 + n0 + i), types.int64(4))
    return 0


@pad_reflect_1d.compiled
def _pad_reflect_1d(dst: Tensor, x: Tensor, params: PadReflect) -> Call | None:
    if x.overlaps(dst):
        return None
    of = ReflectRows(x.ne, params.p0, params.p1, x.place, dst.place)
    return Job(Work(reflect_rows, of, x.n_elements // x.ne[0], dst.nbytes, keep=(dst, x)))


def _refuse_roll(dst: Tensor, x: Tensor, params: Roll) -> str | None:
    if any(abs(shift) >= n for shift, n in zip(params.shifts, x.ne, strict=True)):
        return f"shifts {params.shifts} of ne {x.ne}"
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


@op("ROLL", types=[("f32", "f32")], refuse=_refuse_roll, params=Roll)
def roll(dst: Tensor, x: Tensor, params: Roll) -> None:
    """dst[i + shift] = x[i] in each dimension, wrapping around at the end; in x's ne. Equals
    ggml_compute_forward_roll."""
    dst.view()[...] = np.roll(x.view(), params.shifts[::-1], axis=(0, 1, 2, 3))


@compiled
def roll_rows(p, begin, end, scratch):
    """A unit is a row of dst. Rows that follow each other in x too are found together: a division takes as long as
    the copy of a short row. If dst is larger, x comes around again."""
    of = record_at(p, Shifted)
    n0, n1, n2, _ = of.ne
    m0, m1, m2, m3 = of.x_ne
    s0, s1, s2, s3 = of.shifts
    row, begins, nb0 = begin, -s0 % m0, of.x.nb[0]
    while row < end:
        i1, i2, i3 = index_of(row, n1, n2)
        j1, j2, j3 = (i1 - s1) % m1, (i2 - s2) % m2, (i3 - s3) % m3
        n_rows = min(n1 - i1, m1 - j1, end - row)
        for i in range(n_rows):
            x, y = row_of(of.x, j1 + i, j2, j3), row_of(of.dst, i1 + i, i2, i3)
            i0, j0 = 0, begins
            while i0 < n0:
                count = min(n0 - i0, m0 - j0)
                copy_run(4, x + j0 * nb0, nb0, y + 4 * i0, 4, count)
                i0, j0 = i0 + count, 0
        row += n_rows
    return 0


@roll.compiled
def _roll(dst: Tensor, x: Tensor, params: Roll) -> Call | None:
    if x.overlaps(dst):
        return None
    of = Shifted(dst.ne, x.ne, params.shifts, x.place, dst.place)
    return Job(Work(roll_rows, of, dst.n_elements // dst.ne[0], dst.nbytes, keep=(dst, x)))


@roll.nodes
def _make_roll(rng: probes.Rng, types: Types) -> Node:
    shape = 4, 5, 6, 300
    return probes.node("ROLL", "f32", shape, probes.normal(rng, "f32", *shape), params=Roll(7, -2, 3, 1))
