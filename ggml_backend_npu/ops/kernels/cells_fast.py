"""FLASH_ATTN_EXT (`ops.attention`) of few rows (query, head) that share a head of k and v, in other steps than ggml's
CPU: sums of v are float32, and rows are multiplied together.

What is read of the cache is read once, in the order in which it lies: a unit takes all heads of its cells.
"""

from __future__ import annotations

from typing import Any

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
    float_at,
    load_query,
    mark,
    mask_row,
    query_of,
    row_at,
    slope_of,
)
from ggml_backend_npu.ops.kernels.cells_in_halves import add_sink, finish, join_parts
from ggml_backend_npu.ops.kernels.exponentials import exps, largest, scaled, v_exp
from ggml_backend_npu.ops.kernels.softmax import LOWEST
from quant.kernels.jit import LINE, array_at, compiled, copy, f16_to_f32, inlined
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.orders import load_floats, sums_of_four
from quant.kernels.records import record_at, row_of
from quant.kernels.threads import Job, Work
from quant.kernels.vectors import FLOAT, HALF, Address, Value, part
from quant.runs import F16

FEW = 12  # rows that share a head, at most
_PARTS = 16  # of the cells, at most: the same for any number of threads
_LEAST = 24  # cells of a part
_TOGETHER = 2 if LANES == 8 else 4  # rows whose sums registers hold, at most
_VECTORS = 4  # of a row of v, whose sums registers hold
_COST = 2  # how much longer than to move a float it takes to multiply and add one


def _prefetch(kind: Any, ahead: Address, i: Address, n_vectors: int) -> None:
    """Has the processor fetch n_vectors vectors of float16, from number i * n_vectors on. It does not foresee reads of
    one head in many cells, so what all heads read next is fetched in the order in which it lies. A tile of all heads
    is more than the first cache holds."""
    if kind is HALF:
        for line in range(0, 2 * LANES * n_vectors, LINE):
            (ahead + i * (2 * LANES * n_vectors) + line).prefetch(near=False)


def _score(kind: Any, n_bytes: int, n_rows: int) -> Any:
    """Products of four keys with each of n_rows queries, at `to`, CELLS float32 from row to row. ahead: what is
    prefetched, as many bytes."""

    @part
    def score(k: Address, k_step: Address, q: Address, n_vectors: Address, to: Address, ahead: Address) -> None:
        def step(i: Address, sums: Any) -> list[Value]:
            _prefetch(kind, ahead, i, 4)
            left = [load_floats(k + k_step * c + i * (n_bytes * LANES), kind) for c in range(4)]
            right = [(q + n_vectors * (4 * LANES * r) + i * (4 * LANES)).load(FLOAT, LANES) for r in range(n_rows)]
            pairs = [(a, b) for b in right for a in left]
            return [a.fused_multiply_add(b, total) for (a, b), total in zip(pairs, sums, strict=True)]

        sums = n_vectors.count(step, *[k.zeros(FLOAT, LANES)] * (4 * n_rows))
        for r in range(n_rows):
            (to + 4 * CELLS * r).store(sums_of_four(sums[4 * r : 4 * r + 4]))

    return score


def _add(kind: Any, n_bytes: int, n_rows: int, n_vectors: int) -> Any:
    """Adds to n_rows sums, n_vectors vectors of each, the products of their weights with the cells of v. weights: CELLS
    float32 from row to row; ahead: as of `_score`."""

    @part
    def add(
        v: Address, v_step: Address, weights: Address, n_cells: Address, to: Address, to_step: Address, ahead: Address
    ) -> None:
        def step(i: Address, sums: Any) -> list[Value]:
            cell, added = v + v_step * i, []
            _prefetch(kind, ahead, i, n_vectors)
            row = [load_floats(cell + n_bytes * LANES * j, kind) for j in range(n_vectors)]
            for r in range(n_rows):
                weight = (weights + 4 * CELLS * r + i * 4).load(FLOAT)
                for j, vector in enumerate(row):
                    added.append(vector.fused_multiply_add(weight, sums[n_vectors * r + j]))
            return added

        places = [to + to_step * r + 4 * LANES * j for r in range(n_rows) for j in range(n_vectors)]
        sums = n_cells.count(step, *[place.load(FLOAT, LANES) for place in places])
        for place, total in zip(places, sums, strict=True):
            place.store(total)

    return add


