"""The one softmax over rows, which SOFT_MAX (`ops.softmax`) and the operators of `documents.rbln` run.

`softmax` processes rows of a strided tensor: each is scaled, masked, and becomes e ** (x - max), divided by its sum or,
for a tile of flash attention, stored beside it. A masked element is excluded: it counts neither in the maximum nor in
the sum, whatever it holds, and gives 0; a row that is masked altogether gives zeros. A NaN that is not masked makes its
row NaN. So it is in the documents, whose masks are marks. A mask of numbers, of which -inf is one, is added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import libm
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.exponentials import expf, exps, largest, scaled
from ggml_backend_npu.registry.entry import Call
from quant.kernels.jit import array_at, compiled, f16_to_f32, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F16, F32, narrow_run, widen_run

_TILE = 256  # elements of a row in work if dst cannot hold float32
LOWEST = -3.4028234663852886e38  # of float32; a tile's maximum is never less, as x - -inf may be NaN

# kinds of mask: numbers to add; or marks, of which 0 excludes
_NONE, _ADD_F32, _ADD_F16, _MARK_F32, _MARK_F16, _MARK_BYTE = range(6)
MASKS = {"f32": _ADD_F32, "f16": _ADD_F16}
_MARKS = {"float32": _MARK_F32, "float16": _MARK_F16, "bool": _MARK_BYTE}
_NOWHERE = Place(0, (0, 0, 0, 0))

Floats = NDArray[np.float32]


class Softmax(NamedTuple):
    """Rows of src, of ne elements, into dst, whose rows have no gaps. An address of 0: there is none.

    mask_ne     dimensions 1 to 3 of the mask
    mask_kind   one of those above; numbers that are added have no gaps within a row
    sinks       of float32, one per row
    slopes      of float32, one per index of dimension 2
    offsets     of int64, one per index of dimension 3
    window      0: all columns up to the row's position
    maxima_before, maxima, sums  of float32, one per row: for a tile of a flash attention
    """

    ne: Dims
    src: Place
    src_code: int
    dst: Place
    dst_code: int
    scale: np.float32
    mask: Place
    mask_ne: tuple[int, int, int]
    mask_kind: int
    sinks: Place
    slopes: int
    offsets: int
    window: int
    maxima_before: int
    maxima: int
    sums: int


@inlined
def _mask(of, mask, slope, y, begin, count):
    """For `count` scores at y, columns from `begin` on: adds the mask, or puts -inf if a mark excludes."""
    row = array_at(y, types.float32, count)
    nb0, kind = of.mask.nb[0], of.mask_kind
    at = mask + begin * nb0
    excluded = types.float32(-np.inf)
    if kind == _ADD_F32:
        floats = array_at(at, types.float32, count)
        for i in range(count):
            row[i] = fused_multiply_add(slope, floats[i], row[i])
    elif kind == _ADD_F16:
        halves = array_at(at, types.uint16, count)
        for i in range(count):
            row[i] = fused_multiply_add(slope, f16_to_f32(halves[i]), row[i])
    elif kind == _MARK_F32:
        for i in range(count):
            row[i] = row[i] if array_at(at + i * nb0, types.float32, 1)[0] != types.float32(0) else excluded
    elif kind == _MARK_F16:
        for i in range(count):
            marked = array_at(at + i * nb0, types.uint16, 1)[0] & types.uint16(0x7FFF)
            row[i] = row[i] if marked != 0 else excluded
    elif kind == _MARK_BYTE:
        for i in range(count):
            row[i] = row[i] if array_at(at + i * nb0, types.uint8, 1)[0] != 0 else excluded


@inlined
def _scores(of, src, mask, slope, y, begin, count):
    """float32 scores of columns [begin, begin + count) of a row into y, -inf if excluded."""
    nb0 = of.src.nb[0]
    widen_run(of.src_code, src + begin * nb0, nb0, y, count)
    if of.scale != types.float32(1):
        scaled(y, count, of.scale)
    if mask:
        _mask(of, mask, slope, y, begin, count)


@inlined
def _any_is_left(of, mask, work, first, last):
    """Whether a row's marks leave at least one of the elements [first, last); a mask that is added leaves all."""
    if of.mask_kind < _MARK_F32:
        return first < last
    score = array_at(work, types.float32, 1)
    for column in range(first, last):
        score[0] = 0
        _mask(of, mask, types.float32(1), work, column, 1)
        if score[0] != types.float32(-np.inf):
            return True
    return False


@inlined
def _any_nan(of, src, mask, slope, work, first, last):
    """Whether one of the scores [first, last) of a row, after its mask, is NaN; work holds a tile."""
    for column in range(first, last, _TILE):
        count = min(_TILE, last - column)
        _scores(of, src, mask, slope, work, column, count)
        scores = array_at(work, types.float32, count)
        for i in range(count):
            if scores[i] != scores[i]:
                return True
    return False


@inlined
def _greater(a, b):
    """The greater of two; a if b is NaN."""
    return b if b > a else a


