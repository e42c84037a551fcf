"""The kernels of FLASH_ATTN_EXT (`ops.attention`): the cells of a query, some at a time."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.exponentials import v_exp
from ggml_backend_npu.ops.softmax import LOWEST
from ggml_backend_npu.registry.entry import Call
from quant.kernels.jit import (
    array_at,
    compiled,
    copy,
    f16_to_f32,
    f32_to_f16_payload,
    fused_multiply_add,
    inlined,
)
from quant.kernels.matrices import LANES, ROWS, dot, multiply
from quant.kernels.orders import dots_f16
from quant.kernels.records import Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.rows import CODES, decode_row, decode_run, round_run
from quant.runs import F16

Floats = NDArray[np.float32]

_CELLS = 64  # whose scores are computed together
_ROWS = 64  # of queries that they are computed for, at most
_IN_HALVES = 8  # how much longer than to move a float it takes to multiply and add one in halves
_EXCLUDED = 0xFC00  # -inf as a float16


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
    """dk, dv are the row sizes of k and v. An address of 0 means that there is none.

    mask_ne  dimensions 2 and 3 of the mask
    sinks, slopes  addresses of one float32 per head
    scale    of a score; softcap: the cap on it after that, 0 for none
    dst      its address; dst has no gaps
    parts, n_parts    of `attend_in_halves`: where a row's sums are stored, and how many parts; 0: it finishes `dst`
    n_groups, n_rows  of `attend`: heads of k, and the most rows of a unit
    """

    dk: int
    dv: int
    n_cells: int
    n_queries: int
    n_heads: int
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
    parts: int = 0
    n_parts: int = 0
    n_groups: int = 0
    n_rows: int = 0


@inlined
def _float_at(address):
    return array_at(address, types.float32, 1)[0]


@inlined
def _row(source, i1, head, i3):
    """Address of a row of q, k or v."""
    return row_of(source.place, i1, head // source.shared[0], i3 // source.shared[1])


@inlined
def _load_query(of, i1, head, i3, query, work):
    """A row of q, rounded, to `query`."""
    copy(_row(of.q, i1, head, i3), query, 4 * of.dk)
    round_run(of.q.code, query, work, of.dk)


@inlined
def _decode(source, row, y, n):
    """A row of k or v as float32."""
    decode_row(source.code, source.to_float, row, source.packed, source.n_packed, y, n)


@inlined
def _mask_row(of, i1, head, i3):
    """Address of a query's row of the mask; 0 without a mask."""
    if of.mask.address == 0:
        return types.int64(0)
    return row_of(of.mask, i1, head % of.mask_ne[0], i3 % of.mask_ne[1])


@inlined
def _slope(of, head):
    return _float_at(of.slopes + 4 * head) if of.slopes else types.float32(1)


@inlined
def _capped(of, y, n):
    """n scores that are already divided by the cap: y = cap * tanh(y), where there is a cap."""
    cap = of.softcap
    if cap != 0:
        scores = array_at(y, types.float32, n)
        for i in range(n):
            scores[i] = cap * types.float32(math.tanh(scores[i]))


@inlined
def _shrink_halves(y, n, factor):
    halves = array_at(y, types.uint16, n)
    for i in range(n):
        halves[i] = f32_to_f16_payload(f16_to_f32(halves[i]) * factor)


@inlined
def _add_to_halves(y, v, n, weight):
    halves, row = array_at(y, types.uint16, n), array_at(v, types.uint16, n)
    for i in range(n):
        halves[i] = f32_to_f16_payload(fused_multiply_add(f16_to_f32(row[i]), weight, f16_to_f32(halves[i])))


@inlined
def _add_sink(found, dv, sink):
    """Adds the sink to a maximum, a sum and the float32 sums of v."""
    if sink > found[0]:
        shrunk = types.float32(math.exp(found[0] - sink))
        found[0] = sink
        found[1] = found[1] * shrunk + types.float32(1)
        for d in range(dv):
            found[2 + d] *= shrunk
    else:
        found[1] += types.float32(math.exp(sink - found[0]))


@inlined
def _dst_row(of, i1, head, i3):
    return array_at(of.dst + 4 * of.dv * (head + of.n_heads * (i1 + of.n_queries * i3)), types.float32, of.dv)


@inlined
def _finish(of, row, found):
    """Writes dst of a row (query, head, sequence): the float32 sums of v, divided by the sum."""
    i1, head, i3 = index_of(row, of.n_queries, of.n_heads)
    dst = _dst_row(of, i1, head, i3)
    inverse = types.float32(1) / found[1] if found[1] != 0 else types.float32(0)
    for d in range(of.dv):
        dst[d] = found[2 + d] * inverse