def _by_rows(kind: Any, n_bytes: int) -> Any:
    """What multiplies keys and what adds vectors of v, for 1 to 4 rows, or as many as go together; what adds one
    vector of one row."""
    counts = [min(n, _TOGETHER) for n in range(1, 5)]
    several = tuple((_score(kind, n_bytes, n), _add(kind, n_bytes, n, _VECTORS)) for n in counts)
    return several, _add(kind, n_bytes, 1, 1)


_OF_HALVES, _OF_FLOATS = _by_rows(HALF, 2), _by_rows(FLOAT, 4)


@inlined
def _four_keys(kernels, n_rows, k, k_step, q, n_vectors, to, ahead):
    ((one, _), (two, _), (three, _), (four, _)), _ = kernels
    r = 0
    while r < n_rows:
        left, queries, scores = n_rows - r, q + 4 * LANES * n_vectors * r, to + 4 * CELLS * r
        if left == 1:
            one(k, k_step, queries, n_vectors, scores, ahead)
        elif left == 2:
            two(k, k_step, queries, n_vectors, scores, ahead)
        elif left == 3 and _TOGETHER > 2:
            three(k, k_step, queries, n_vectors, scores, ahead)
        else:
            four(k, k_step, queries, n_vectors, scores, ahead)
        r += min(left, _TOGETHER)


@inlined
def _all_keys(kernels, n_rows, k, k_step, count, q, n_vectors, to, ahead):
    """Products of `count` keys with n_rows queries. The last four may have been there before; of fewer keys each is
    taken as four that are the same."""
    if count < 4:
        for i in range(count):
            _four_keys(kernels, n_rows, k + k_step * i, types.int64(0), q, n_vectors, to + 4 * i, ahead)
        return
    for i in range(0, count, 4):
        first = min(i, count - 4)
        further = ahead + 2 * LANES * n_vectors * i
        _four_keys(kernels, n_rows, k + k_step * first, k_step, q, n_vectors, to + 4 * first, further)


@inlined
def _add_cells(kernels, n_rows, v, n_bytes, v_step, weights, count, to, dv, ahead):
    """Adds to the sums of n_rows rows their weights times `count` cells of v, which has n_bytes a number."""
    ((_, one), (_, two), (_, three), (_, four)), narrow = kernels
    r, step, wide = 0, 4 * dv, dv // (_VECTORS * LANES) * _VECTORS * LANES
    while r < n_rows:
        left, sums, factors = n_rows - r, to + 4 * dv * r, weights + 4 * CELLS * r
        for d in range(0, wide, _VECTORS * LANES):
            at, y, further = v + n_bytes * d, sums + 4 * d, ahead + 2 * d * count
            if left == 1:
                one(at, v_step, factors, count, y, step, further)
            elif left == 2:
                two(at, v_step, factors, count, y, step, further)
            elif left == 3 and _TOGETHER > 2:
                three(at, v_step, factors, count, y, step, further)
            else:
                four(at, v_step, factors, count, y, step, further)
        for d in range(wide, dv, LANES):
            for i in range(min(left, _TOGETHER)):
                at, y, further = v + n_bytes * d, sums + step * i + 4 * d, ahead + 2 * d * count
                narrow(at, v_step, factors + 4 * CELLS * i, count, y, step, further)
        r += min(left, _TOGETHER)


@inlined
def _add_masks(of, group, masks, first, count, scores):
    """Adds the masks of the rows of a head of k to their scores of `count` cells; those of excluded cells become
    -inf."""
    for r in range(of.n_rows):
        _, head = query_of(of, group, r)
        slope, row = slope_of(of, head), array_at(scores + 4 * CELLS * r, types.float32, count)
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            value = f16_to_f32(mask[i])
            row[i] = value if mask[i] == EXCLUDED else row[i] + slope * value


