"""FLASH_ATTN_EXT (`ops.attention`) if v and its sums are float16, cell after cell of a query: steps of the definition,
and the kernels."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops.kernels.cells import (
    CELLS,
    EXCLUDED,
    Attention,
    bytes_to_round,
    capped,
    cost_of,
    decode_key,
    dst_row,
    float_at,
    load_query,
    mask_row,
    row_at,
    slope_of,
)
from ggml_backend_npu.ops.kernels.exponentials import scaled
from ggml_backend_npu.ops.kernels.functions import expf
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add as fma
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
from quant.kernels.matrices import LANES, dot
from quant.kernels.orders import HALVES, dots_f16, dots_in_halves
from quant.kernels.records import index_of, record_at
from quant.kernels.threads import Job, Work
from quant.kernels.vectors import FLOAT, HALF, part
from quant.rows import decode_run
from quant.runs import F16

_LEAST_UNITS = 4  # so many that threads have about as much to do each, if heads that share k and v are taken together
_IN_HALVES = 8  # how much longer than to move a float it takes to multiply and add one in halves


Floats = NDArray[np.float32]


def products(q: Floats, k: Floats, in_halves: bool) -> Floats:
    """q k^T of float16 numbers, added as ggml_vec_dot_f16 does: their products are float32 without rounding.

    in_halves  the products are added as float16
    """
    width, kind = (HALVES, np.float16) if in_halves else (LANES, np.float32)
    n = q.shape[-1] // (4 * width) * 4 * width
    found = np.empty((*q.shape[:-1], k.shape[-2]), np.float32)
    for cell in range(k.shape[-2]):
        products = q * k[..., cell : cell + 1, :]
        lanes = np.zeros((*q.shape[:-1], 4, width), kind)
        for i in range(0, n, 4 * width):  # float64 holds what is rounded once
            lanes = (lanes + products[..., i : i + 4 * width].reshape(lanes.shape).astype(np.float64)).astype(kind)
        sums = (lanes[..., 0, :] + lanes[..., 2, :]) + (lanes[..., 1, :] + lanes[..., 3, :])
        if in_halves and LANES == 4:
            sums = sums[..., :4].astype(np.float32) + sums[..., 4:].astype(np.float32)
        while (half := sums.shape[-1] // 2) > 0:
            neighbours = LANES == 4 or (LANES == 8 and half < 4 and not in_halves)
            sums = sums[..., ::2] + sums[..., 1::2] if neighbours else sums[..., :half] + sums[..., half:]
        rest = np.concatenate([sums, products[..., n:]], axis=-1, dtype=np.float64)
        found[..., cell] = np.add.accumulate(rest, axis=-1)[..., -1]
    return found


def _sum_in_halves(scores: Floats, kept: NDArray[np.bool_], v: Floats, step: int) -> list[Floats]:
    """For all queries: the maximum of the scores, the sum of e ** (score - maximum), and the sum of those times v.

    step  `Numerics.halves`
    """
    one = np.float32(1)
    maximum = np.full((*scores.shape[:-1], 1), -np.inf, np.float32)
    total = np.zeros_like(maximum)
    halves = np.zeros((*scores.shape[:-1], v.shape[-1]), np.float16)
    for cell in range(scores.shape[-1]):
        score, is_kept = scores[..., cell : cell + 1], kept[..., cell : cell + 1]
        above = is_kept & (score > maximum)
        shrunk = np.where(above, expf(maximum - score), one)
        maximum = np.where(above, score, maximum)
        weight = np.where(is_kept, expf(score - maximum), 0 * one)
        total = fma(total, shrunk, weight)
        row = v[..., cell : cell + 1, :]
        halves, before = (halves * shrunk).astype(np.float16), halves
        added = fma(row, weight, halves.astype(np.float32)).astype(np.float16)
        if step:  # float64 holds what is rounded once
            narrow, factors = slice(v.shape[-1] // step * step), (shrunk.astype(np.float16), weight.astype(np.float16))
            shrink, times = (factor.astype(np.float64) for factor in factors)
            halves[..., narrow] = (before[..., narrow] * shrink).astype(np.float16)
            added[..., narrow] = (row[..., narrow] * times + halves[..., narrow]).astype(np.float16)
        halves = np.where(is_kept, added, halves)
    return [maximum, total, halves.astype(np.float32)]


def _with_sink(found: list[Floats], sink: Floats) -> list[Floats]:
    """A maximum, a sum and the sum of v, after the sink has been added to them."""
    one, (maximum, total, y) = np.float32(1), found
    above = sink > maximum
    shrunk = np.where(above, expf(maximum - sink), one)
    weight = np.where(above, one, expf(sink - maximum))
    return [np.where(above, sink, maximum), total * shrunk + weight, y * shrunk]


def sum_of_parts(
    scores: Floats, kept: NDArray[np.bool_], v: Floats, n_sums: int, step: int, sink: Floats | None
) -> Floats:
    """softmax(scores) v, added up in n_sums parts of the cells; n_sums is 0 if they are not split."""
    size = max(1, -(-scores.shape[-1] // max(n_sums, 1)))
    whole: list[Floats] = []
    for begin in range(0, max(1, scores.shape[-1]), size):
        cells = slice(begin, begin + size)
        found = _sum_in_halves(scores[..., cells], kept[..., cells], v[..., cells, :], step)
        if sink is not None and begin == 0:
            found = _with_sink(found, sink)
        if not whole:
            whole = found if not n_sums else [np.full_like(found[0], -np.inf), *(0 * np.abs(x) for x in found[1:])]
        if n_sums:
            some, maximum = found[1] != 0, np.fmax(whole[0], found[0])
            before, now = expf(whole[0] - maximum), expf(found[0] - maximum)
            joined = [
                maximum,
                *(fma(x, before, y * now) for x, y in zip(whole[1:], found[1:], strict=True)),
            ]
            whole = [np.where(some, x, y) for x, y in zip(joined, whole, strict=True)]
    _, total, y = whole
    inverse = np.divide(np.float32(1), total, out=np.zeros_like(total), where=total != 0)
    return y * inverse


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


def _add_vectors(kind, lanes, n_vectors):
    """y += weight * v for some vectors of float16, cell by cell; each sum is rounded once from products of a kind."""

    @part
    def add(y, v, v_step, weights, n_cells):
        def step(i, sums):
            weight, added = (weights + i * 4).load(FLOAT), []
            for j, total in enumerate(sums):
                row = (v + v_step * i + 2 * lanes * j).load(HALF, lanes)
                if kind is HALF:
                    added.append(row.fused_multiply_add(weight.narrowed(), total))
                else:
                    added.append(row.widened().fused_multiply_add(weight, total.widened()).narrowed())
            return added

        places = [y + 2 * lanes * j for j in range(n_vectors)]
        for place, total in zip(places, n_cells.count(step, *[y.load(HALF, lanes) for y in places]), strict=True):
            place.store(total)

    return add


_TOGETHER = 4  # vectors: to round a sum takes a while
_add_narrow, _add_one_narrow = (_add_vectors(HALF, HALVES, n) for n in (_TOGETHER, 1))
_add_wide, _add_one_wide = (_add_vectors(FLOAT, LANES, n) for n in (_TOGETHER, 1))


@inlined
def _add_in_vectors(several, one, lanes, begin, end, y, v, v_step, weights, n_cells):
    """As `_add_cells`, of elements from `begin` on, as many as fill vectors; returns the first that is left."""
    at = begin
    while at + _TOGETHER * lanes <= end:
        several(y + 2 * at, v + 2 * at, v_step, weights, n_cells)
        at += _TOGETHER * lanes
    while at + lanes <= end:
        one(y + 2 * at, v + 2 * at, v_step, weights, n_cells)
        at += lanes
    return at


@inlined
def _add_cells(y, v, v_step, n, n_narrow, weights, n_cells):
    """y += weight * v for n float16, n_narrow of them multiplied as float16, of some cells in order. v_step: from a row
    of v to the next; weights: the address of a float32 for each cell."""
    if n_cells == 0:
        return
    begin = _add_in_vectors(
        _add_narrow, _add_one_narrow, HALVES, types.int64(0), n_narrow, y, v, v_step, weights, n_cells
    )
    done = _add_in_vectors(_add_wide, _add_one_wide, LANES, n_narrow, n, y, v, v_step, weights, n_cells)
    if begin == n_narrow and done == n:
        return
    halves = array_at(y, types.uint16, n)
    for cell in range(n_cells):
        row, weight = array_at(v + v_step * cell, types.uint16, n), float_at(weights + 4 * cell)
        narrow = _as_half(weight)
        for i in range(begin, n_narrow):
            halves[i] = _half_of_sum(f16_to_f32(row[i]) * narrow, f16_to_f32(halves[i]))
        for i in range(done, n):
            halves[i] = f32_to_f16_payload(fused_multiply_add(f16_to_f32(row[i]), weight, f16_to_f32(halves[i])))


@inlined
def _all_excluded(mask, count):
    """Whether the mask at an address leaves out all of `count` cells."""
    cells, kept = array_at(mask, types.uint16, count), types.uint16(0)
    for i in range(count):
        kept |= cells[i] ^ types.uint16(EXCLUDED)
    return kept == 0


@inlined
def add_sink(found, dv, sink):
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
def finish(of, row, found):
    """Writes dst of a row (query, head, sequence): the float32 sums of v, divided by the sum."""
    i1, head, i3 = index_of(row, of.n_queries, of.n_heads)
    dst = dst_row(of, i1, head, i3)
    inverse = types.float32(1) / found[1] if found[1] != 0 else types.float32(0)
    for d in range(of.dv):
        dst[d] = found[2 + d] * inverse


def scratch_in_halves(of: Attention) -> int:
    """Bytes that `attend_in_halves` works in: for each head sums, a query, a maximum and a total; keys, scores,
    weights, what a query is rounded in."""
    to_round: int = bytes_to_round(of.dk)
    return of.n_together * (2 * of.dv + 4 * of.dk + 8) + 4 * CELLS * (of.dk + 2) + to_round


@inlined
def _score(of, k, keys, query, y, count):
    """Scores of `count` cells with a query: their keys are float16 at k, or float32 at keys."""
    if of.k.code == F16:
        if of.in_halves:
            dots_in_halves(k, of.k.place.nb[1], query, of.dk, y, count)
        else:
            dots_f16(k, of.k.place.nb[1], query, of.dk, y, count)
    else:
        scores = array_at(y, types.float32, count)
        for i in range(count):
            scores[i] = dot(keys + 4 * of.dk * i, query, of.dk)
    scaled(y, count, of.scale)
    capped(of, y, count)


@inlined
def _add_tile(of, mask, slope, v, y, count, state, to):
    """Adds `count` cells, whose scores are at y, to the maximum and the total of a head, and to its sums of v. mask:
    the address of the first cell's; 0: there is none."""
    scores, weights = array_at(y, types.float32, count), array_at(y + 4 * CELLS, types.float32, count)
    found, v_step, begun = array_at(state, types.float32, 2), of.v.place.nb[1], types.int64(0)
    maximum, total = found[0], found[1]
    excluded = types.int64(0)
    for i in range(count):
        if mask:
            value = array_at(mask + 2 * i, types.uint16, 1)[0]
            excluded = types.int64(value == EXCLUDED)
            scores[i] += slope * f16_to_f32(value)
        if excluded or scores[i] > maximum:
            _add_cells(to, v + begun * v_step, v_step, of.dv, of.n_narrow, y + 4 * (CELLS + begun), i - begun)
            begun = i + excluded
        if excluded:
            continue
        if scores[i] > maximum:
            shrunk = types.float32(math.exp(maximum - scores[i]))
            maximum, weights[i] = scores[i], types.float32(1)
            total = fused_multiply_add(total, shrunk, types.float32(1))
            _shrink_halves(to, of.dv, of.n_narrow, shrunk)
        else:
            weights[i] = types.float32(math.exp(scores[i] - maximum))
            total += weights[i]
    _add_cells(to, v + begun * v_step, v_step, of.dv, of.n_narrow, y + 4 * (CELLS + begun), count - begun)
    found[0], found[1] = maximum, total