@inlined
def _fill(code, dst, count, zero):
    """Sets `count` elements without gaps to `zero`, which is 0 or NaN."""
    if code == F32:
        array_at(dst, types.float32, count)[:] = zero
    else:
        nan = types.uint16(0x7E00) if code == F16 else types.uint16(0x7FC0)
        array_at(dst, types.uint16, count)[:] = types.uint16(0) if zero == zero else nan


@inlined
def _columns(of, i1, i3):
    """The columns [first, last) of a row that are in its window."""
    n = of.ne[0]
    if of.offsets == 0:
        return types.int64(0), n
    position = array_at(of.offsets + 8 * i3, types.int64, 1)[0] + i1
    last = min(position + 1, n)
    return min(max(position + 1 - of.window, 0), last) if of.window else types.int64(0), last


@compiled
def softmax(p, begin, end, stage):
    """A unit is a row. The stage holds a tile of a row if dst cannot hold float32."""
    of = record_at(p, Softmax)
    n = of.ne[0]
    in_place = of.dst_code == F32
    tile = max(n, 1) if in_place else _TILE
    for index in range(begin, end):
        i1, i2, i3 = index_of(index, of.ne[1], of.ne[2])
        src, dst = row_of(of.src, i1, i2, i3), row_of(of.dst, i1, i2, i3)
        mask, slope = types.int64(0), types.float32(1)
        if of.mask.address:
            mask = row_of(of.mask, i1 % of.mask_ne[0], i2 % of.mask_ne[1], i3 % of.mask_ne[2])
        if of.slopes:
            slope = array_at(of.slopes + 4 * i2, types.float32, 1)[0]
        first, last = _columns(of, i1, i3)

        maximum = types.float32(-np.inf)
        y = stage
        for column in range(first, last, tile):
            count = min(tile, last - column)
            y = dst + 4 * column if in_place else y
            _scores(of, src, mask, slope, y, column, count)
            maximum = _greater(maximum, largest(y, count))
        if maximum == types.float32(-np.inf) and not _any_is_left(of, mask, stage, first, last):
            last = first
        sink = types.float32(-np.inf)
        if of.sinks.address:
            sink = array_at(row_of(of.sinks, i1, i2, i3), types.float32, 1)[0]
            maximum = _greater(maximum, sink)
        before = types.float32(LOWEST)
        if of.maxima_before:
            before = array_at(of.maxima_before + 4 * index, types.float32, 1)[0]
        if of.sums:
            maximum = _greater(_greater(maximum, before), types.float32(LOWEST))

        total = types.float64(0)
        for column in range(first, last, tile):
            count = min(tile, last - column)
            if not in_place:
                _scores(of, src, mask, slope, y, column, count)
            total += exps(y, count, maximum)
        if sink > types.float32(-np.inf) or sink != sink:
            total += types.float64(expf(sink - maximum))
        factor, zero = types.float32(1), types.float32(0)
        if of.sums:
            if before != before or (total != total and _any_nan(of, src, mask, slope, stage, first, last)):
                maximum = types.float32(np.nan)
            if sink != sink or maximum != maximum:
                maximum, total, zero, last = types.float32(np.nan), types.float64(np.nan), types.float32(np.nan), first
            array_at(of.sums + 4 * index, types.float32, 1)[0] = types.float32(total)
            array_at(of.maxima + 4 * index, types.float32, 1)[0] = maximum
        elif total != 0:
            factor = types.float32(types.float64(1) / total)
            zero = factor * types.float32(0)
        for column in range(first, last, tile):
            count = min(tile, last - column)
            if not in_place:
                _scores(of, src, mask, slope, y, column, count)
                exps(y, count, maximum)
            if factor != types.float32(1):
                scaled(y, count, factor)
            if not in_place:
                narrow_run(y, of.dst_code, dst + column * of.dst.nb[0], of.dst.nb[0], count)
        _fill(of.dst_code, dst, first, zero)
        _fill(of.dst_code, dst + last * of.dst.nb[0], n - last, zero)
    return 0