@inlined
def _weigh(n_rows, count, scores, numbers, sums, dv):
    """Turns scores into e ** (score - maximum); numbers: a maximum and a total of each row, to which the cells are
    added. What was added up before shrinks if the maximum grows."""
    padded = -(-count // LANES) * LANES
    for r in range(n_rows):
        y, found = scores + 4 * CELLS * r, array_at(numbers + 8 * r, types.float32, 2)
        array_at(y, types.float32, padded)[count:] = types.float32(-np.inf)
        highest = largest(y, padded)
        if highest > found[0]:
            shrunk = v_exp(found[0] - highest)
            found[0] = highest
            found[1] *= shrunk
            scaled(sums + 4 * dv * r, dv, shrunk)
        found[1] += types.float32(exps(y, padded, found[0]))


@inlined
def _add_some_cells(kernels, n_rows, masks, first, v, n_bytes, v_step, weights, count, to, dv):
    """As `_add_cells`, without the cells that the masks exclude, one by one: 0 times NaN is NaN."""
    for r in range(n_rows):
        mask = array_at(masks[r] + 2 * first, types.uint16, count)
        for i in range(count):
            if mask[i] != EXCLUDED:
                factor = weights + 4 * (CELLS * r + i)
                row = v + v_step * i
                _add_cells(kernels, 1, row, n_bytes, v_step, factor, 1, to + 4 * dv * r, dv, row)


@inlined
def _are_finite(v, v_step, count, n, of_halves):
    """Whether `count` rows of n numbers are finite, of float16 or of float32."""
    if not of_halves:
        return all_finite(v, count * n)
    found = types.uint16(0)
    for i in range(count):
        row = array_at(v + v_step * i, types.uint16, n)
        for d in range(n):
            found |= types.uint16((row[d] & types.uint16(0x7C00)) == types.uint16(0x7C00))
    return found == 0


@inlined
def _ahead(source, first, count, ends, group, i3, n):
    """Where a head's share of the next tile begins, if all heads of a cell lie side by side: as many bytes as the head
    has there, in the order of memory; else the head's own cells. Of the last tile, where the tile itself begins."""
    place, shared = source.place, source.shared[0]
    if first + count >= ends:
        return row_at(source, first, group * shared, i3)
    if place.nb[2] < place.nb[1]:
        return row_at(source, first + count, 0, i3) + 2 * n * count * group
    return row_at(source, first + count, group * shared, i3)


@inlined
def _add_tile(of, group, i3, first, count, ends, rows, scores, tile):
    """Adds `count` cells to the numbers and sums of the rows that share a head of k. ends: the last cell, and one, that
    this thread reads next."""
    dk, dv, n_rows, head = of.dk, of.dv, of.n_rows, group * of.k.shared[0]
    queries, sums, numbers, masks_at = rows
    masks, some = array_at(masks_at, types.int64, n_rows), types.uint16(0)
    if of.mask.address:
        kept = types.uint16(0)
        for r in range(n_rows):
            has_some, is_kept = mark(masks[r] + 2 * first, count)
            some, kept = some | has_some, kept | is_kept
        if kept == 0:
            return
    if of.k.code == F16:
        k, step, ahead = (
            row_at(of.k, first, head, i3),
            of.k.place.nb[1],
            _ahead(of.k, first, count, ends, group, i3, dk),
        )
        _all_keys(_OF_HALVES, n_rows, k, step, count, queries, dk // LANES, scores, ahead)
    else:
        for i in range(count):
            decode_key(of, row_at(of.k, first + i, head, i3), tile + 4 * dk * i)
        _all_keys(_OF_FLOATS, n_rows, tile, 4 * dk, count, queries, dk // LANES, scores, tile)
    capped(of, scores, CELLS * n_rows)
    if some != 0:
        _add_masks(of, group, masks, first, count, scores)
    _weigh(n_rows, count, scores, numbers, sums, dv)
    if of.v.code == F16:
        v, v_step = row_at(of.v, first, head, i3), of.v.place.nb[1]
        if some == 0 or _are_finite(v, v_step, count, dv, True):
            ahead = _ahead(of.v, first, count, ends, group, i3, dv)
            _add_cells(_OF_HALVES, n_rows, v, 2, v_step, scores, count, sums, dv, ahead)
        else:
            _add_some_cells(_OF_HALVES, n_rows, masks, first, v, 2, v_step, scores, count, sums, dv)
        return
    for i in range(count):
        decode(of.v, row_at(of.v, first + i, head, i3), tile + 4 * dv * i, dv)
    if some == 0 or _are_finite(tile, 0, count, dv, False):
        _add_cells(_OF_FLOATS, n_rows, tile, 4, 4 * dv, scores, count, sums, dv, tile)
    else:
        _add_some_cells(_OF_FLOATS, n_rows, masks, first, tile, 4, 4 * dv, scores, count, sums, dv)


def scratch_of(of: Attention) -> int:
    """Bytes that `attend_few` works in: for each head of k its queries, their sums, two numbers and the address of a
    mask each; scores; a tile of keys or values; what a query is rounded in."""
    in_groups: int = of.n_groups * of.n_rows * (of.dk + of.dv + 4)
    to_round: int = bytes_to_round(of.dk)
    return 4 * (in_groups + of.n_rows * CELLS + LANES + CELLS * max(of.dk, of.dv)) + to_round


@inlined
def _begin_rows(of, i3, rows, work):
    """Queries, scaled, and nothing added up yet."""
    queries, _, numbers, masks_at = rows
    dk, n_all = of.dk, of.n_groups * of.n_rows
    masks = array_at(masks_at, types.int64, n_all)
    array_at(queries, types.float32, (dk + of.dv) * n_all)[:] = 0  # the sums lie next to them
    for group in range(of.n_groups):
        for r in range(of.n_rows):
            i1, head = query_of(of, group, r)
            at = group * of.n_rows + r
            load_query(of, i1, head, i3, queries + 4 * dk * at, work)
            scaled(queries + 4 * dk * at, dk, of.scale)
            found = array_at(numbers + 8 * at, types.float32, 2)
            found[0], found[1] = types.float32(LOWEST), types.float32(0)
            masks[at] = mask_row(of, i1, head, i3)


@inlined
def _seen(of, i3):
    """How many cells there are up to the last one that a row of a sequence sees."""
    if of.mask.address == 0:
        return of.n_cells
    found = 0
    for i2 in range(of.mask_ne[0]):
        for i1 in range(of.n_queries):
            row = array_at(row_of(of.mask, i1, i2, i3 % of.mask_ne[1]), types.uint16, of.n_cells)
            end = of.n_cells
            while end > found and row[end - 1] == EXCLUDED:
                end -= 1
            found = end
    return found


@inlined
def _touch(source, i3, first, last, to):
    """Reads what all heads have of cells [first, last), if they lie side by side, in the order in which it lies: the
    processor drops many of that many prefetches."""
    if source.place.nb[2] < source.place.nb[1]:
        total, begin = types.int64(0), row_at(source, first, 0, i3)
        for at in range(0, (last - first) * source.place.nb[1] - 7, LINE):
            total ^= array_at(begin + at, types.int64, 1)[0]
        array_at(to, types.int64, 1)[0] = total


@inlined
def _leave_empty(of, i3, turn):
    """Stores that a part has no cells."""
    for row in range(of.n_queries * of.n_heads):
        at = (row + of.n_queries * of.n_heads * i3) * of.n_parts + turn
        found = array_at(of.parts + 4 * at * (2 + of.dv), types.float32, 2)
        found[0], found[1] = types.float32(-np.inf), types.float32(0)


@inlined
def _end_rows(of, i3, turn, rows):
    """Stores the part of each row, or finishes it if there is only one."""
    _, sums, numbers, _ = rows
    dv, n_parts = of.dv, max(of.n_parts, 1)
    for group in range(of.n_groups):
        for r in range(of.n_rows):
            i1, head = query_of(of, group, r)
            at, row = group * of.n_rows + r, i1 + of.n_queries * (head + of.n_heads * i3)
            part_at = of.parts + 4 * (row * n_parts + turn) * (2 + dv)
            copy(numbers + 8 * at, part_at, 8)
            copy(sums + 4 * dv * at, part_at + 8, 4 * dv)
            found = array_at(part_at, types.float32, 2 + dv)
            found[0] = found[0] if found[0] > types.float32(LOWEST) else types.float32(-np.inf)  # as ggml begins
            if of.sinks and turn == 0:
                add_sink(found, dv, float_at(of.sinks + 4 * head))
            if of.n_parts == 0:
                finish(of, row, found)


@compiled
def attend_few(p, begin, end, scratch):
    """A unit is a part of the cells that are seen, for all rows (query, head) of a sequence. `join_parts` joins the
    parts, unless there is only one: n_parts is 0 then."""
    of = record_at(p, Attention)
    dk, dv, n_rows, n_parts = of.dk, of.dv, of.n_rows, max(of.n_parts, 1)
    n_all = of.n_groups * n_rows
    sums = scratch + 4 * dk * n_all
    numbers = sums + 4 * dv * n_all
    masks = numbers + 8 * n_all
    scores = masks + 8 * n_all
    tile = scores + 4 * CELLS * n_rows + 4 * LANES
    work = tile + 4 * CELLS * max(dk, dv)
    for unit in range(begin, end):
        turn, i3 = unit % n_parts, unit // n_parts
        seen = _seen(of, i3)
        used = max(1, min(n_parts, -(-seen // _LEAST)))
        which = turn * used // n_parts
        if turn > 0 and (turn - 1) * used // n_parts == which:
            _leave_empty(of, i3, turn)
            continue
        size = -(-seen // (4 * used)) * 4
        first_cell, last = which * size, min((which + 1) * size, seen)
        ends = min((min(turn + end - unit, n_parts) - 1) * used // n_parts * size + size, seen)
        if unit == begin or turn == 0:
            for source in (of.k, of.v):
                _touch(source, i3, first_cell, min(first_cell + CELLS, last), tile)
        _begin_rows(of, i3, (scratch, sums, numbers, masks), work)
        for first in range(first_cell, last, CELLS):
            count = min(CELLS, last - first)
            for group in range(of.n_groups):
                at = group * n_rows
                rows = scratch + 4 * dk * at, sums + 4 * dv * at, numbers + 8 * at, masks + 8 * at
                _add_tile(of, group, i3, first, count, ends, rows, scores, tile)
        _end_rows(of, i3, turn, (scratch, sums, numbers, masks))
    return 0


def bind_attend_few(of: Attention, keep: object) -> Job | None:
    """The works of a node; None if it has many rows that share a head of k, or k and v are not shared by the same
    heads, or their rows are not whole vectors."""
    n_rows = of.n_queries * of.k.shared[0]
    if of.k.shared[0] != of.v.shared[0] or n_rows > FEW or of.dk % LANES or of.dv % LANES:
        return None
    n_parts = max(1, min(_PARTS, -(-of.n_cells // CELLS)))
    n_all = of.n_queries * of.n_heads * of.n_sequences
    parts = np.empty((n_all, n_parts, 2 + of.dv), np.float32)
    of = of._replace(parts=parts.ctypes.data, n_parts=n_parts if n_parts > 1 else 0, n_rows=n_rows)
    kept, n_units = (keep, parts), n_parts * of.n_sequences
    work = Work(attend_few, of, n_units, _COST * cost_of(of), scratch=scratch_of(of), keep=kept)
    return Job(work, Work(join_parts, of, n_all, scratch=4 * (2 + of.dv))) if of.n_parts else Job(work)
