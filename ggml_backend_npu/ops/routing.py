"""ARGSORT, SUM_ROWS, TOP_K, and the top-k of a softmax: the routing of a mixture of experts, node by node or as one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.exponentials import exps, largest, scaled
from ggml_backend_npu.ops.kernels.strided import bind_move
from ggml_backend_npu.ops.sums import BOUND, partial_sums
from ggml_backend_npu.registry import cases, exact, probes
from ggml_backend_npu.registry.checks import Exact, Mistake
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Instead, Params, i32
from quant.kernels.jit import array_at, compiled, copy, float_bits, inlined, on_stack
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, widen_run

_TILE = 256  # scores of a row in work at a time
_ENDS = 2 * 64  # of the parts that wait, at most two for each bit of a length
_INSERTED = 16  # keys that are sorted by insertion
_FEW = 32  # of a row are selected one by one; of more the row is sorted
_SOFTMAX, _SOFTMAX_OF_SELECTED = range(2)

ASCENDING, DESCENDING = range(2)  # ggml_sort_order


@dataclass(frozen=True)
class Argsort(Params):
    """op_params of ARGSORT: ggml_argsort. order: a ggml_sort_order."""

    order: Annotated[i32, Instead("order", (0, 1))]


def _refuse_argsort(dst: Tensor, x: Tensor, params: Argsort) -> str | None:
    return f"x of ne {x.ne}, dst of ne {dst.ne}" if dst.ne != x.ne else None


@op("ARGSORT", types=[("i32", "f32")], refuse=_refuse_argsort, params=Argsort)
def argsort(dst: Tensor, x: Tensor, params: Argsort) -> None:
    """dst = the indices of each row's elements in ascending or descending order; in x's ne.

    Equal elements stay in the order of the row, NaN counts as -inf. Equals ggml_compute_forward_argsort if no
    elements are equal: the order of equal ones is left to std::sort there.
    """
    for i3, i2 in np.ndindex(x.ne[3], x.ne[2]):
        for i1 in range(x.ne[1]):
            row = _ordered(x.view()[i3, i2, i1])
            dst.view()[i3, i2, i1] = np.argsort(-row if params.order != ASCENDING else row, kind="stable")


@inlined
def _key(score, place, descending):
    """A key that sorts as the score does, NaN as -inf and -0 as 0, and equal scores by their index."""
    bits = float_bits((score if score == score else types.float32(-np.inf)) + types.float32(0))
    negative = bits >> types.uint32(31) != 0
    rank = ~bits if negative else bits | types.uint32(0x80000000)
    if descending:
        rank = ~rank
    return types.uint64(rank) << types.uint64(32) | types.uint64(place)


@inlined
def _sort_keys(keys):
    """Sorts keys, ascending: splits them about a middle one until few are left. Of two parts the larger waits, so that
    no more wait than a length has bits."""
    waiting, n_waiting = array_at(on_stack(_ENDS), types.int64, _ENDS), 1
    waiting[0], waiting[1] = 0, len(keys) - 1
    while n_waiting > 0:
        n_waiting -= 1
        low, high = waiting[2 * n_waiting], waiting[2 * n_waiting + 1]
        while high - low > _INSERTED:
            a, b, c = keys[low], keys[(low + high) // 2], keys[high]
            middle, i, j = max(min(a, b), min(max(a, b), c)), low, high
            while i <= j:
                while keys[i] < middle:
                    i += 1
                while keys[j] > middle:
                    j -= 1
                if i <= j:
                    keys[i], keys[j] = keys[j], keys[i]
                    i, j = i + 1, j - 1
            at = 2 * n_waiting
            if j - low < high - i:
                waiting[at], waiting[at + 1], high = i, high, j
            else:
                waiting[at], waiting[at + 1], low = low, j, i
            n_waiting += 1
        for i in range(low + 1, high + 1):
            key, j = keys[i], i
            while j > low and keys[j - 1] > key:
                keys[j] = keys[j - 1]
                j -= 1
            keys[j] = key


class Sort(NamedTuple):
    """Rows of x, of ne elements; the indices of the first k of each go to dst.

    descending, swaps  truth values; swaps: the first two are swapped
    """

    descending: int
    k: int
    swaps: int
    ne: Dims
    x: Place
    dst: Place


@compiled
def sort(p, begin, end, scratch):
    """A unit is a row: the indices of its first k elements, in order; if `swaps`, the second one comes first."""
    of = record_at(p, Sort)
    width = of.ne[0]
    keys = array_at(scratch, types.uint64, width)
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        x, y = row_of(of.x, i1, i2, i3), row_of(of.dst, i1, i2, i3)
        for i in range(width):
            keys[i] = _key(array_at(x + i * of.x.nb[0], types.float32, 1)[0], i, of.descending)
        _sort_keys(keys)
        if of.swaps and of.k > 1:
            keys[0], keys[1] = keys[1], keys[0]
        for i in range(of.k):
            array_at(y + i * of.dst.nb[0], types.int32, 1)[0] = types.int32(keys[i] & types.uint64(0xFFFFFFFF))
    return 0


def _bind_sort(dst: Tensor, x: Tensor, *, descending: bool, swaps: bool = False) -> Call:
    width, n1, n2, n3 = x.ne
    of = Sort(descending, dst.ne[0], swaps, x.ne, x.place, dst.place)
    n_bytes = 16 * x.n_elements * width.bit_length()
    return Job(Work(sort, of, n1 * n2 * n3, n_bytes, scratch=8 * width, keep=(dst, x)))


@argsort.compiled
def _argsort(dst: Tensor, x: Tensor, params: Argsort) -> Call:
    return _bind_sort(dst, x, descending=params.order != ASCENDING)


@argsort.rule("the same order, but of equal elements")
def _is_same_order(ids: Tensor, x: Tensor, params: Argsort) -> bool:
    found = _chosen(ids, x)
    if found is None or ids.ne[0] != x.ne[0]:
        return False
    scores, chosen = found
    order = np.sort(scores, axis=-1)
    return np.array_equal(chosen, order[..., ::-1] if params.order != ASCENDING else order)


def _chosen(ids: Tensor, x: Tensor) -> tuple[Exact, Exact] | None:
    """The scores, NaN as the least of all, and those that each row's ids name; None if one is no id, or occurs
    twice."""
    if x.ne[1:] != ids.ne[1:]:
        return None
    scores, places = exact.values(x), ids.view().astype(np.int64)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    order = np.sort(places, axis=-1)
    if (order < 0).any() or (order >= x.ne[0]).any() or (np.diff(order, axis=-1) == 0).any():
        return None
    return scores, np.take_along_axis(scores, places, axis=-1)


@argsort.mistakes
def _mistaken_argsort(node: Node, x: Tensor) -> Iterator[Mistake]:
    n = 1 << (x.ne[0].bit_length() - 1)
    if n < x.ne[0]:

        def compute(dst: Tensor) -> None:
            first, part = (replace(tensor, ne=(n, *tensor.ne[1:])) for tensor in (dst, x))
            argsort.define(first, part, params=Argsort.of(node.params))
            dst.view()[..., n:] = np.arange(n, x.ne[0])

        yield Mistake(f"sorts the first {n} elements of each row, a power of two, and no others", node, compute)


@argsort.cases
def _nearest_argsort(dst: Tensor, x: Tensor, params: Argsort) -> list[str]:
    return [cases.has("type", x.type), cases.has("order", params.order)]


def _ordered(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.where(np.isnan(scores), np.float32(-np.inf), scores)


def _refuse_top_k(dst: Tensor, x: Tensor) -> str | None:
    if dst.ne[1:] != x.ne[1:] or dst.ne[0] > x.ne[0]:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return None


@op("TOP_K", types=[("i32", "f32")], refuse=_refuse_top_k, built_by={"ggml_top_k": "cti"})
def largest_k(dst: Tensor, x: Tensor) -> None:
    """dst = the indices of the largest elements of each row, x (n, ...) -> dst (k, ...); the second largest comes
    first.

    Equals ggml_compute_forward_top_k if no elements are equal; it swaps the first two to show that their order means
    nothing. NaN counts as -inf.
    """
    k = dst.ne[0]
    places = np.argsort(-_ordered(x.view()), axis=-1, kind="stable")[..., :k]
    dst.view()[...] = places[..., [1, 0, *range(2, k)]] if k > 1 else places


@largest_k.compiled
def _largest_k(dst: Tensor, x: Tensor) -> Call:
    return _bind_sort(dst, x, descending=True, swaps=True)


@largest_k.rule("the same set in any order")
def _is_same_set(ids: Tensor, x: Tensor) -> bool:
    found = _chosen(ids, x)
    if found is None:
        return False
    scores, chosen = found
    return np.array_equal(np.sort(chosen, axis=-1), np.sort(scores, axis=-1)[..., x.ne[0] - ids.ne[0] :])


def _refuse_sum_rows(dst: Tensor, x: Tensor) -> str | None:
    return f"x of ne {x.ne}, dst of ne {dst.ne}" if dst.ne != (1, *x.ne[1:]) else None


@op("SUM_ROWS", types=[("f32", "f32")], refuse=_refuse_sum_rows, bound=BOUND)
def sum_rows(dst: Tensor, x: Tensor) -> None:
    """dst = the sum of each row, added one after the other in float64, from +0; x (n, ...) -> dst (1, ...).

    Equals ggml_compute_forward_sum_rows.
    """
    with np.errstate(all="ignore"):
        dst.view()[...] = np.add.accumulate(x.view(), axis=-1, dtype=np.float64)[..., -1:] + 0.0 if x.ne[0] else 0


class SumOfRows(NamedTuple):
    """Rows of x, of ne elements, each added up into one element of dst."""

    ne: Dims
    x: Place
    dst: Place


@compiled
def sum_of_rows(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, SumOfRows)
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        x = row_of(of.x, i1, i2, i3)
        total = types.float64(0)
        for i in range(of.ne[0]):
            total += types.float64(array_at(x + i * of.x.nb[0], types.float32, 1)[0])
        array_at(row_of(of.dst, i1, i2, i3), types.float32, 1)[0] = types.float32(total)
    return 0


@sum_rows.compiled
def _sum_rows(dst: Tensor, x: Tensor) -> Call:
    _, n1, n2, n3 = x.ne
    return Job(Work(sum_of_rows, SumOfRows(x.ne, x.place, dst.place), n1 * n2 * n3, 4 * x.n_elements, keep=(dst, x)))


@sum_rows.formula
def _exact_sum_rows(x: Tensor) -> Exact:
    total: Exact = exact.values(x).sum(axis=-1, keepdims=True)
    return total


@sum_rows.terms
def _terms_of_sum_rows(x: Tensor) -> Exact:
    return partial_sums(exact.values(x))[..., -1:]


@sum_rows.cases
def _nearest_sum_rows(dst: Tensor, x: Tensor) -> list[str]:
    permuted = cases.is_permuted(x)
    sliced = not x.is_contiguous() and not permuted
    return [cases.has("type", x.type), cases.has("permute", permuted), cases.has("slice", sliced)]


sum_rows.nodes(probes.of_rows("SUM_ROWS", dst=1), probes.of_rows("SUM_ROWS", 4096, dst=1))


@inlined
def _select(y, begin, count, best, places, k, n_found):
    """Of `count` scores at y, columns from `begin` on, inserts those that are among the k largest so far at their rank.

    Returns how many are found. Of equal scores the first comes first; NaN counts as -inf.
    """
    scores = array_at(y, types.float32, count)
    for i in range(count):
        score = scores[i] if scores[i] == scores[i] else types.float32(-np.inf)
        if n_found == k and score <= best[k - 1]:
            continue
        n_found = min(n_found + 1, k)
        at = n_found - 1
        while at > 0 and best[at - 1] < score:
            best[at] = best[at - 1]
            places[at] = places[at - 1]
            at -= 1
        best[at] = score
        places[at] = begin + i
    return n_found


@inlined
def _filled(work, count, lanes):
    """Fills work with -inf after `count` scores, up to a multiple of lanes; returns how many there are then."""
    filled = -(-count // lanes) * lanes
    work[count:filled] = types.float32(-np.inf)
    return filled


@inlined
def _sort(code, x, nb0, y, keys, places):
    """The indices of the first scores of a row at x, descending, equal ones in the row's order; y holds a tile."""
    scores = array_at(y, types.float32, _TILE)
    for column in range(0, len(keys), _TILE):
        count = min(_TILE, len(keys) - column)
        widen_run(code, x + column * nb0, nb0, y, count)
        for i in range(count):
            keys[column + i] = _key(scores[i], column + i, True)
    _sort_keys(keys)
    for i in range(len(places)):
        places[i] = types.int32(keys[i] & types.uint64(0xFFFFFFFF))


