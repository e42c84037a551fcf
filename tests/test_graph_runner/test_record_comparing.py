"""Two runs beside each other: `graph_runner.record.comparing`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.models import Models
from kit.records import CPU, NPU, TEXT, compared, recorded
from kit.whole import spoiling

from ggml_backend_npu import Backend, Options, Tensor
from graph_runner.base.errors import BadInputError
from graph_runner.base.settings import Settings
from graph_runner.record import Run
from graph_runner.reports.record import comparison_json, verdict


@pytest.fixture(scope="module")
def run(model: Models) -> Run:
    """Of ggml's CPU."""
    return recorded(model("llama"))


def test_a_run_is_equal_to_itself_and_to_that_of_exact_kernels(model: Models, run: Run) -> None:
    again = recorded(model("llama"))
    assert compared(run, again)
    assert compared(run, again).differing == []
    on_npu = recorded(model("llama"), NPU, Backend(options=Options(ops="all")))
    result = compared(run, on_npu)
    assert result, verdict(result)
    assert result.compared == run.n_rows
    assert ("settings.device", "CPU", "NPU") in result.differing


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize(("token", "layer"), [(0, 1), (21, 0), (60, 0)])
def test_a_planted_fault_is_the_first(model: Models, token: int, layer: int) -> None:
    """In one value of one token of one layer, a step in batches of 8 tokens."""
    name, at = f"ffn_swiglu-{layer}", 0

    def spoils(dst: Tensor) -> None:
        nonlocal at
        if dst.name == name:
            if at <= token < at + dst.ne[1]:
                dst.view()[..., token - at, 5] += np.float32(0.01)
            at += dst.ne[1]

    options = replace(NPU, batch=8, steps=5)
    right = recorded(model("llama"), options, spoiling({"SWIGLU": lambda dst: None}))
    result = compared(right, recorded(model("llama"), options, spoiling({"SWIGLU": spoils})))
    assert not result
    assert result.first is not None
    assert (result.first.op, result.first.name, result.first.layer) == ("SWIGLU", name, layer)
    assert result.first.tokens is not None
    assert result.first.tokens[0] <= token <= result.first.tokens[1]
    assert 0 < result.first.nmse < 1e-3
    assert result.first.before == sum(len(step.rows) for step in right.steps[: result.first.step]) + result.first.place
    worst = {each.layer: each.nmse for each in result.layers}
    assert (worst[0] > 0) == (layer == 0)


def test_other_tokens_are_not_compared(model: Models, run: Run) -> None:
    other = recorded(model("llama"), text=f"{TEXT}!")
    result = compared(run, other)
    assert not result
    assert (result.tokens, result.compared, result.ends) == (0, 0, [])
    longer = recorded(model("llama"), replace(CPU, steps=5))
    result = compared(run, longer)
    assert not result
    assert result.compared == run.n_rows
    assert not result.differ


def test_data_and_logits_give_the_true_distance(model: Models) -> None:
    def spoils(dst: Tensor) -> None:
        if dst.name == "ffn_swiglu-0":
            dst.view()[...] *= np.float32(1.01)

    options = replace(NPU, data="ffn_swiglu-0", logits=True)
    right = recorded(model("llama"), options, spoiling({"SWIGLU": lambda dst: None}))
    wrong = recorded(model("llama"), options, spoiling({"SWIGLU": spoils}))
    assert len(right.data) == len(right.steps)
    result = compared(right, wrong)
    assert result.first is not None
    assert result.first.is_exact
    assert result.first.nmse == pytest.approx(1e-4, rel=1e-3)
    assert result.ends[0].kl is not None
    assert comparison_json(result)["first"]["is_exact"]


def test_another_model_is_refused(model: Models, run: Run) -> None:
    with pytest.raises(BadInputError, match=r"record 'b\.gguf': is of another model"):
        compared(run, recorded(model("moe")))


def test_graphs_of_other_settings_are_aligned(model: Models, run: Run) -> None:
    result = compared(run, recorded(model("llama"), replace(CPU, settings=Settings(flash_attention="on", threads=1))))
    assert {*result.alone_a} >= {"SOFT_MAX"}
    assert [*result.alone_b] == ["FLASH_ATTN_EXT"]
    assert result.first is not None
    assert result.first.nmse < 1e-4
    assert "settings.flash_attention" in [name for name, _, _ in result.differing]