@dataclass(frozen=True)
class Rows:
    """A softmax over the rows of x into dst, of the same ne; dst's rows have no gaps.

    scale    of x
    mask     numbers to add to x * scale; see `marks`. Broadcast over dimensions 1 to 3 as ggml does it
    slopes   factors of the mask, one per index of dimension 2
    marks    instead of a mask: float32, float16 or bool, 0 if x is excluded, broadcast by strides of 0
    sinks    float32 (n3, n2, n1), broadcast by strides of 0: one more score of a row, in its sum only
    offsets  row i1 of batch i3 is at position offsets[i3] + i1 and has the columns up to that
    window   and at most this many of them; 0 for all
    statistics  of a tile of a flash attention: the maximum of the rows before, or None, and where to put each row's
                maximum and sum; all float32, contiguous, one per row. dst is then not divided by the sum. A NaN in the
                scores, the sink or the maximum before makes the whole row NaN
    """

    dst: Tensor
    x: Tensor
    scale: float = 1.0
    mask: Tensor | None = None
    slopes: Floats | None = None
    marks: NDArray[np.generic] | None = None
    sinks: Floats | None = None
    offsets: NDArray[np.int64] | None = None
    window: int = 0
    statistics: tuple[Floats | None, Floats, Floats] | None = None

    def bind(self) -> Call:
        """The call that computes it."""
        x, dst = self.x, self.dst
        mask, mask_ne, mask_kind = _NOWHERE, x.ne[1:], _NONE
        if self.mask is not None:
            mask, mask_ne, mask_kind = self.mask.place, self.mask.ne[1:], MASKS[self.mask.type]
        elif self.marks is not None:
            mask, mask_kind = _place(self.marks), _MARKS[self.marks.dtype.name]
        before, maxima, sums = self.statistics or (None, None, None)
        of = Softmax(
            ne=x.ne,
            src=x.place,
            src_code=CODES[x.type],
            dst=dst.place,
            dst_code=CODES[dst.type],
            scale=np.float32(self.scale),
            mask=mask,
            mask_ne=mask_ne,
            mask_kind=mask_kind,
            sinks=_NOWHERE if self.sinks is None else _place(self.sinks[..., None]),
            slopes=_address(self.slopes),
            offsets=_address(self.offsets),
            window=self.window,
            maxima_before=_address(before),
            maxima=_address(maxima),
            sums=_address(sums),
        )
        n_rows = x.ne[1] * x.ne[2] * x.ne[3]
        return Job(Work(softmax, of, n_rows, 4 * n_rows * x.ne[0], scratch=4 * _TILE, keep=self))


def _address(array: NDArray[np.generic] | None) -> int:
    """Address of an array's first element; 0 without an array."""
    if array is None:
        return 0
    address, _ = array.__array_interface__["data"]
    return int(address)


def _place(array: NDArray[np.generic]) -> Place:
    """The `Place` of an array of four axes."""
    nb3, nb2, nb1, nb0 = array.strides
    return Place(_address(array), (nb0, nb1, nb2, nb3))


def slopes(n_head: int, max_bias: float) -> Floats | None:
    """ALiBi's slope for each head; None for a bias of 0, where all are 1."""
    if max_bias <= 0:
        return None
    powf, n = libm.function("powf", 2), 1 << (n_head.bit_length() - 1)
    m0, m1 = (powf(2.0, -bias / n) for bias in (max_bias, max_bias / 2.0))
    found = [powf(m0, head + 1) if head < n else powf(m1, 2 * (head - n) + 1) for head in range(n_head)]
    return np.array(found, np.float32)


def _maximum(scores: Floats, kept: NDArray[np.bool_] | np.bool_, sink: Floats | None) -> Floats:
    maximum: Floats = np.fmax.reduce(np.where(kept, scores, np.float32(-np.inf)), -1, keepdims=True, initial=-np.inf)
    return maximum if sink is None else np.fmax(maximum, sink)


def _exps(
    scores: Floats, kept: NDArray[np.bool_] | np.bool_, sink: Floats | None, maximum: Floats
) -> tuple[Floats, NDArray[np.float64]]:
    e = np.where(kept, np.exp(scores - maximum), np.float32(0))
    total = e.sum(-1, keepdims=True, dtype=np.float64)
    if sink is not None:
        total = total + np.where(np.isneginf(sink), 0, np.exp(sink - maximum))
    return e, total


def masked(scores: Floats, kept: NDArray[np.bool_] | np.bool_, sink: Floats | None) -> Floats:
    """softmax over the last axis of what is kept, float32; the definition that `softmax` equals but for rounding.

    sink  one more score, broadcast to (..., 1); None without one
    """
    with np.errstate(all="ignore"):
        e, total = _exps(scores, kept, sink, _maximum(scores, kept, sink))
        y: Floats = np.divide(e, total, out=np.zeros_like(e), where=total != 0, casting="unsafe")
    return y


def masked_tile(
    scores: Floats, kept: NDArray[np.bool_] | np.bool_, sink: Floats | None, before: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """As `masked`, for a tile of a flash attention: the rows' maxima, e ** (x - maximum) of what is kept, and its sums.

    before  maxima of the rows in earlier tiles; None for the first tile
    """
    with np.errstate(all="ignore"):
        maximum = np.fmax(_maximum(scores, kept, sink), np.float32(LOWEST))
        spoiled = (np.isnan(scores) & kept).any(-1, keepdims=True)
        for more in (sink, before):
            spoiled = spoiled if more is None else spoiled | np.isnan(more)
        if before is not None:
            maximum = np.fmax(before, maximum)
        e, total = _exps(scores, kept, sink, maximum)
        nan = np.float32(np.nan)
        return np.where(spoiled, nan, maximum), np.where(spoiled, nan, e), np.where(spoiled, nan, total.astype("f4"))
