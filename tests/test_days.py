"""Which part of a long test runs on which day."""

from __future__ import annotations

import pytest
from kit.days import turn_of


@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize("n_parts", [3, 5, 6, 16])
def test_each_part_has_its_day(n: int, n_parts: int) -> None:
    for first in range(n):
        days = range(700_000 + first, 700_000 + first + n * n_parts, n)  # those on which the test runs
        assert sorted(turn_of(n, day) % n_parts for day in days) == [*range(n_parts)]
