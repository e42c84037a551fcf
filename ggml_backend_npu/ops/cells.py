"""The kernels of FLASH_ATTN_EXT (`ops.attention`): a query's cells, some at a time."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import Numerics
from ggml_backend_npu.ops.exponentials import v_exp
from ggml_backend_npu.ops.softmax import LOWEST
from ggml_backend_npu.registry import Call
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    copy,
    f16_to_f32,
    f32_to_f16_payload,
    fused_multiply_add,
    inlined,
    keep,
)
from quant.kernels.matrices import LANES, ROWS, dot, multiply
from quant.kernels.orders import dots_f16
from quant.kernels.threads import Job, Work
from quant.runs import CODES, F16, decode_row, decode_run, round_run

Floats = NDArray[np.float32]

_CELLS = 64  # whose scores are computed together
_ROWS = 64  # of queries that they are computed for, at most
_IN_HALVES = 8  # how much longer than to move a float it takes to multiply and add one in halves
_EXCLUDED = 0xFC00  # -inf as a float16

# the parameters of both kernels, in places of an int64 array; q, k and v are sides: an address, nb1 to nb3, how many of
# q's heads and sequences share one of theirs, and for `decode_row` a type's code, ggml's to_float, what is packed
_DK, _DV, _N_CELLS, _N_QUERIES, _N_HEADS, _N_GROUPS, _N_ROWS = range(7)
_Q, _K, _V = 7, 17, 27
_ADDRESS, _NB, _SHARED, _CODE, _TO_FLOAT, _PACKED = 0, 0, 4, 6, 7, 8  # _NB: of nb0, whose place the address has
_MASK, _MASK_NE, _SINKS, _SLOPES = 37, 41, 43, 44
_SCALE, _SOFTCAP = 45, 46
_DST, _PARTS, _N_PARTS = 47, 48, 49
_PARAMETERS = 50


@inlined
def _float_at(address):
    return array_at(address, types.float32, 1)[0]


@inlined
def _row(p, side, i1, head, i3):
    """Where a row of q, k or v begins."""
    i2, i3 = head // p[side + _SHARED], i3 // p[side + _SHARED + 1]
    return p[side + _ADDRESS] + i1 * p[side + _NB + 1] + i2 * p[side + _NB + 2] + i3 * p[side + _NB + 3]


@inlined
def _decode(p, side, row, y, n):
    """A row of k or v as float32."""
    decode_row(p[side + _CODE], p[side + _TO_FLOAT], row, p[side + _PACKED], p[side + _PACKED + 1], y, n)


@inlined
def _mask_row(p, i1, head, i3):
    """Where a query's row of the mask begins; 0 without one."""
    if p[_MASK] == 0:
        return types.int64(0)
    i2, i3 = head % p[_MASK_NE], i3 % p[_MASK_NE + 1]
    return p[_MASK] + i1 * p[_MASK + 1] + i2 * p[_MASK + 2] + i3 * p[_MASK + 3]


@inlined
def _slope(p, head):
    return _float_at(p[_SLOPES] + 4 * head) if p[_SLOPES] else types.float32(1)


@inlined
def _capped(p, y, n):
    """n scores, divided by the cap already: y = cap * tanh(y), where there is a cap."""
    cap = bits_float(types.uint32(p[_SOFTCAP]))
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
    """The sink to a maximum, a sum and float32 times v."""
    if sink > found[0]:
        shrunk = types.float32(math.exp(found[0] - sink))
        found[0] = sink
        found[1] = found[1] * shrunk + types.float32(1)
        for d in range(dv):
            found[2 + d] *= shrunk
    else:
        found[1] += types.float32(math.exp(sink - found[0]))


@inlined
def _finish(p, row, found):
    """dst of a row (query, head, sequence): float32 times v, divided by the sum."""
    dv = p[_DV]
    i1, head, i3 = row % p[_N_QUERIES], row // p[_N_QUERIES] % p[_N_HEADS], row // p[_N_QUERIES] // p[_N_HEADS]
    dst = array_at(p[_DST] + 4 * dv * (head + p[_N_HEADS] * (i1 + p[_N_QUERIES] * i3)), types.float32, dv)
    inverse = types.float32(1) / found[1] if found[1] != 0 else types.float32(0)
    for d in range(dv):
        dst[d] = found[2 + d] * inverse


