"""The kernels of FLASH_ATTN_EXT (`ops.attention`): the cells of a query, some at a time."""

from __future__ import annotations

import math
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.exponentials import v_exp, weigh_columns
from ggml_backend_npu.ops.kernels.softmax import LOWEST
from quant.codec import ROUNDINGS
from quant.dots import READY_Q8, SCALED_SUM, ready_q8, rounded_q8
from quant.kernels.jit import (
    array_at,
    compiled,
    copy,
    f16_to_f32,
    fused_multiply_add,
    inlined,
)
from quant.kernels.late import types
from quant.kernels.matrices import LANES, ROWS, multiply
from quant.kernels.records import Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.rows import CODES, decode_row, round_run

Floats = NDArray[np.float32]

CELLS = 64  # whose scores are computed together
_ROWS = 64  # of queries that they are computed for, at most
EXCLUDED = 0xFC00  # -inf as a float16


class Source(NamedTuple):
    """q, k or v.

    shared  how many heads of q, and how many of its sequences, share one of this source
    code, to_float, packed, n_packed  of its rows, as `decode_row` takes them; for q, the code of what it is rounded to
    """

    place: Place
    shared: tuple[int, int]
    code: int
    to_float: int
    packed: int
    n_packed: int


class Attention(NamedTuple):
    """dk, dv are the row sizes of k and v in the kernels. An address of 0 means that there is none.

    n_groups  heads of k
    mask_ne  dimensions 2 and 3 of the mask
    sinks, slopes  addresses of one float32 per head
    n_minima  how many blocks a row of k has, if q is rounded to q8_1: after its elements, a row of k has the minima of
             its blocks, and one of q what float16 rounds off its sums of as many elements; 0: q is rounded to another
             type
    q8       then, how q8_1 rounds: the place in quant.ROUNDINGS
    scale    of a score; softcap: the cap on it after that, 0 for none
    dst      its address; dst has no gaps
    parts, n_parts  of `attend_in_halves`: where a row's sums are stored, and how many parts; 0: it finishes `dst`
    n_narrow  of `attend_in_halves`: the elements of a row of v that are multiplied and added as float16
    n_together  of `attend_in_halves`: how many heads, which share one of k and v, a unit has
    in_halves  of `attend_in_halves`: whether the products of q with a float16 k are added as float16
    n_rows   of `attend`: the most rows of a unit
    marks    of `attend`: where `mark_masks` stores what masks hold
    chunk    of `attend`: rows (query, head, sequence) of a chunk of ggml's, if its CPU multiplies matrices; 0: it
             takes cell by cell
    """

    dk: int
    dv: int
    n_cells: int
    n_queries: int
    n_heads: int
    n_sequences: int
    n_groups: int
    q: Source
    k: Source
    v: Source
    mask: Place
    mask_ne: tuple[int, int]
    sinks: int
    slopes: int
    scale: np.float32
    softcap: np.float32
    dst: int
    n_minima: int = 0
    q8: int = 0
    parts: int = 0
    n_parts: int = 0
    n_narrow: int = 0
    n_together: int = 1
    in_halves: int = 0
    n_rows: int = 0
    marks: int = 0
    chunk: int = 0


@inlined
def float_at(address):
    """The float32 at an address."""
    return array_at(address, types.float32, 1)[0]