@compiled
def attend_in_halves(p, begin, end, scratch):
    """A unit is one part of the cells of n_together rows (query, head, sequence), whose heads share one of k and v. v
    and its sums are float16.

    `join_parts` joins the parts, unless there is only one: n_parts is 0 then.
    """
    of = record_at(p, Attention)
    dk, dv, n_cells, n_parts, together = of.dk, of.dv, of.n_cells, max(of.n_parts, 1), of.n_together
    size = -(-n_cells // n_parts)
    queries = scratch + 2 * dv * together
    states = queries + 4 * dk * together
    keys = states + 8 * together
    y = keys + 4 * CELLS * dk
    work = y + 8 * CELLS
    for unit in range(begin, end):
        turn = unit % n_parts
        i1, group, i3 = index_of(unit // n_parts, of.n_queries, of.n_heads // together)
        head = group * together
        for r in range(together):
            load_query(of, i1, head + r, i3, queries + 4 * dk * r, work)
            state = array_at(states + 8 * r, types.float32, 2)
            state[0], state[1] = types.float32(-np.inf), types.float32(0)
        array_at(scratch, types.uint16, dv * together)[:] = 0
        k, v = row_at(of.k, 0, head, i3), row_at(of.v, 0, head, i3)
        k_step, v_step = of.k.place.nb[1], of.v.place.nb[1]
        last = min((turn + 1) * size, n_cells)
        for first in range(turn * size, last, CELLS):
            count, decoded = min(CELLS, last - first), of.k.code == F16
            for r in range(together):
                mask = mask_row(of, i1, head + r, i3)
                mask += 2 * first if mask else 0
                if mask and _all_excluded(mask, count):
                    continue
                if not decoded:
                    decoded = True
                    for i in range(count):
                        decode_key(of, k + (first + i) * k_step, keys + 4 * dk * i)
                _score(of, k + first * k_step, keys, queries + 4 * dk * r, y, count)
                to = scratch + 2 * dv * r
                _add_tile(of, mask, slope_of(of, head + r), v + first * v_step, y, count, states + 8 * r, to)
        for r in range(together):
            row = i1 + of.n_queries * (head + r + of.n_heads * i3)
            part, state = of.parts + 4 * (row * n_parts + turn) * (2 + dv), array_at(states + 8 * r, types.float32, 2)
            found = array_at(part, types.float32, 2 + dv)
            found[0], found[1] = state[0], state[1]
            decode_run(F16, scratch + 2 * dv * r, 0, 0, part + 8, dv)
            if of.sinks and turn == 0:
                add_sink(found, dv, float_at(of.sinks + 4 * (head + r)))
            if of.n_parts == 0:
                finish(of, row, found)
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
        finish(of, row, whole)
    return 0


def bind_attend_in_halves(of: Attention, n_parts: int, numerics: Numerics, keep: object) -> Job:
    """The works of a node, whose rows are added up in n_parts parts that are joined at the end; 0: in one."""
    n_rows = of.n_queries * of.n_heads * of.n_sequences
    parts = np.empty((n_rows, max(n_parts, 1), 2 + of.dv), np.float32)
    n_narrow = of.dv // numerics.halves * numerics.halves if numerics.halves else 0
    of = of._replace(parts=parts.ctypes.data, n_parts=n_parts, n_narrow=n_narrow, in_halves=numerics.dots_in_halves)
    n_units, shared = n_rows * max(n_parts, 1), of.k.shared[0]
    if shared == of.v.shared[0] and n_units // shared >= _LEAST_UNITS:
        n_units, of = n_units // shared, of._replace(n_together=shared)
    kept = keep, parts
    work = Work(attend_in_halves, of, n_units, _IN_HALVES * cost_of(of), scratch=scratch_in_halves(of), keep=kept)
    return Job(work, Work(join_parts, of, n_rows, scratch=4 * (2 + of.dv))) if n_parts else Job(work)
