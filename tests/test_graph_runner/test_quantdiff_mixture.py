"""Types for a size: the choice beside every other one, and the command that makes it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from kit.quantised import write_pair

from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Settings
from graph_runner.quantdiff.files import ModelFile
from graph_runner.quantdiff.mixture import (
    TYPES,
    Choice,
    checked_types,
    chosen,
    costliest,
    expected_costs,
    quantize_command,
    smallest_bpw,
)
from graph_runner.quantdiff.result import Cost, Quantisation, Tensor
from graph_runner.quantdiff.scores import Mean, Scores
from graph_runner.quantdiff.weights import WeightError


def test_no_other_choice_of_the_same_size_costs_less() -> None:
    """Costs fall less and less, as those of types do: what is chosen is the best of its own size."""
    drawn = np.random.default_rng(0)
    for _ in range(50):
        of_each = {
            name: [Choice(t, size * k, float(s / size**2)) for t, size in (("a", 1), ("b", 2), ("c", 4))]
            for name, k, s in zip("wxyz", drawn.integers(1, 5, 4).tolist(), drawn.random(4), strict=True)
        }
        picked = chosen(of_each, 24)
        size = sum(each.bytes for each in picked.values())
        cost = sum(each.cost for each in picked.values())
        every = [sum(each.cost for each in choice) for choice in itertools.product(*of_each.values())
                 if sum(each.bytes for each in choice) <= size]  # fmt: skip
        assert size <= 24 or cost == max(every)
        slack = min(cost - each for each in every)
        assert cost <= min(every) * 1.25 or slack < 1e-12


def test_a_larger_type_that_costs_more_is_never_chosen() -> None:
    of = {"x": [Choice("good", 4, 1.0), Choice("bad", 8, 1.5), Choice("better", 16, 0.5)]}
    assert chosen(of, 8)["x"].type == "good"
    assert chosen(of, 16)["x"].type == "better"
    assert chosen(of, 1)["x"].type == "good"  # none fits


def tensor(name: str, squared: float, gain: Mean | None) -> Tensor:
    error = WeightError(squared, 1e-3, 1e-2, (0, 0), 0, ())
    layer = int(name[4]) if name.startswith("blk") else None
    cost = None if gain is None else Cost(100, gain)
    return Tensor(name, layer, name[6:] if layer is not None else name, "f16", "q4_0", 100, error, cost)


def test_a_tensor_is_expected_to_cost_what_its_kind_and_layer_do() -> None:
    tensors = [tensor(f"blk.{n}.{kind}", 1.0, None) for n in (0, 1) for kind in "ab"]
    kinds = {"a": Cost(1, Mean(0.3, 0)), "b": Cost(1, Mean(0.1, 0))}
    layers = {0: Cost(1, Mean(0.3, 0)), 1: Cost(1, Mean(0.1, 0))}
    found = expected_costs(tensors, layers, kinds)
    assert found["blk.0.a"] == pytest.approx(0.3 / 2 * 0.3 / 0.2)
    assert found["blk.1.b"] == pytest.approx(0.1 / 2 * 0.1 / 0.2)
    sure = [tensor("blk.0.a", 1.0, Mean(0.5, 1e-9)), *tensors[1:]]
    assert expected_costs(sure, layers, kinds)["blk.0.a"] == pytest.approx(0.5)
    unsure = [tensor("blk.0.a", 1.0, Mean(0.5, 1e9)), *tensors[1:]]
    assert expected_costs(unsure, layers, kinds)["blk.0.a"] == pytest.approx(found["blk.0.a"])


def test_the_costliest_are_not_those_of_the_luckiest_run() -> None:
    """blk.0.a's own run says little, its kind and layer cost little; blk.1.b is known to cost more."""
    lucky, sure = Mean(0.9, 1e9), Mean(0.4, 1e-9)
    tensors = [tensor("blk.0.a", 1.0, lucky), tensor("blk.1.b", 1.0, sure), tensor("blk.1.a", 1.0, None)]
    kinds = {"a": Cost(1, Mean(0.1, 0)), "b": Cost(1, Mean(0.4, 0))}
    layers = {0: Cost(1, Mean(0.1, 0)), 1: Cost(1, Mean(0.4, 0))}
    scores = Scores(np.zeros(2, np.float32), np.zeros(2, np.float32), np.zeros(2), np.ones(2, bool))
    sizes = 200, 100, 16.0, 8.0
    found = Quantisation(Path("big"), Path("small"), *sizes, Settings(), 64, 32, scores, tensors, layers, kinds)
    assert [each.name for each in costliest(found, 5)] == ["blk.1.b", "blk.0.a"]
    assert [each.name for each in costliest(found, 1)] == ["blk.1.b"]


def test_nothing_costs_less_than_nothing() -> None:
    tensors = [tensor("blk.0.a", 1.0, Mean(-1.0, 1e-9)), tensor("output", 0.0, None)]
    kinds = {"a": Cost(1, Mean(-0.3, 0)), "output": Cost(1, Mean(0.0, 0))}
    found = expected_costs(tensors, {0: Cost(1, Mean(-0.3, 0))}, kinds)
    assert all(each >= 0 for each in found.values())


def test_types() -> None:
    assert checked_types(TYPES) == TYPES
    assert checked_types(["Q4_K", "q4_k"]) == ("q4_K",)
    for name in ("iq2_xxs", "iq1_s", "q8_K", "i32", "q9"):
        with pytest.raises(BadInputError, match=f"--types '{name}': must be among f16 "):
            checked_types(["q4_0", name])


def test_the_smallest_size(tmp_path: Path) -> None:
    model = ModelFile(write_pair(tmp_path)[0])
    matrices = [name for name, each in model.tensors.items() if len(each.ne) > 1]
    assert 4.5 < smallest_bpw(model, matrices, ["q4_0", "q8_0"]) < 5
    with pytest.raises(BadInputError, match=r"--types 'q4_K': tensor .* has rows of 64 weights, and fits none"):
        smallest_bpw(model, matrices, ["q4_K"])


def test_the_command_names_every_tensor_and_no_other(tmp_path: Path) -> None:
    model = ModelFile(write_pair(tmp_path)[0])
    types = {name: "q4_0" if each.layer == 1 else "q5_K" for name, each in model.tensors.items() if len(each.ne) > 1}
    command = quantize_command(model, types)
    options = re.findall(r"--tensor-type '(\S+)=(\S+)'", command)
    assert command.endswith("big.gguf mixed.gguf Q5_K")
    for name in model.tensors:
        found = [type for pattern, type in options if re.search(pattern, name)]
        assert found == ([types[name].lower()] if name in types else [])
