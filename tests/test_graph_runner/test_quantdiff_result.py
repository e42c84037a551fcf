"""What a comparison found, in order and as a table."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from graph_runner.base.settings import Settings
from graph_runner.quantdiff.result import Cost, Quantisation, Tensor
from graph_runner.quantdiff.scores import Mean, Scores
from graph_runner.quantdiff.weights import WeightError

ERROR = WeightError(1.0, 7e-3, 0.02, (3, 1), 2, (0, 1))
SCORES = Scores(np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2), np.ones(2, bool))


def tensor(name: str, n_bytes: int | None, gain: float = 0.0) -> Tensor:
    cost = None if n_bytes is None else Cost(n_bytes, Mean(gain, 0.1))
    return Tensor(name, None, name, "f16", "q4_0", 64, ERROR, cost)


def found(*tensors: Tensor) -> Quantisation:
    sizes = (200, 100, 16.0, 8.0)
    return Quantisation(Path("big"), Path("small"), *sizes, Settings(), 64, 32, SCORES, tensors, {}, {})


def test_tensors_that_cost_most_for_their_bytes_come_first() -> None:
    result = found(tensor("a", 4 << 20, 2.0), tensor("b", None), tensor("c", 1 << 20, 1.0), tensor("d", 0, 9.0))
    assert [each.name for each in result.by_cost] == ["c", "a", "d"]
    assert [each.cost.per_mib for each in result.by_cost if each.cost is not None] == [1.0, 0.5, 0.0]


def test_a_row_of_the_table() -> None:
    first, second = found(tensor("a", 1 << 20, 0.5), tensor("b", None)).table
    assert dataclasses.astuple(first) == (
        "a", -1, "a", "f16", "q4_0", 64, 1 << 20, 0.5, 0.1, 0.5, 7e-3, 0.02, 2,
    )  # fmt: skip
    assert math.isnan(second.gain)
    assert math.isnan(second.per_mib)
