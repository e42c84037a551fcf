"""Sums of which a part was left out: some cells of attention, some elements of the rows of a product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ggml_backend_npu import Node
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Exact, Sums
from graph_runner.diagnosis.case import Case, Finding, Flags, error_of, power_of
from graph_runner.diagnosis.words import rows_of

_WORK = 1 << 28  # products that one candidate may take, all in all
_COLUMNS = 128  # of a row, those furthest off, in which the part is looked for
_PLACES = 1 << 11  # at which a part may begin or end
_CANDIDATES = 8  # parts of a row that are tried on all rows
_LEAST = 16  # elements that have to bear a part out, or it may be chance

Place = tuple[int, int, int]  # i3, i2, i1 of a row of dst


def left_out(case: Case) -> Iterator[Finding]:
    """Finds terms A to B that are missing in the rows' sums, as if a tile of them had been lost."""
    e, a = case.values_e, case.values_a
    sums = _sums(case.node)
    if sums is None or not (np.isfinite(e) & np.isfinite(a)).all():
        return
    shape = (-1, e.shape[-1])
    off = np.square(a - e).reshape(shape).sum(axis=1)
    found = []
    for begin, end in dict.fromkeys(_candidates(sums, e, a, (int(off.argmax()), int(np.flatnonzero(off)[-1])))):
        if np.count_nonzero(off) * (end - begin) * shape[1] > _WORK:
            continue
        gives, rows = _without(sums, e, a, begin, end)
        if case.fits(gives) and int(rows.sum()) * shape[1] >= _LEAST:
            found.append((error_of(gives, a), begin, end, gives, rows))
    if not found:
        return
    best = min(error for error, *_ in found)
    nearly = (each for each in found if each[0] <= 4 * best)
    _, begin, end, gives, rows = max(nearly, key=lambda each: _alignment(sums, *each[1:3]))
    which = f"{begin}" if end == begin + 1 else f"{begin} to {end - 1}"
    text = sums.text.format(which)
    where = "" if _all_that_see_it(sums, e, begin, end, rows) else f", in {rows_of(rows, case)}"
    yield Finding(f"leaves out {text}{where}, which gives these values", gives)


def _sums(node: Node) -> Sums | None:
    own = OWN.get(node.op)
    if own is None or own.added_up is None or own.lacks_sources(node):
        return None
    (_, *sources), keywords = own.arguments(node)
    try:
        return own.added_up(*sources, **keywords)
    except (ValueError, IndexError, AttributeError, ArithmeticError):  # a node not as ggml makes them
        return None


def _candidates(sums: Sums, e: Exact, a: Exact, rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields terms A to B whose loss explains a row: e - a is the sum of w (v - a) over them, or of w v."""
    for row in rows:
        place = _place(row, e)
        weights, terms = sums.terms(place)
        columns = np.argsort(-np.square(e[place] - a[place]))[:_COLUMNS]
        each = weights[:, None] * (terms[:, columns] - (a[place][columns] if sums.is_mean else 0.0))
        at = np.append(np.arange(0, sums.n, -(-sums.n // _PLACES)), sums.n)
        upto = np.concatenate([np.zeros((1, each.shape[1])), np.cumsum(each, axis=0)])[at]
        missing = (e - a)[place][columns]
        begins, ends = upto + missing, upto
        power = float(np.square(missing).sum())
        errors = np.square(begins).sum(axis=1)[:, None] + np.square(ends).sum(axis=1) - 2 * begins @ ends.T
        errors[np.tril_indices(len(upto))] = np.inf
        errors[0, -1] = np.inf  # all of them
        nearest = np.argsort(errors, axis=None)[: 8 * _CANDIDATES]
        nearest = nearest[errors.flat[nearest] <= 0.1 * power]
        pairs = [(int(at[i // len(at)]), int(at[i % len(at)])) for i in nearest]
        yield from pairs[: _CANDIDATES // 2]
        yield from sorted(pairs, key=lambda pair: -_alignment(sums, *pair))[: _CANDIDATES // 2]


def _without(sums: Sums, e: Exact, a: Exact, begin: int, end: int) -> tuple[Exact, Flags]:
    """Returns the right result without some terms in the rows that are nearer to a so, and which rows these are."""
    gives, rows = e.copy(), np.zeros(e[..., 0].size, np.bool_)
    for row in np.flatnonzero((a != e).any(axis=-1)):
        place = _place(int(row), e)
        without = _row_without(sums, place, e[place], begin, end)
        if error_of(without, a[place]) < error_of(e[place], a[place]):
            gives[place], rows[row] = without, True
    return gives, rows


def _row_without(sums: Sums, place: Place, row: Exact, begin: int, end: int) -> Exact:
    weights, terms = sums.terms(place)
    left = row - weights[begin:end] @ terms[begin:end]
    share = 1 - weights[begin:end].sum() if sums.is_mean else 1.0
    return left / share if share > 0 else left


def _all_that_see_it(sums: Sums, e: Exact, begin: int, end: int, rows: Flags) -> bool:
    """Whether no other row would be noticeably off without these terms."""
    for row in np.flatnonzero(~rows):
        place = _place(int(row), e)
        without = _row_without(sums, place, e[place], begin, end)
        if error_of(without, e[place]) > 1e-3 * power_of(e[place]):
            return False
    return True


def _alignment(sums: Sums, begin: int, end: int) -> int:
    """Returns the power of two that both ends are multiples of; the last end is one of any."""
    both = begin | (end if end < sums.n else 0)
    return both & -both or sums.n


def _place(row: int, e: Exact) -> Place:
    i3, i2, i1 = np.unravel_index(row, e.shape[:-1])
    return int(i3), int(i2), int(i1)