@inlined
def _settle(weights, places, k):
    """Puts the first k weights in descending order, keeping the order of equal ones: they are almost sorted."""
    for i in range(1, k):
        weight, place, at = weights[i], places[i], i
        while at > 0 and weights[at - 1] < weight:
            weights[at], places[at] = weights[at - 1], places[at - 1]
            at -= 1
        weights[at], places[at] = weight, place


class TopK(NamedTuple):
    """Rows of x, of `width` scores; the k largest of each go to dst and their indices to ids.

    kind      what the values are: _SOFTMAX or _SOFTMAX_OF_SELECTED
    norm      the values are divided by their sum, or by `least` if that is larger
    lanes     a row's end is filled with -inf to a multiple of this, for exponentials
    by_score  the largest of a softmax are found among the scores
    n_sorted  scores of a row, if all of it is sorted; 0: the largest are selected one by one
    """

    kind: int
    norm: int
    least: np.float32
    lanes: int
    by_score: int
    n_sorted: int
    x: Place
    x_code: int
    width: int
    k: int
    ids: Place
    dst: Place


def scratch_of(of: TopK) -> int:
    """Bytes that `top_k` works in: keys of the scores that are sorted, a tile of a row, weights and their indices."""
    return 8 * of.n_sorted + 4 * _TILE + 4 * (of.k + of.lanes) + 4 * of.k


