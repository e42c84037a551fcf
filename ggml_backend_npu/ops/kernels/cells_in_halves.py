"""The kernels of FLASH_ATTN_EXT (`ops.attention`) if v and its sums are float16: cell after cell of a query."""

from __future__ import annotations

import math

import numpy as np

from ggml_backend_npu.ops.kernels.cells import (
    CELLS,
    EXCLUDED,
    Attention,
    bytes_to_round,
    capped,
    cost_of,
    decode,
    dst_row,
    float_at,
    load_query,
    mask_row,
    row_at,
    slope_of,
)
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    f16_to_f32,
    f32_to_f16_payload,
    float_bits,
    fused_multiply_add,
    inlined,
)
from quant.kernels.late import types
from quant.kernels.matrices import dot
from quant.kernels.orders import dots_f16
from quant.kernels.records import index_of, record_at
from quant.kernels.threads import Job, Work
from quant.rows import decode_run
from quant.runs import F16

_IN_HALVES = 8  # how much longer than to move a float it takes to multiply and add one in halves


@inlined
def _as_half(x):
    """x rounded to float16, as float32."""
    return f16_to_f32(f32_to_f16_payload(x))


@inlined
def _half_of_sum(a, b):
    """Bits of a + b as a float16, rounded once. Between, float32 has an odd last bit where it rounds the sum: then it
    lies on no boundary of float16."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # what total lacks, or NaN
    bits = types.int64(float_bits(total))
    if error > 0 or error < 0:
        bits = (bits - types.int64((error > 0) != (total > 0))) | 1
    return f32_to_f16_payload(bits_float(types.uint32(bits)))


@inlined
def _shrink_halves(y, n, n_narrow, factor):
    halves, narrow = array_at(y, types.uint16, n), _as_half(factor)
    for i in range(n_narrow):
        halves[i] = f32_to_f16_payload(f16_to_f32(halves[i]) * narrow)
    for i in range(n_narrow, n):
        halves[i] = f32_to_f16_payload(f16_to_f32(halves[i]) * factor)


@inlined
def _add_to_halves(y, v, n, n_narrow, weight):
    halves, row, narrow = array_at(y, types.uint16, n), array_at(v, types.uint16, n), _as_half(weight)
    for i in range(n_narrow):
        halves[i] = _half_of_sum(f16_to_f32(row[i]) * narrow, f16_to_f32(halves[i]))
    for i in range(n_narrow, n):
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
def _finish(of, row, found):
    """Writes dst of a row (query, head, sequence): the float32 sums of v, divided by the sum."""
    i1, head, i3 = index_of(row, of.n_queries, of.n_heads)
    dst = dst_row(of, i1, head, i3)
    inverse = types.float32(1) / found[1] if found[1] != 0 else types.float32(0)
    for d in range(of.dv):
        dst[d] = found[2 + d] * inverse


def scratch_in_halves(of: Attention) -> int:
    """Bytes that `attend_in_halves` works in: a query, a key, scores, weights, what q is rounded in, sums."""
    to_round: int = bytes_to_round(of.dk)
    return 8 * of.dk + 8 * CELLS + to_round + 2 * of.dv


@compiled
def attend_in_halves(p, begin, end, scratch):
    """A unit is one part of the cells of one row (query, head, sequence). v and its sums are float16.

    `join_parts` joins the parts, unless there is only one: n_parts is 0 then.
    """
    of = record_at(p, Attention)
    dk, dv, n_cells, n_parts = of.dk, of.dv, of.n_cells, max(of.n_parts, 1)
    size = -(-n_cells // n_parts)
    query = scratch
    key = query + 4 * dk
    y = key + 4 * dk
    work = y + 8 * CELLS
    to = work + bytes_to_round(dk)
    scores, weights = array_at(y, types.float32, CELLS), array_at(y + 4 * CELLS, types.float32, CELLS)
    for unit in range(begin, end):
        turn, row = unit % n_parts, unit // n_parts
        i1, head, i3 = index_of(row, of.n_queries, of.n_heads)
        load_query(of, i1, head, i3, query, work)
        mask, slope = mask_row(of, i1, head, i3), slope_of(of, head)
        maximum, total = types.float32(-np.inf), types.float32(0)
        array_at(to, types.uint16, dv)[:] = 0
        last = min((turn + 1) * size, n_cells)
        for first in range(turn * size, last, CELLS):
            count = min(CELLS, last - first)
            for i in range(count):
                if mask and array_at(mask + 2 * (first + i), types.uint16, 1)[0] == EXCLUDED:
                    continue
                at = row_at(of.k, first + i, head, i3)
                if of.k.code == F16:
                    dots_f16(at, 0, query, dk, y + 4 * i, 1)
                    scores[i] *= of.scale
                else:
                    decode(of.k, at, key, dk)
                    scores[i] = of.scale * dot(key, query, dk)
            capped(of, y, count)
            if mask:
                added = array_at(mask + 2 * first, types.uint16, count)
                for i in range(count):
                    value = f16_to_f32(added[i])
                    scores[i] = value if added[i] == EXCLUDED else scores[i] + slope * value
            highest = maximum
            for i in range(count):
                highest = scores[i] if scores[i] > highest else highest
                weights[i] = scores[i] - highest
            for i in range(count):
                weights[i] = types.float32(math.exp(weights[i]))
            for i in range(count):
                if mask and array_at(mask + 2 * (first + i), types.uint16, 1)[0] == EXCLUDED:
                    continue
                if scores[i] > maximum:
                    shrunk = types.float32(math.exp(maximum - scores[i]))
                    maximum, weights[i] = scores[i], types.float32(1)
                    total = fused_multiply_add(total, shrunk, types.float32(1))
                    _shrink_halves(to, dv, of.n_narrow, shrunk)
                else:
                    total += weights[i]
                _add_to_halves(to, row_at(of.v, first + i, head, i3), dv, of.n_narrow, weights[i])
        part = of.parts + 4 * unit * (2 + dv)
        found = array_at(part, types.float32, 2 + dv)
        found[0], found[1] = maximum, total
        decode_run(F16, to, 0, 0, part + 8, dv)
        if of.sinks and turn == 0:
            _add_sink(found, dv, float_at(of.sinks + 4 * head))
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


def bind_attend_in_halves(of: Attention, n_parts: int, step: int, keep: object) -> Job:
    """The works of a node, whose rows are added up in n_parts parts that are joined at the end; 0: in one.

    step  `Numerics.halves`
    """
    n_rows = of.n_queries * of.n_heads * of.n_sequences
    parts = np.empty((n_rows, max(n_parts, 1), 2 + of.dv), np.float32)
    of = of._replace(parts=parts.ctypes.data, n_parts=n_parts, n_narrow=of.dv // step * step if step else 0)
    n_units, kept = n_rows * max(n_parts, 1), (keep, parts)
    work = Work(attend_in_halves, of, n_units, _IN_HALVES * cost_of(of), scratch=scratch_in_halves(of), keep=kept)
    return Job(work, Work(join_parts, of, n_rows, scratch=4 * (2 + of.dv))) if n_parts else Job(work)
