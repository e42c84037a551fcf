"""The kernel of FLASH_ATTN_EXT (`ops.attention`) for many queries: cells and queries in blocks, as matrices."""

from __future__ import annotations

from math import prod

import numpy as np

from ggml_backend_npu.ops.kernels.cells import (
    CELLS,
    EXCLUDED,
    Attention,
    all_finite,
    bytes_to_round,
    capped,
    cost_of,
    decode,
    decode_key,
    dst_row,
    float_at,
    load_query,
    mark,
    mask_row,
    query_of,
    row_at,
    slope_of,
)
from ggml_backend_npu.ops.kernels.cells_turned import add_masks, add_masks_or_exclude, turn_rows, widen_rows
from ggml_backend_npu.ops.kernels.exponentials import v_exp, weigh_columns
from ggml_backend_npu.ops.kernels.softmax import LOWEST
from quant.kernels.jit import array_at, compiled, f16_to_f32, float_bits, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.matrices import LANES, ROWS, multiply
from quant.kernels.records import index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import F16

_ROWS = 64  # of queries that are multiplied together, at most
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
    """Bytes that `attend` works in: queries, keys, values, their sums, scores; for each row four numbers and the
    addresses of its mask and of its first mark; LANES queries, and what one is rounded in."""
    wide: int = _padded(of.dv)
    to_round: int = bytes_to_round(of.dk)
    floats = of.dk * of.n_rows + CELLS * (of.dk + wide + of.n_rows) + of.n_rows * (wide + 4) + LANES * of.dk
    return 4 * floats + 16 * of.n_rows + to_round


@inlined
def _load_queries(of, group, i3, first_row, used, q, slopes, masks, marks, lines):
    """Puts `used` queries, scaled, into the columns of q, and their slopes and the addresses of their masks and first
    marks into slopes, masks and marks; what no query has is 0, or as of the last one."""
    dk, n_rows, work = of.dk, of.n_rows, lines + 4 * LANES * of.dk
    queries, some = array_at(q, types.float32, (dk, n_rows)), array_at(lines, types.float32, (LANES, dk))
    turned = dk // LANES * LANES
    for begin in range(0, n_rows, LANES):
        for r in range(begin, begin + LANES):
            i1, head = query_of(of, group, first_row + min(r, used - 1))
            load_query(of, i1, head, i3, lines + 4 * dk * (r - begin), work)
            if r >= used:
                some[r - begin] = 0
            slopes[r], masks[r] = slope_of(of, head), mask_row(of, i1, head, i3)
            if of.mask.address:
                marks[r] = _marks_of(of, i1, head % of.mask_ne[0], i3 % of.mask_ne[1])
        to = q + 4 * begin
        turn_rows(lines, 4 * dk, to, 4 * n_rows, turned // LANES, types.int64(float_bits(of.scale)))
        for d in range(turned, dk):
            for r in range(LANES):
                queries[d, begin + r] = of.scale * some[r, d]


@inlined
def _marked(of, marks, used, first):
    """The bits of the marks of `used` rows, of the tile that begins with a cell. marks: the address of each one's
    first."""
    found, further = types.uint8(0), first // CELLS * of.n_queries
    for r in range(used):
        found |= array_at(marks[r] + further, types.uint8, 1)[0]
    return found


@inlined
def _add_masks(of, used, slopes, masks, first, count, scores):
    """Adds masks, times their slopes, to scores; where ggml's CPU takes cell by cell, -inf excludes a cell."""
    n_rows, turned = of.n_rows, count // LANES * LANES
    y, at, slopes_at = scores.ctypes.data, masks.ctypes.data, slopes.ctypes.data
    for r in range(0, used, LANES):
        if of.chunk == 0:
            add_masks_or_exclude(at + 8 * r, 2 * first, slopes_at + 4 * r, y + 4 * r, 4 * n_rows, turned // LANES)
        else:
            add_masks(at + 8 * r, 2 * first, slopes_at + 4 * r, y + 4 * r, 4 * n_rows, turned // LANES)
    for r in range(used):
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(turned, count):
            value = f16_to_f32(mask[i])
            excluded = mask[i] == EXCLUDED and of.chunk == 0
            scores[i, r] = value if excluded else scores[i, r] + slopes[r] * value


@inlined
def _load_cells(of, group, i3, first, count, k, v):
    """Keys and values of `count` cells as float32."""
    head, dk, dv, wide = group * of.k.shared[0], of.dk, of.dv, _padded(of.dv)
    key, value = row_at(of.k, first, head, i3), row_at(of.v, first, head, i3)
    if of.k.code == F16 and of.k.place.nb[0] == 2 and dk % LANES == 0:
        widen_rows(key, of.k.place.nb[1], k, 4 * dk, count, dk // LANES)
    else:
        for i in range(count):
            decode_key(of, key + i * of.k.place.nb[1], k + 4 * i * dk)
    if of.v.code == F16 and of.v.place.nb[0] == 2 and dv % LANES == 0:
        widen_rows(value, of.v.place.nb[1], v, 4 * wide, count, dv // LANES)
    else:
        for i in range(count):
            decode(of.v, value + i * of.v.place.nb[1], v + 4 * i * wide, dv)


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
    dk, n_cells, n_rows, wide = of.dk, of.n_cells, of.n_rows, _padded(of.dv)
    q = scratch
    k = q + 4 * dk * n_rows
    v = k + 4 * CELLS * dk
    y = v + 4 * CELLS * wide
    s = y + 4 * n_rows * wide
    numbers = s + 4 * CELLS * n_rows
    slopes = array_at(numbers + 12 * n_rows, types.float32, n_rows)
    masks = array_at(numbers + 16 * n_rows, types.int64, n_rows)
    marks = array_at(numbers + 24 * n_rows, types.int64, n_rows)
    lines = numbers + 32 * n_rows
    sums, scores = array_at(y, types.float32, (n_rows, wide)), array_at(s, types.float32, (CELLS, n_rows))
    maxima, totals = array_at(numbers, types.float32, n_rows), array_at(numbers + 4 * n_rows, types.float32, n_rows)
    shrunk = array_at(numbers + 8 * n_rows, types.float32, n_rows)
    array_at(v, types.float32, CELLS * wide)[:] = 0
    in_group = of.k.shared[0] * of.n_queries
    n_tiles = -(-in_group // n_rows)
    for unit in range(begin, end):
        tile, group, i3 = index_of(unit, n_tiles, of.n_groups)
        first_row = tile * n_rows
        used = min(n_rows, in_group - first_row)
        _load_queries(of, group, i3, first_row, used, q, slopes, masks, marks, lines)
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
            _load_cells(of, group, i3, first, count, k, v)
            finite = (some == 0 and of.chunk == 0) or all_finite(v, count * wide)  # else every cell counts
            if kept == 0 and finite and queries_finite and all_finite(k, count * dk):
                continue
            scores[:] = 0
            multiply(k, 4 * dk, 4, q, 4 * n_rows, s, 4 * n_rows, -(-count // ROWS) * ROWS, dk, n_rows)
            capped(of, s, count * n_rows)
            spoilt = of.chunk and not all_finite(s, count * n_rows)
            if some != 0:
                _add_masks(of, used, slopes, masks, first, count, scores)
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