@compiled
def top_k(p, begin, end, scratch):
    """A unit is a row: the k largest of its softmax, or of its scores, and their indices."""
    of = record_at(p, TopK)
    kind, lanes, by_score, width, k, nb0 = of.kind, of.lanes, of.by_score, of.width, of.k, of.x.nb[0]
    y = scratch + 8 * of.n_sorted
    w = y + 4 * _TILE
    keys, work = array_at(scratch, types.uint64, of.n_sorted), array_at(y, types.float32, _TILE)
    weights = array_at(w, types.float32, k + lanes)
    at = w + 4 * (k + lanes)
    places = array_at(at, types.int32, k)
    for row in range(begin, end):
        x = of.x.address + row * of.x.nb[1]
        maximum, total = types.float32(-np.inf), types.float64(0)
        if kind == _SOFTMAX:
            for column in range(0, width, _TILE):
                count = min(_TILE, width - column)
                widen_run(of.x_code, x + column * nb0, nb0, y, count)
                maximum = max(maximum, largest(y, count))
            for column in range(0, width, _TILE):
                count = min(_TILE, width - column)
                widen_run(of.x_code, x + column * nb0, nb0, y, count)
                total += exps(y, _filled(work, count, lanes), maximum)
        factor = types.float32(types.float64(1) / total)
        n_found = 0
        if of.n_sorted:
            _sort(of.x_code, x, nb0, y, keys, places)
        else:
            for column in range(0, width, _TILE):
                count = min(_TILE, width - column)
                widen_run(of.x_code, x + column * nb0, nb0, y, count)
                if kind == _SOFTMAX and not by_score:
                    exps(y, _filled(work, count, lanes), maximum)
                    scaled(y, count, factor)
                n_found = _select(y, column, count, weights, places, k, n_found)
        if by_score or kind == _SOFTMAX_OF_SELECTED:
            for i in range(k):
                widen_run(of.x_code, x + places[i] * nb0, nb0, w + 4 * i, 1)
        if by_score:
            exps(w, _filled(weights, k, lanes), maximum)
            scaled(w, k, factor)
            _settle(weights, places, k)
        if kind == _SOFTMAX_OF_SELECTED:
            scaled(w, k, types.float32(types.float64(1) / exps(w, k, largest(w, k))))
        if kind == _SOFTMAX and total != total:
            for i in range(k):
                weights[i], places[i] = types.float32(np.nan), i
        if of.norm:
            total = types.float64(0)
            for i in range(k):
                total += types.float64(weights[i])
            divisor = max(types.float32(total), of.least)
            for i in range(k):
                weights[i] = weights[i] / divisor
        copy(w, of.dst.address + row * of.dst.nb[1], 4 * k)
        copy(at, of.ids.address + row * of.ids.nb[1], 4 * k)
    return 0