@compiled
def attend_in_halves(parameters, begin, end):
    """Units [begin, end), each a part of the cells of a row (query, head, sequence): v and its sums are float16.

    The parts are put together by `join_parts`, unless there is one for all threads, as where n_parts is 0.
    """
    p = array_at(parameters, types.int64, _PARAMETERS)
    dk, dv, n_parts = p[_DK], p[_DV], max(p[_N_PARTS], 1)
    scale = bits_float(types.uint32(p[_SCALE]))
    size = -(-p[_N_CELLS] // n_parts)
    floats, halves = np.empty(2 * dk + 2 * _CELLS, np.float32), np.empty(dk + 17, np.uint16)
    sums = np.empty(dv, np.uint16)
    query = types.int64(floats.ctypes.data)
    key, y, work, to = query + 4 * dk, query + 8 * dk, types.int64(halves.ctypes.data), types.int64(sums.ctypes.data)
    scores, weights = array_at(y, types.float32, _CELLS), array_at(y + 4 * _CELLS, types.float32, _CELLS)
    for unit in range(begin, end):
        turn, row = unit % n_parts, unit // n_parts
        i1, head, i3 = row % p[_N_QUERIES], row // p[_N_QUERIES] % p[_N_HEADS], row // p[_N_QUERIES] // p[_N_HEADS]
        copy(_row(p, _Q, i1, head, i3), query, 4 * dk)
        round_run(p[_Q + _CODE], query, work, dk)
        mask, slope = _mask_row(p, i1, head, i3), _slope(p, head)
        maximum, total = types.float32(-np.inf), types.float32(0)
        sums[:] = 0
        last = min((turn + 1) * size, p[_N_CELLS])
        for first in range(turn * size, last, _CELLS):
            count = min(_CELLS, last - first)
            for i in range(count):
                if mask and array_at(mask + 2 * (first + i), types.uint16, 1)[0] == _EXCLUDED:
                    continue
                at = _row(p, _K, first + i, head, i3)
                if p[_K + _CODE] == F16:
                    dots_f16(at, 0, query, dk, y + 4 * i, 1)
                    scores[i] *= scale
                else:
                    _decode(p, _K, at, key, dk)
                    scores[i] = scale * dot(key, query, dk)
            _capped(p, y, count)
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
                _add_to_halves(to, _row(p, _V, first + i, head, i3), dv, weights[i])
        found = array_at(p[_PARTS] + 4 * unit * (2 + dv), types.float32, 2 + dv)
        found[0], found[1] = maximum, total
        decode_run(F16, to, 0, 0, p[_PARTS] + 4 * unit * (2 + dv) + 8, dv)
        if p[_SINKS] and turn == 0:
            _add_sink(found, dv, _float_at(p[_SINKS] + 4 * head))
        if p[_N_PARTS] == 0:
            _finish(p, row, found)
    keep(floats)
    keep(halves)
    return 0


@compiled
def join_parts(parameters, begin, end):
    """Rows [begin, end), whose parts `attend_in_halves` has left behind: a maximum, a sum and float32 times v."""
    p = array_at(parameters, types.int64, _PARAMETERS)
    dv, n_parts = p[_DV], p[_N_PARTS]
    memory = np.empty(2 + dv, np.float32)
    whole = array_at(types.int64(memory.ctypes.data), types.float32, 2 + dv)
    for row in range(begin, end):
        whole[:] = types.float32(0)
        whole[0] = types.float32(-np.inf)
        for i in range(n_parts):
            found = array_at(p[_PARTS] + 4 * (row * n_parts + i) * (2 + dv), types.float32, 2 + dv)
            if found[1] == 0:
                continue
            highest = max(whole[0], found[0])
            before, now = types.float32(math.exp(whole[0] - highest)), types.float32(math.exp(found[0] - highest))
            whole[0] = highest
            for d in range(1, 2 + dv):
                whole[d] = fused_multiply_add(whole[d], before, found[d] * now)
        _finish(p, row, whole)
    keep(memory)
    return 0


@inlined
def _mark(masks, n_rows, first, count):
    """What the masks of n_rows rows have in `count` cells: bits of numbers other than 0, and whether all is -inf."""
    some, kept = types.uint16(0), types.uint16(0)
    for r in range(n_rows):
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            some |= mask[i] & types.uint16(0x7FFF)
            kept |= mask[i] ^ types.uint16(_EXCLUDED)
    return some, kept


@compiled
def attend(parameters, begin, end):
    """Units [begin, end), each some of the rows (query, head) that share a head of k and v.

    Scores lie cell by cell, so that rows are what a vector holds: the product with q, transposed once, gives them so.
    """
    p = array_at(parameters, types.int64, _PARAMETERS)
    dk, dv, n_rows, shared = p[_DK], p[_DV], p[_N_ROWS], p[_K + _SHARED]
    wide = -(-dv // LANES) * LANES
    scale = bits_float(types.uint32(p[_SCALE]))
    work = np.empty(dk + 17, np.uint16)
    line = np.empty(dk, np.float32)
    queries, keys = np.empty((dk, n_rows), np.float32), np.empty((_CELLS, dk), np.float32)
    values, sums = np.zeros((_CELLS, wide), np.float32), np.empty((n_rows, wide), np.float32)
    scores = np.empty((_CELLS, n_rows), np.float32)
    maxima, totals, shrunk = np.empty(n_rows, np.float32), np.empty(n_rows, np.float32), np.empty(n_rows, np.float32)
    masks = np.empty(n_rows, np.int64)
    q, k, v = types.int64(queries.ctypes.data), types.int64(keys.ctypes.data), types.int64(values.ctypes.data)
    s, y = types.int64(scores.ctypes.data), types.int64(sums.ctypes.data)
    n_tiles = -(-shared * p[_N_QUERIES] // n_rows)
    for unit in range(begin, end):
        tile, group, i3 = unit % n_tiles, unit // n_tiles % p[_N_GROUPS], unit // n_tiles // p[_N_GROUPS]
        first_row = tile * n_rows
        used = min(n_rows, shared * p[_N_QUERIES] - first_row)
        queries[:] = 0
        for r in range(used):
            head, i1 = group * shared + (first_row + r) // p[_N_QUERIES], (first_row + r) % p[_N_QUERIES]
            copy(_row(p, _Q, i1, head, i3), types.int64(line.ctypes.data), 4 * dk)
            round_run(p[_Q + _CODE], types.int64(line.ctypes.data), types.int64(work.ctypes.data), dk)
            for d in range(dk):
                queries[d, r] = scale * line[d]
            masks[r] = _mask_row(p, i1, head, i3)
        maxima[:] = types.float32(LOWEST)
        totals[:] = 0
        sums[:] = 0
        for first in range(0, p[_N_CELLS], _CELLS):
            count = min(_CELLS, p[_N_CELLS] - first)
            some = types.uint16(0)
            if p[_MASK]:
                some, kept = _mark(masks, used, first, count)
                if kept == 0:
                    continue
            for i in range(count):
                _decode(p, _K, _row(p, _K, first + i, group * shared, i3), k + 4 * i * dk, dk)
                _decode(p, _V, _row(p, _V, first + i, group * shared, i3), v + 4 * i * wide, dv)
            scores[:] = 0
            multiply(k, 4 * dk, 4, q, 4 * n_rows, s, 4 * n_rows, -(-count // ROWS) * ROWS, dk, n_rows)
            _capped(p, s, count * n_rows)
            if some != 0:
                for r in range(used):
                    slope = _slope(p, group * shared + (first_row + r) // p[_N_QUERIES])
                    mask = array_at(masks[r] + 2 * first, types.uint16, count)
                    for i in range(count):
                        value = f16_to_f32(mask[i])
                        scores[i, r] = value if mask[i] == _EXCLUDED else scores[i, r] + slope * value
            shrunk[:] = maxima
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
            for r in range(n_rows):
                if shrunk[r] != 1:
                    for d in range(wide):
                        sums[r, d] *= shrunk[r]
            multiply(s, 4, 4 * n_rows, v, 4 * wide, y, 4 * wide, n_rows, count, wide)
        for r in range(used):
            head, i1 = group * shared + (first_row + r) // p[_N_QUERIES], (first_row + r) % p[_N_QUERIES]
            factor = types.float32(1)
            if p[_SINKS]:
                sink = _float_at(p[_SINKS] + 4 * head)
                highest = max(maxima[r], sink)
                factor = v_exp(maxima[r] - highest)
                totals[r] = totals[r] * factor + v_exp(sink - highest)
            factor = factor / totals[r] if totals[r] != 0 else types.float32(0)
            at = p[_DST] + 4 * dv * (head + p[_N_HEADS] * (i1 + p[_N_QUERIES] * i3))
            dst = array_at(at, types.float32, dv)
            for d in range(dv):
                dst[d] = sums[r, d] * factor
    keep(keys)
    keep(values)
    return 0


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

    by_head     what the mask is multiplied by
    query_type  what q is rounded to
    in_halves   whether the sums of v are float16: in n_sums parts, put together at the end, or 0
    """
    code = f"q8_0 {numerics.rounding}" if query_type == "q8_0" else query_type
    to_float = {type: numerics.to_float.get(type, 0) for type in {k.type, v.type} - {*CODES}}
    if code not in CODES or 0 in to_float.values():
        return None
    p = np.zeros(_PARAMETERS, np.int64)
    p[_DK], p[_DV], p[_N_CELLS], p[_N_QUERIES], p[_N_HEADS] = q.ne[0], v.ne[0], k.ne[1], q.ne[1], q.ne[2]
    for side, tensor, kind in ((_Q, q, code), (_K, k, k.type), (_V, v, v.type)):
        p[side + _NB + 1 : side + _NB + 4], p[side + _ADDRESS] = tensor.nb[1:], tensor.address
        p[side + _SHARED : side + _SHARED + 2] = q.ne[2] // tensor.ne[2], q.ne[3] // tensor.ne[3]
        p[side + _CODE], p[side + _TO_FLOAT] = CODES.get(kind, -1), to_float.get(tensor.type, 0)
        if tensor.packed is not None:
            p[side + _PACKED : side + _PACKED + 2] = tensor.packed.address, tensor.packed.n_blocks
    if mask is not None:
        p[_MASK], p[_MASK + 1 : _MASK + 4], p[_MASK_NE : _MASK_NE + 2] = mask.address, mask.nb[1:], mask.ne[2:]
    p[_SINKS] = sinks.address if sinks is not None else 0
    p[_SLOPES] = by_head.ctypes.data if by_head is not None else 0
    factor = np.float32(scale) / np.float32(softcap) if softcap else np.float32(scale)
    p[_SCALE], p[_SOFTCAP] = (np.float32(x).view(np.uint32) for x in (factor, softcap))
    p[_DST] = dst.address
    n_rows = q.ne[1] * q.ne[2] * q.ne[3]
    cost = n_rows * k.ne[1] * (q.ne[0] + v.ne[0])
    if in_halves:
        p[_N_PARTS] = n_parts = n_sums
        parts = np.empty((n_rows, max(n_parts, 1), 2 + v.ne[0]), np.float32)
        p[_PARTS] = parts.ctypes.data
        work = Work(attend_in_halves, p, n_rows * max(n_parts, 1), _IN_HALVES * cost, keep=(by_head, parts))
        return Job(work, Work(join_parts, p, n_rows)) if n_parts else Job(work)
    if p[_K + _SHARED] != p[_V + _SHARED]:
        return None
    in_group, p[_N_GROUPS] = q.ne[1] * p[_K + _SHARED], k.ne[2]
    p[_N_ROWS] = min(_ROWS, -(-in_group // LANES) * LANES)
    n_units = -(-in_group // p[_N_ROWS]) * p[_N_GROUPS] * q.ne[3]
    return Job(Work(attend, p, int(n_units), cost // 2, keep=by_head))
