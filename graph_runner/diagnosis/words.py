"""Numbers and rows in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from graph_runner.diagnosis.case import Case, Flags


def runs_of(numbers: Iterable[int]) -> str:
    """Returns "3, 5 to 7 and 2 more" for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:4]]
    left = sum(b - a + 1 for a, b in runs[4:])
    return f"{', '.join(parts)} and {left} more" if left else ", ".join(parts)


def rows_of(flags: Flags, case: Case) -> str:
    """Returns the marked rows of dst, (n_rows,), in words: "row 5", "rows 3 to 7", "row 2 of [i3 0, i2 1]"."""
    places = np.flatnonzero(flags)
    _, n1, n2, n3 = case.expected.ne
    by_matrix: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in places:
        i3, i2, i1 = np.unravel_index(place, (n3, n2, n1))
        by_matrix[int(i3), int(i2)].append(int(i1))
    first = next(iter(by_matrix.values()))
    name = "row" if len(first) == 1 else "rows"
    if n2 * n3 == 1:
        return f"{name} {runs_of(first)}"
    if len(by_matrix) == n2 * n3 and all(rows == first for rows in by_matrix.values()):
        return f"{name} {runs_of(first)} of each matrix"
    texts = [
        f"{'row' if len(rows) == 1 else 'rows'} {runs_of(rows)} of matrix [i3 {i3}, i2 {i2}]"
        for (i3, i2), rows in by_matrix.items()
    ]
    more = f" and {len(texts) - 3} more matrices" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
