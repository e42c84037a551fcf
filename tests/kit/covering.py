"""Few cases of many settings, such that each pair of settings is in one of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar


class Paired(Protocol):
    """A case, with the pairs of its settings."""

    @property
    def pairs(self) -> set[Any]: ...


AnyCase = TypeVar("AnyCase", bound=Paired)


def covering(possible: Iterable[AnyCase], seed: int | str) -> list[AnyCase]:
    """Cases of the possible ones in which each pair is that one of them has; the next is always one with the most pairs
    that are still missing.

    seed  which pairs meet in a case is another for each
    """
    left = [*possible]
    random.Random(seed).shuffle(left)
    missing = {pair for case in left for pair in case.pairs}
    found = []
    while missing:
        found.append(max(left, key=lambda case: len(case.pairs & missing)))
        missing -= found[-1].pairs
    return found