def bind_routing(
    values: Tensor,
    ids: Tensor,
    x: Tensor,
    *,
    selected_only: bool = False,
    norm: bool = False,
    least: float = 0.0,
    of_nodes: bool = False,
) -> Call:
    """The call that fills values, float32 (k, n), and ids, int32 (k, n), from the rows of x, (width, n).

    They are the k largest of each row's softmax; with selected_only, the k largest scores, and the softmax of those.
    norm divides by their sum, or by `least` if that is larger. If the softmax of a row is NaN, so are the values,
    and the ids are 0 to k - 1. Equal values are in the order of their scores, the first of equal scores first. values
    may lie on x. of_nodes gives what SOFT_MAX and the nodes after it give node by node: there, equal scores may differ
    in the last bit if one of them is at the end of its row, and equal values are in the order of the row.
    """
    k, n_rows = values.ne[:2]
    by_score = not (of_nodes or selected_only)
    into = Tensor.of(np.empty((n_rows, k), np.float32)) if values.overlaps(x) else values
    of = TopK(
        kind=_SOFTMAX_OF_SELECTED if selected_only else _SOFTMAX,
        norm=norm,
        least=np.float32(least),
        lanes=1 if of_nodes else LANES,
        by_score=by_score,
        n_sorted=x.ne[0] if by_score and k > _FEW else 0,
        x=x.place,
        x_code=CODES[x.type],
        width=x.ne[0],
        k=k,
        ids=ids.place,
        dst=into.place,
    )
    select = Work(top_k, of, n_rows, 4 * x.ne[0] * n_rows, scratch=scratch_of(of), keep=into)
    if into is values:
        return Job(select)
    move = bind_move(values, into)
    assert move is not None
    return Job(select, *move.works)