@inlined
def _bytes_to_round(dk: int) -> int:
    """Bytes that `round_run` works in, for a row of q."""
    return 2 * dk + 34


def scratch_in_halves(of: Attention) -> int:
    """Bytes that `attend_in_halves` works in: a query, a key, scores, weights, what q is rounded in, sums."""
    to_round: int = _bytes_to_round(of.dk)
    return 8 * of.dk + 8 * _CELLS + to_round + 2 * of.dv


@compiled
def attend_in_halves(p, begin, end, scratch):
    """A unit is one part of the cells of one row (query, head, sequence). v and its sums are float16.

    `join_parts` joins the parts, unless there is only one, where n_parts is 0.
    """
    of = record_at(p, Attention)
    dk, dv, n_cells, n_parts = of.dk, of.dv, of.n_cells, max(of.n_parts, 1)
    size = -(-n_cells // n_parts)
    query = scratch
    key = query + 4 * dk
    y = key + 4 * dk
    work = y + 8 * _CELLS
    to = work + _bytes_to_round(dk)
    scores, weights = array_at(y, types.float32, _CELLS), array_at(y + 4 * _CELLS, types.float32, _CELLS)
    for unit in range(begin, end):
        turn, row = unit % n_parts, unit // n_parts
        i1, head, i3 = index_of(row, of.n_queries, of.n_heads)
        _load_query(of, i1, head, i3, query, work)
        mask, slope = _mask_row(of, i1, head, i3), _slope(of, head)
        maximum, total = types.float32(-np.inf), types.float32(0)
        array_at(to, types.uint16, dv)[:] = 0
        last = min((turn + 1) * size, n_cells)
        for first in range(turn * size, last, _CELLS):
            count = min(_CELLS, last - first)
            for i in range(count):
                if mask and array_at(mask + 2 * (first + i), types.uint16, 1)[0] == _EXCLUDED:
                    continue
                at = _row(of.k, first + i, head, i3)
                if of.k.code == F16:
                    dots_f16(at, 0, query, dk, y + 4 * i, 1)
                    scores[i] *= of.scale
                else:
                    _decode(of.k, at, key, dk)
                    scores[i] = of.scale * dot(key, query, dk)
            _capped(of, y, count)
            if mask:
                added = array_at(mask + 2 * first, types.uint16, count)
                for i in range(count):
                    value = f16_to_f32(added[i])
                    scores[i] = value if added[i] == _EXCLUDED else scores[i] + slope * value
            highest = maximum
            for i in range(count):
                highest = max(highest, scores[i])
                weights[i] = scores[i] - highest
            for i in range(count):
                weights[i] = types.float32(math.exp(weights[i]))
            for i in range(count):
                if scores[i] == types.float32(-np.inf):
                    continue
                if scores[i] > maximum:
                    shrunk = types.float32(math.exp(maximum - scores[i]))
                    maximum = scores[i]
                    total = fused_multiply_add(total, shrunk, types.float32(1))
                    _shrink_halves(to, dv, shrunk)
                else:
                    total += weights[i]
                _add_to_halves(to, _row(of.v, first + i, head, i3), dv, weights[i])
        part = of.parts + 4 * unit * (2 + dv)
        found = array_at(part, types.float32, 2 + dv)
        found[0], found[1] = maximum, total
        decode_run(F16, to, 0, 0, part + 8, dv)
        if of.sinks and turn == 0:
            _add_sink(found, dv, _float_at(of.sinks + 4 * head))
        if of.n_parts == 0:
            _finish(of, row, found)
    return 0


@compiled
def join_parts(p, begin, end, scratch):
    """A unit is one row, whose parts `attend_in_halves` has stored: a maximum, a sum and the float32 sums of v."""
    of = record_at(p, Attention)
    dv, n_parts = of.dv, of.n_parts
    whole = array_at(scratch, types.float32, 2 + dv)
    for row in range(begin, end):
        whole[:] = types.float32(0)
        whole[0] = types.float32(-np.inf)
        for i in range(n_parts):
            found = array_at(of.parts + 4 * (row * n_parts + i) * (2 + dv), types.float32, 2 + dv)
            if found[1] == 0:
                continue
            highest = max(whole[0], found[0])
            before, now = types.float32(math.exp(whole[0] - highest)), types.float32(math.exp(found[0] - highest))
            whole[0] = highest
            for d in range(1, 2 + dv):
                whole[d] = fused_multiply_add(whole[d], before, found[d] * now)
        _finish(of, row, whole)
    return 0


@inlined
def _mark(masks, n_rows, first, count):
    """What the masks of n_rows rows hold for `count` cells: bits for numbers other than 0, and whether all are -inf."""
    some, kept = types.uint16(0), types.uint16(0)
    for r in range(n_rows):
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            some |= mask[i] & types.uint16(0x7FFF)
            kept |= mask[i] ^ types.uint16(_EXCLUDED)
    return some, kept


@inlined
def _padded(dv):
    """The size of a row of v, rounded up to whole vectors."""
    return -(-dv // LANES) * LANES


def scratch_of(of: Attention) -> int:
    """Bytes that `attend` works in: queries, keys, values, their sums, scores; for each row three numbers and the
    address of its mask; a query and what it is rounded in."""
    wide: int = _padded(of.dv)
    to_round: int = _bytes_to_round(of.dk)
    floats = of.dk * of.n_rows + _CELLS * (of.dk + wide + of.n_rows) + of.n_rows * (wide + 3) + of.dk
    return 4 * floats + 8 * of.n_rows + to_round


@inlined
def _query_of(of, group, row):
    """The query and the head of one of the rows that share a head of k."""
    return row % of.n_queries, group * of.k.shared[0] + row // of.n_queries


@inlined
def _load_queries(of, group, i3, first_row, used, q, masks, line):
    """Puts `used` queries, scaled, into the columns of q, and the addresses of their masks into masks."""
    dk, work = of.dk, line + 4 * of.dk
    queries, query = array_at(q, types.float32, (dk, of.n_rows)), array_at(line, types.float32, dk)
    queries[:] = 0
    for r in range(used):
        i1, head = _query_of(of, group, first_row + r)
        _load_query(of, i1, head, i3, line, work)
        for d in range(dk):
            queries[d, r] = of.scale * query[d]
        masks[r] = _mask_row(of, i1, head, i3)


@inlined
def _add_masks(of, group, first_row, used, masks, first, count, scores):
    for r in range(used):
        _, head = _query_of(of, group, first_row + r)
        slope = _slope(of, head)
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            value = f16_to_f32(mask[i])
            scores[i, r] = value if mask[i] == _EXCLUDED else scores[i, r] + slope * value


@inlined
def _exponentiate(scores, count, n_rows, maxima, totals, shrunk):
    """Turns each row's scores into e ** (score - maximum); where they raise the maximum, what was added up so far
    shrinks: its total here, its sums by the factor `shrunk`."""
    for r in range(n_rows):
        shrunk[r] = maxima[r]
    for i in range(count):
        for r in range(n_rows):
            maxima[r] = scores[i, r] if scores[i, r] > maxima[r] else maxima[r]
    for r in range(n_rows):
        shrunk[r] = v_exp(shrunk[r] - maxima[r])
        totals[r] *= shrunk[r]
    for i in range(count):
        for r in range(n_rows):
            scores[i, r] = v_exp(scores[i, r] - maxima[r])
            totals[r] += scores[i, r]


@inlined
def _finish_rows(of, group, i3, first_row, used, maxima, totals, sums):
    """Writes dst of `used` rows, after adding their sinks."""
    for r in range(used):
        i1, head = _query_of(of, group, first_row + r)
        factor = types.float32(1)
        if of.sinks:
            sink = _float_at(of.sinks + 4 * head)
            highest = max(maxima[r], sink)
            factor = v_exp(maxima[r] - highest)
            totals[r] = totals[r] * factor + v_exp(sink - highest)
        factor = factor / totals[r] if totals[r] != 0 else types.float32(0)
        dst = _dst_row(of, i1, head, i3)
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
    v = k + 4 * _CELLS * dk
    y = v + 4 * _CELLS * wide
    s = y + 4 * n_rows * wide
    numbers = s + 4 * _CELLS * n_rows
    masks = array_at(numbers + 12 * n_rows, types.int64, n_rows)
    line = numbers + 20 * n_rows
    sums, scores = array_at(y, types.float32, (n_rows, wide)), array_at(s, types.float32, (_CELLS, n_rows))
    maxima, totals = array_at(numbers, types.float32, n_rows), array_at(numbers + 4 * n_rows, types.float32, n_rows)
    shrunk = array_at(numbers + 8 * n_rows, types.float32, n_rows)
    array_at(v, types.float32, _CELLS * wide)[:] = 0
    in_group = of.k.shared[0] * of.n_queries
    n_tiles = -(-in_group // n_rows)
    for unit in range(begin, end):
        tile, group, i3 = index_of(unit, n_tiles, of.n_groups)
        first_row, cells_head = tile * n_rows, group * of.k.shared[0]
        used = min(n_rows, in_group - first_row)
        _load_queries(of, group, i3, first_row, used, q, masks, line)
        maxima[:] = types.float32(LOWEST)
        totals[:] = 0
        sums[:] = 0
        for first in range(0, n_cells, _CELLS):
            count = min(_CELLS, n_cells - first)
            some = types.uint16(0)
            if of.mask.address:
                some, kept = _mark(masks, used, first, count)
                if kept == 0:
                    continue
            for i in range(count):
                _decode(of.k, _row(of.k, first + i, cells_head, i3), k + 4 * i * dk, dk)
                _decode(of.v, _row(of.v, first + i, cells_head, i3), v + 4 * i * wide, dv)
            scores[:] = 0
            multiply(k, 4 * dk, 4, q, 4 * n_rows, s, 4 * n_rows, -(-count // ROWS) * ROWS, dk, n_rows)
            _capped(of, s, count * n_rows)
            if some != 0:
                _add_masks(of, group, first_row, used, masks, first, count, scores)
            _exponentiate(scores, count, n_rows, maxima, totals, shrunk)
            for r in range(n_rows):
                if shrunk[r] != 1:
                    for d in range(wide):
                        sums[r, d] *= shrunk[r]
            multiply(s, 4, 4 * n_rows, v, 4 * wide, y, 4 * wide, n_rows, count, wide)
        _finish_rows(of, group, i3, first_row, used, maxima, totals, sums)
    return 0


def _source(x: Tensor, q: Tensor, code: int, to_float: int) -> Source:
    packed, n_packed = (0, 0) if x.packed is None else (x.packed.address, x.packed.n_blocks)
    return Source(x.place, (q.ne[2] // x.ne[2], q.ne[3] // x.ne[3]), code, to_float, packed, n_packed)


def attended(
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
    in_halves: bool,
    n_sums: int,
    numerics: Numerics,
) -> Call | None:
    """The call that computes a node; None where a type has no kernel.

    by_head     the slope of each head, which the mask is multiplied by
    query_type  the type that q is rounded to
    in_halves   whether the sums of v are float16: in n_sums parts, joined at the end, or 0
    """
    code = f"q8_0 {numerics.rounding}" if query_type == "q8_0" else query_type
    to_float = {type: numerics.to_float.get(type, 0) for type in {k.type, v.type} - {*CODES}}
    if code not in CODES or 0 in to_float.values():
        return None
    factor = np.float32(scale) / np.float32(softcap) if softcap else np.float32(scale)
    keys, gains = (_source(x, q, CODES.get(x.type, -1), to_float.get(x.type, 0)) for x in (k, v))
    of = Attention(
        dk=q.ne[0],
        dv=v.ne[0],
        n_cells=k.ne[1],
        n_queries=q.ne[1],
        n_heads=q.ne[2],
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
    )
    n_rows = q.ne[1] * q.ne[2] * q.ne[3]
    cost = n_rows * k.ne[1] * (q.ne[0] + v.ne[0])
    if in_halves:
        return _in_halves(of, n_rows, n_sums, _IN_HALVES * cost, by_head)
    if keys.shared[0] != gains.shared[0]:
        return None
    in_group = q.ne[1] * keys.shared[0]
    of = of._replace(n_groups=k.ne[2], n_rows=min(_ROWS, -(-in_group // LANES) * LANES))
    n_units = -(-in_group // of.n_rows) * of.n_groups * q.ne[3]
    return Job(Work(attend, of, n_units, cost // 2, scratch=scratch_of(of), keep=by_head))


def _in_halves(of: Attention, n_rows: int, n_parts: int, cost: int, keep: object) -> Job:
    """The works of a node, whose rows are added up in n_parts parts that are joined at the end; 0: in one."""
    parts = np.empty((n_rows, max(n_parts, 1), 2 + of.dv), np.float32)
    of = of._replace(parts=parts.ctypes.data, n_parts=n_parts)
    n_units, kept = n_rows * max(n_parts, 1), (keep, parts)
    work = Work(attend_in_halves, of, n_units, cost, scratch=scratch_in_halves(of), keep=kept)
    return Job(work, Work(join_parts, of, n_rows, scratch=4 * (2 + of.dv))) if n_parts else Job(work)
