"""The right elements at the wrong places."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from graph_runner.diagnosis.case import Bytes, Case, Finding, Flags

_MOST_ROWS = 256  # rows that are compared with each other where they are equal but for rounding


def transposed(case: Case) -> Iterator[Finding]:
    """Finds the right result with two dimensions swapped."""
    for i, j in combinations(range(4), 2):
        sizes = (case.expected.n_blocks, *case.expected.ne[1:])
        if sizes[i] == 1 or sizes[j] == 1:
            continue
        changed = np.ascontiguousarray(np.swapaxes(case.e, 3 - i, 3 - j)).reshape(case.e.shape)
        how = "transposed: dimensions 0 and 1" if (i, j) == (0, 1) else f"with dimensions {i} and {j}"
        yield Finding(f"writes its result {how} swapped", changed)


def permuted(case: Case) -> Iterator[Finding]:
    """Finds the right rows at other places."""
    right = case.same_rows(case.a, case.e)
    if len(right) == 1 or right.all():
        return
    source = _whose_rows(case, right)
    if source is not None and len(np.unique(source)) > 1:
        gives = case.e.reshape(len(right), *case.e.shape[3:])[source].reshape(case.e.shape)
        yield Finding(_moved(source, case.expected.ne[1]), gives)


def _moved(source: NDArray[np.int64], n1: int) -> str:
    """Returns in words which rows lie where.

    source  which row each place holds, of matrices of n1 rows
    """
    n = len(source)
    is_permutation = len(np.unique(source)) == n
    if is_permutation:
        if np.array_equal(source, np.arange(n)[::-1]):
            return f"writes its rows in reverse: row i is that of {n - 1} - i"
        by_matrix = source.reshape(-1, n1) - np.arange(0, n, n1)[:, None]
        if ((by_matrix >= 0) & (by_matrix < n1)).all() and (by_matrix == by_matrix[0]).all() and n1 < n:
            return f"permutes the rows of each matrix: {_order(by_matrix[0])}"
        matrices = source.reshape(-1, n1)
        if n1 > 1 and (matrices - matrices[:, :1] == np.arange(n1)).all() and (matrices[:, 0] % n1 == 0).all():
            return f"permutes matrices, counted over dimensions 2 and 3: {_order(matrices[:, 0] // n1)}"
        return f"permutes rows: {_order(source)}"
    return f"writes rows that belong elsewhere: {_order(source)}"


def _order(source: NDArray[np.int64]) -> str:
    """Returns in words which row each place holds."""
    n, index = len(source), np.arange(len(source))
    steps = (source - index) % n
    if n > 2 and (steps == steps[0]).all():
        return f"place i holds what belongs at (i + {steps[0]}) % {n}"
    if n > 2 and np.array_equal(source, index[::-1]):
        return f"place i holds what belongs at {n - 1} - i"
    moved = np.flatnonzero(source != index)
    parts = [f"place {at} holds what belongs at {source[at]}" for at in moved[:4]]
    return ", ".join(parts) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")


def _whose_rows(case: Case, right: Flags) -> NDArray[np.int64] | None:
    """Returns for each row of actual which row of expected it is; None if some row is none of them."""
    n = len(right)
    source = np.where(right, np.arange(n), -1)
    if case.is_exact:
        places: dict[bytes, deque[int]] = defaultdict(deque)
        e, a = (np.ascontiguousarray(units).reshape(n, -1) for units in (case.e, case.a))
        free = {row: place for place, row in enumerate(map(bytes, e))}
        for place in np.flatnonzero(~right):
            places[bytes(e[place])].append(int(place))
        for place in np.flatnonzero(~right):
            row = bytes(a[place])
            found = places[row].popleft() if places.get(row) else free.get(row)
            if found is None:
                return None
            source[place] = found
        return source
    wrong = np.flatnonzero(~right)
    if n > _MOST_ROWS or case.expected.ne[0] == 1:  # one number may well be that of another row, but for rounding
        return None
    e_values, a_values = case.rows_of_values(case.e), case.rows_of_values(case.a)
    for place in wrong:
        errors = np.square(e_values - a_values[place]).sum(axis=1)
        if not np.isfinite(errors).any():
            return None
        nearest = int(np.nanargmin(errors))
        if errors[nearest] > case.tolerance * np.square(a_values[place]).sum():
            return None
        source[place] = nearest
    return source


def shifted(case: Case) -> Iterator[Finding]:
    """Finds the right elements, all shifted by the same number of places."""
    size = case.e.shape[-1]
    block = case.expected.codec.block_size
    unit = "elements" if block == 1 else f"blocks of {block}"
    for rows, what in ((case.e.reshape(-1, size), "its result"), (None, "each row")):
        if rows is not None:
            e, a = rows[None], case.a.reshape(1, -1, size)
        else:
            e, a = (units.reshape(-1, case.e.shape[3], size) for units in (case.e, case.a))
        for n in _candidates(e[0], a[0]):
            x, y = (e[:, :-n], a[:, n:]) if n > 0 else (e[:, -n:], a[:, :n])
            in_place = e[:, n:] if n > 0 else e[:, :n]
            if 2 * x.shape[1] < e.shape[1] or not np.array_equal(x, y) or np.array_equal(y, in_place):
                continue
            text = f"writes {what} {abs(n)} {unit} too {'late' if n > 0 else 'early'}"
            in_a_circle = np.array_equal(np.roll(e, n, axis=1), a)
            yield Finding(f"{text}, in a circle" if in_a_circle else text, case.a)


def _candidates(e: Bytes, a: Bytes) -> Iterator[int]:
    """Yields how many places later than in e the elements of a may be: each place in e that holds the middle element of
    a."""
    n = len(e)
    # the middle of a, and with it as much of its surroundings as is of several values
    middle = n // 2
    places = np.flatnonzero((e == a[middle]).all(axis=1))
    order = np.argsort(np.abs(places - middle), kind="stable")[:64]
    for place in places[order]:
        if place != middle:
            yield int(middle - place)