@inlined
def row_at(source, i1, head, i3):
    """Address of a row of q, k or v."""
    return row_of(source.place, i1, head // source.shared[0], i3 // source.shared[1])


@inlined
def load_query(of, i1, head, i3, query, work):
    """A row of q, rounded, to `query`."""
    if of.n_minima == 0:
        copy(row_at(of.q, i1, head, i3), query, 4 * of.dk)
        round_run(of.q.code, query, work, of.dk)
        return
    n = 32 * of.n_minima
    row = array_at(query, types.float32, of.dk)
    ready_q8(row_at(of.q, i1, head, i3), work, of.n_minima, of.q8, types.int64(0))
    rounded_q8(work, query, of.n_minima)
    row[n:] = 0
    for b in range(of.n_minima):
        total = types.float32(0)
        for i in range(32 * b, 32 * b + 32):
            total += row[i]
        row[n + b] = float_at(work + READY_Q8 * b + SCALED_SUM) - total


@inlined
def decode(source, row, y, n):
    """A row of k or v as float32."""
    decode_row(source.code, source.to_float, row, source.packed, source.n_packed, y, n)


@inlined
def decode_key(of, row, y):
    """A row of k as float32, and the minima of its blocks where the kernels take them."""
    if of.n_minima == 0:
        decode(of.k, row, y, of.dk)
        return
    n = 32 * of.n_minima
    decode(of.k, row, y, n)
    minima = array_at(y + 4 * n, types.float32, of.dk - n)
    minima[:] = 0
    for b in range(of.n_minima):
        minima[b] = f16_to_f32(array_at(row + b * of.k.place.nb[0] + 2, types.uint16, 1)[0])


@inlined
def mask_row(of, i1, head, i3):
    """Address of a query's row of the mask; 0 without a mask."""
    if of.mask.address == 0:
        return types.int64(0)
    return row_of(of.mask, i1, head % of.mask_ne[0], i3 % of.mask_ne[1])


@inlined
def slope_of(of, head):
    """The slope of a head, which the mask is multiplied by."""
    return float_at(of.slopes + 4 * head) if of.slopes else types.float32(1)


@inlined
def capped(of, y, n):
    """n scores that are already divided by the cap: y = cap * tanh(y), if there is a cap."""
    cap = of.softcap
    if cap != 0:
        scores = array_at(y, types.float32, n)
        for i in range(n):
            scores[i] = cap * types.float32(math.tanh(scores[i]))


@inlined
def dst_row(of, i1, head, i3):
    """The row of dst of a query of a head."""
    return array_at(of.dst + 4 * of.dv * (head + of.n_heads * (i1 + of.n_queries * i3)), types.float32, of.dv)


@inlined
def bytes_to_round(dk: int) -> int:
    """Bytes that `load_query` works in."""
    return max(2 * dk + 34, dk // 32 * READY_Q8)


@inlined
def mark(mask, count):
    """What the mask at an address holds for `count` cells: bits for numbers other than 0, and whether it is not all
    -inf."""
    some, kept = types.uint16(0), types.uint16(0)
    cells = array_at(mask, types.uint16, count)
    for i in range(count):
        some |= cells[i] & types.uint16(0x7FFF)
        kept |= cells[i] ^ types.uint16(EXCLUDED)
    return some, kept


_SOME, _KEPT = 1, 2  # bits of a mark: the mask of a query has numbers other than 0, and not only -inf


@compiled
def mark_masks(p, begin, end, scratch):
    """A unit is a row of the mask: marks of its tiles of CELLS cells. Heads that share a mask read it once so."""
    of = record_at(p, Attention)
    n_tiles = -(-of.n_cells // CELLS)
    for unit in range(begin, end):
        i1, i2, i3 = index_of(unit, of.n_queries, of.mask_ne[0])
        mask = row_of(of.mask, i1, i2, i3)
        marks = array_at(_marks_of(of, i1, i2, i3), types.uint8, n_tiles * of.n_queries)
        for tile in range(n_tiles):
            first = tile * CELLS
            some, kept = mark(mask + 2 * first, min(CELLS, of.n_cells - first))
            marks[tile * of.n_queries] = (_SOME if some != 0 else 0) | (_KEPT if kept != 0 else 0)
    return 0


@inlined
def _marks_of(of, i1, i2, i3):
    """Address of a query's mark of the first tile; that of the next tile is n_queries bytes further on."""
    return of.marks + i1 + of.n_queries * -(-of.n_cells // CELLS) * (i2 + of.mask_ne[0] * i3)


@inlined
def _padded(dv):
    """The size of a row of v, rounded up to whole vectors."""
    return -(-dv // LANES) * LANES


def scratch_of(of: Attention) -> int:
    """Bytes that `attend` works in: queries, keys, values, their sums, scores; for each row three numbers and the
    addresses of its mask and of its first mark; a query and what it is rounded in."""
    wide: int = _padded(of.dv)
    to_round: int = bytes_to_round(of.dk)
    floats = of.dk * of.n_rows + CELLS * (of.dk + wide + of.n_rows) + of.n_rows * (wide + 3) + of.dk
    return 4 * floats + 16 * of.n_rows + to_round


@inlined
def query_of(of, group, row):
    """The query and the head of one of the rows that share a head of k."""
    return row % of.n_queries, group * of.k.shared[0] + row // of.n_queries


@inlined
def _load_queries(of, group, i3, first_row, used, q, masks, marks, line):
    """Puts `used` queries, scaled, into the columns of q, and the addresses of their masks and first marks into masks
    and marks."""
    dk, work = of.dk, line + 4 * of.dk
    queries, query = array_at(q, types.float32, (dk, of.n_rows)), array_at(line, types.float32, dk)
    queries[:] = 0
    for r in range(used):
        i1, head = query_of(of, group, first_row + r)
        load_query(of, i1, head, i3, line, work)
        for d in range(dk):
            queries[d, r] = of.scale * query[d]
        masks[r] = mask_row(of, i1, head, i3)
        if of.mask.address:
            marks[r] = _marks_of(of, i1, head % of.mask_ne[0], i3 % of.mask_ne[1])


@inlined
def _marked(of, marks, used, first):
    """The bits of the marks of `used` rows, of the tile that begins with a cell. marks: the address of each one's
    first."""
    found, further = types.uint8(0), first // CELLS * of.n_queries
    for r in range(used):
        found |= array_at(marks[r] + further, types.uint8, 1)[0]
    return found


@inlined
def _add_masks(of, group, first_row, used, masks, first, count, scores):
    for r in range(used):
        _, head = query_of(of, group, first_row + r)
        slope = slope_of(of, head)
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            value = f16_to_f32(mask[i])
            excluded = mask[i] == EXCLUDED and of.chunk == 0
            scores[i, r] = value if excluded else scores[i, r] + slope * value


@inlined
def all_finite(x, n):
    """Whether n float32 at an address are finite."""
    row = array_at(x, types.uint32, n)
    found = types.uint32(0)
    for i in range(n):
        found |= types.uint32((row[i] & types.uint32(0x7F800000)) == types.uint32(0x7F800000))
    return found == 0


@inlined
def _is_met(of, i1, head, i3, first, count):
    """Whether ggml's CPU multiplies cells [first, first + count) with a query's weights: those of its tile of _ROWS
    queries, counted from the start of the thread's chunk or of the head, are not all excluded."""
    if of.mask.address == 0:
        return True
    start = of.n_queries * (head + of.n_heads * i3)
    row = start + i1
    chunk = row // of.chunk * of.chunk
    base = max(chunk, start)
    begin = base + (row - base) // _ROWS * _ROWS
    for other in range(begin, min(begin + _ROWS, chunk + of.chunk, start + of.n_queries)):
        mask = array_at(mask_row(of, other - start, head, i3) + 2 * first, types.uint16, count)
        for i in range(count):
            if mask[i] != EXCLUDED:
                return True
    return False


@inlined
def _leave_out(of, group, i3, first_row, used, first, count, scores):
    """Leaves a tile out of the sums of the rows that ggml's CPU leaves it out of: it does not come to the tile, or
    takes the tile's maximum for -inf. It looks for that from the last NaN on, and a tile that is not full ends with
    -inf."""
    for r in range(used):
        i1, head = query_of(of, group, first_row + r)
        highest = types.float32(-np.inf)
        for i in range(count):
            highest = highest if highest > scores[i, r] else scores[i, r]
        if count < CELLS and highest != highest:
            highest = types.float32(-np.inf)
        if highest == types.float32(-np.inf) or not _is_met(of, i1, head, i3, first, count):
            for i in range(count):
                scores[i, r] = types.float32(-np.inf)


@inlined
def _add_one_by_one(of, group, i3, first_row, used, masks, first, count, scores, v, sums):
    """sums += scores v where v is not finite, for the cells that ggml's CPU multiplies: 0 times NaN is NaN."""
    wide = _padded(of.dv)
    for r in range(used):
        i1, head = query_of(of, group, first_row + r)
        if of.chunk and not _is_met(of, i1, head, i3, first, count):
            continue
        for i in range(count):
            excluded = masks[r] != 0 and array_at(masks[r] + 2 * (first + i), types.uint16, 1)[0] == EXCLUDED
            if excluded and of.chunk == 0:
                continue
            row = array_at(v + 4 * wide * i, types.float32, wide)
            for d in range(of.dv):
                sums[r, d] = fused_multiply_add(scores[i, r], row[d], sums[r, d])


@inlined
def _finish_rows(of, group, i3, first_row, used, maxima, totals, sums):
    """Writes dst of `used` rows, after adding their sinks."""
    for r in range(used):
        i1, head = query_of(of, group, first_row + r)
        factor = types.float32(1)
        if of.sinks:
            sink = float_at(of.sinks + 4 * head)
            maximum = maxima[r] if maxima[r] > types.float32(LOWEST) else types.float32(-np.inf)
            if sink > maximum:
                factor = v_exp(maximum - sink)
                totals[r] = totals[r] * factor + types.float32(1)
            else:
                totals[r] += v_exp(sink - maximum)
        factor = factor / totals[r] if totals[r] != 0 else types.float32(0)
        dst = dst_row(of, i1, head, i3)
        for d in range(of.dv):
            dst[d] = sums[r, d] * factor


@compiled
def attend(p, begin, end, scratch):
    """A unit is a block of rows (query, head) that share a head of k and v.

    Scores lie cell by cell, so that a vector holds one cell of several rows: the product with the transposed q gives
    them in this order.
    """
    of = record_at(p, Attention)
    dk, dv, n_cells, n_rows, wide = of.dk, of.dv, of.n_cells, of.n_rows, _padded(of.dv)
    q = scratch
    k = q + 4 * dk * n_rows
    v = k + 4 * CELLS * dk
    y = v + 4 * CELLS * wide
    s = y + 4 * n_rows * wide
    numbers = s + 4 * CELLS * n_rows
    masks = array_at(numbers + 12 * n_rows, types.int64, n_rows)
    marks = array_at(numbers + 20 * n_rows, types.int64, n_rows)
    line = numbers + 28 * n_rows
    sums, scores = array_at(y, types.float32, (n_rows, wide)), array_at(s, types.float32, (CELLS, n_rows))
    maxima, totals = array_at(numbers, types.float32, n_rows), array_at(numbers + 4 * n_rows, types.float32, n_rows)
    shrunk = array_at(numbers + 8 * n_rows, types.float32, n_rows)
    array_at(v, types.float32, CELLS * wide)[:] = 0
    in_group = of.k.shared[0] * of.n_queries
    n_tiles = -(-in_group // n_rows)
    for unit in range(begin, end):
        tile, group, i3 = index_of(unit, n_tiles, of.n_groups)
        first_row, cells_head = tile * n_rows, group * of.k.shared[0]
        used = min(n_rows, in_group - first_row)
        _load_queries(of, group, i3, first_row, used, q, masks, marks, line)
        queries_finite = all_finite(q, dk * n_rows)
        maxima[:] = types.float32(LOWEST)
        totals[:] = 0
        sums[:] = 0
        for first in range(0, n_cells, CELLS):
            count = min(CELLS, n_cells - first)
            some, kept = types.uint8(0), types.uint8(1)
            if of.mask.address:
                bits = _marked(of, marks, used, first)
                some, kept = bits & types.uint8(_SOME), bits & types.uint8(_KEPT)
                if kept == 0 and of.chunk == 0:
                    continue
            for i in range(count):
                decode_key(of, row_at(of.k, first + i, cells_head, i3), k + 4 * i * dk)
                decode(of.v, row_at(of.v, first + i, cells_head, i3), v + 4 * i * wide, dv)
            finite = (some == 0 and of.chunk == 0) or all_finite(v, count * wide)  # else every cell counts
            if kept == 0 and finite and queries_finite and all_finite(k, count * dk):
                continue
            scores[:] = 0
            multiply(k, 4 * dk, 4, q, 4 * n_rows, s, 4 * n_rows, -(-count // ROWS) * ROWS, dk, n_rows)
            capped(of, s, count * n_rows)
            spoilt = of.chunk and not all_finite(s, count * n_rows)
            if some != 0:
                _add_masks(of, group, first_row, used, masks, first, count, scores)
            if spoilt or kept == 0:
                _leave_out(of, group, i3, first_row, used, first, count, scores)
            for r in range(0, n_rows, LANES):
                weigh_columns(s + 4 * r, 4 * n_rows, count, numbers + 4 * r, 4 * n_rows)
            for r in range(n_rows):
                if shrunk[r] != 1:
                    for d in range(wide):
                        sums[r, d] *= shrunk[r]
            if finite:
                multiply(s, 4, 4 * n_rows, v, 4 * wide, y, 4 * wide, n_rows, count, wide)
            else:
                _add_one_by_one(of, group, i3, first_row, used, masks, first, count, scores, v, sums)
        _finish_rows(of, group, i3, first_row, used, maxima, totals, sums)
    return 0


def _source(x: Tensor, q: Tensor, code: int, to_float: int) -> Source:
    packed, n_packed = (0, 0) if x.packed is None else (x.packed.address, x.packed.n_blocks)
    return Source(x.place, (q.ne[2] // x.ne[2], q.ne[3] // x.ne[3]), code, to_float, packed, n_packed)


def attention(
    dst: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float,
    by_head: Floats | None,
    query_type: str,
    numerics: Numerics,
) -> Attention | None:
    """What the kernels are told of a node; None if a type has no kernel.

    by_head     the slope of each head, which the mask is multiplied by
    query_type  the type that q is rounded to
    """
    n_minima = q.ne[0] // 32 if query_type == "q8_1" else 0
    code = f"q8_0 {numerics.rounding}" if query_type in ("q8_0", "q8_1") else query_type
    to_float = {type: numerics.to_float.get(type, 0) for type in {k.type, v.type} - {*CODES}}
    if code not in CODES or 0 in to_float.values():
        return None
    factor = np.float32(scale) / np.float32(softcap) if softcap else np.float32(scale)
    keys, gains = (_source(x, q, CODES.get(x.type, -1), to_float.get(x.type, 0)) for x in (k, v))
    return Attention(
        dk=q.ne[0] + -(-n_minima // LANES) * LANES,
        dv=v.ne[0],
        n_cells=k.ne[1],
        n_queries=q.ne[1],
        n_heads=q.ne[2],
        n_sequences=q.ne[3],
        n_groups=k.ne[2],
        q=_source(q, q, CODES[code], 0),
        k=keys,
        v=gains,
        mask=Place(0, (0, 0, 0, 0)) if mask is None else mask.place,
        mask_ne=(0, 0) if mask is None else mask.ne[2:],
        sinks=0 if sinks is None else sinks.address,
        slopes=0 if by_head is None else by_head.ctypes.data,
        scale=factor,
        softcap=np.float32(softcap),
        dst=dst.address,
        n_minima=n_minima,
        q8=ROUNDINGS.index(numerics.rounding),
    )


def bind_attend(of: Attention, chunk: int, keep: object) -> Job | None:
    """The work of a node; None if k and v are not shared by the same heads.

    chunk  rows of a chunk of ggml's, if its CPU multiplies matrices; else 0
    """
    if of.k.shared[0] != of.v.shared[0]:
        return None
    in_group = of.n_queries * of.k.shared[0]
    masked = of.n_queries * prod(of.mask_ne)
    marks = np.empty((masked, -(-of.n_cells // CELLS)), np.uint8)
    n_rows = min(_ROWS, -(-in_group // LANES) * LANES)
    of = of._replace(chunk=chunk, n_rows=n_rows, marks=marks.ctypes.data)
    n_units = -(-in_group // of.n_rows) * of.n_groups * of.n_sequences
    work = Work(attend, of, n_units, cost_of(of) // 2, scratch=scratch_of(of), keep=(keep, marks))
    return Job(Work(mark_masks, of, masked, 2 * masked * of.n_cells), work) if masked else Job(work)


def cost_of(of: Attention) -> int:
    """Multiplications and additions of a node."""
    return of.n_queries * of.n_heads * of.n_sequences * of.n_cells * (of.dk + of.dv)
