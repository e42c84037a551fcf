"""Two runs in step: the verdict on every node, a device that fails, and the error of whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT, QUANTISED, is_off, planted, run
from kit.models import Models
from kit.support import choose

from ggml_backend_npu import KernelError, Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import BadInputError
from graph_runner.judging.results import Verdict
from graph_runner.run.session import DeviceName, Sampler, Session, Settings, context_for

MODELS = [
    *(pytest.param(name, FLASH_OFF, id=f"{name}, flash off") for name in ("llama", "moe", "rwkv7", "mamba")),
    *(pytest.param(name, FLASH_ON, id=f"{name}, flash on") for name in ("llama", "gpt-oss")),
    pytest.param("llama", QUANTISED, id="llama, quantised caches"),
]
CLEAN = {Verdict.EXACT, Verdict.ROUNDING}
pytestmark = pytest.mark.usefixtures("as_before")


# verdicts


@pytest.mark.some(2)
@pytest.mark.daily(3)
@pytest.mark.parametrize(("name", "settings"), MODELS)
@pytest.mark.parametrize("ops", ["default", "all"])
@pytest.mark.parametrize("fusion", ["on", "off"])
def test_right_kernels_are_blamed_for_nothing(
    model: Models, name: str, settings: Settings, ops: str, fusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inherited error has a node before it that rounds otherwise; where only data is moved, there is none."""
    choose(monkeypatch, ops=ops)
    choose(monkeypatch, fusion=fusion)
    result = run(model(name), settings)
    assert result, (result.wrong[:1], result.stopped)
    assert result.stopped is None
    assert not result.stray
    has_rounding = False
    for node in result.nodes:
        has_rounding |= node.verdict is Verdict.ROUNDING
        assert has_rounding or node.verdict is Verdict.EXACT
    if ops == "default" and fusion == "off":
        assert not any(map(is_off, result.nodes))
        assert {node.verdict for node in result.nodes} <= CLEAN
        assert result.states == []


def test_on_which_device_a_node_ran_is_known(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, fusion="off")
    movers = {"GET_ROWS", "SET_ROWS", "CONT"}
    result = run(model("llama"))
    assert {node.op for node in result.nodes if node.on == "NPU"} == movers
    assert {node.on for node in result.nodes if node.op in movers} == {"NPU"}
    assert {node.on for node in result.nodes if node.op not in movers} == {"CPU"}


def twice(dst: Tensor, src: Tensor) -> None:
    OWN["CONT"].define(dst, src)
    dst.view()[...] *= 2


@pytest.mark.parametrize("side", ["device", "reference"])
def test_another_kind_of_side_is_refused(model: Models, side: str) -> None:
    with pytest.raises(BadInputError, match="device 'TPU': there is none of this name; there are: CPU NPU"):
        run(model("llama"), FLASH_OFF, 2, **{side: "TPU"})


@pytest.mark.parametrize("device", ["CPU", "NPU"])
@pytest.mark.parametrize("reference", ["CPU", "NPU"])
def test_any_two_devices(model: Models, reference: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes with this project's kernels, whatever a user has registered."""
    choose(monkeypatch, fusion="off")
    right = run(model("llama"), steps=1, reference=reference, device=device)
    assert right, right.wrong[:1]
    assert not any(map(is_off, right.nodes))
    assert {node.on for node in right.nodes} == ({"CPU"} if device == "CPU" else {"CPU", "NPU"})
    with default_backend().ops.having(planted("CONT", twice)):
        result = run(model("llama"), steps=1, reference=reference, device=device)
        assert default_backend().ops["CONT"].define is twice
    assert bool(result) == (device == "CPU")
    assert {node.op for node in result.wrong} == ({"CONT"} if device == "NPU" else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "span"), [("rwkv7", "token_shift"), ("moe", "TopKSoftmax"), ("llama", "masked_softmax")]
)
def test_the_npu_with_fusion_against_the_npu_without(
    model: Models, name: str, span: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops="all")
    for fusion in ("on", "off"):
        choose(monkeypatch, fusion=fusion)
        result = run(model(name), steps=1, reference="NPU")
        assert result, result.wrong[:1]
        assert result.stopped is None
        assert (span in {node.op for node in result.nodes}) == (fusion == "on")
        assert {node.verdict for node in result.nodes} == {Verdict.EXACT}
        assert "NPU" in {node.on for node in result.nodes}


def test_a_device_that_computes_all_ops_is_compared_in_all(model: Models) -> None:
    """The CPU as device: every node is computed again alone."""
    result = run(model("mamba"), steps=1, device="CPU")
    assert result
    assert all(node.isolated is not None for node in result.nodes)
    assert "MUL_MAT" in {node.op for node in result.nodes}


def test_an_error_that_grows(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the node that put it in it is inherited, or amplified."""
    choose(monkeypatch, fusion="off")

    def tiny_error(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["GET_ROWS"].define(dst, src, ids)
        if dst.name == "embd":
            dst.view()[0, 0, :, 0] += np.float32(1e-4)

    with default_backend().ops.having(planted("GET_ROWS", tiny_error)):
        result = run(model("llama"), steps=0)
    assert [(node.name, node.verdict) for node in result.wrong] == [("embd", Verdict.INTRODUCED)]
    errors = {node.name: node.cumulative.error for node in result.nodes if node.cumulative is not None}
    behind = result.nodes[1:]
    assert {node.verdict for node in behind} <= {*CLEAN, Verdict.INHERITED, Verdict.AMPLIFIED}
    assert all(node.cumulative is not None for node in behind)
    largest = max(errors.values())
    for node in behind:
        assert node.cumulative is not None
        if node.verdict is Verdict.AMPLIFIED:
            assert node.cumulative.error > 10 * min(error for error in errors.values() if error)
        if node.verdict is Verdict.INHERITED:
            assert 0 < node.cumulative.error <= largest


# a device that fails


def fails_at(call: int, error: Exception) -> Callable[[Tensor, Tensor], None]:
    """CONT that fails once: in its n-th call. Of a node the first call is the isolated one, the second the run's."""
    calls = iter(range(1 << 30))

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if next(calls) == call:
            raise error

    return cont


@pytest.mark.some(1)
@pytest.mark.parametrize("error", [ValueError("no rows today"), KernelError("row 9 of 4")])
@pytest.mark.parametrize(("call", "step", "name"), [(1, 0, "kqv_out-0"), (3, 0, "kqv_out-1"), (7, 1, "kqv_out-1")])
def test_where_the_device_fails_nodes_are_compared_one_by_one(
    model: Models, call: int, step: int, name: str, error: Exception
) -> None:
    whole = run(model("llama"))
    with default_backend().ops.having(planted("CONT", fails_at(call, error))):
        result = run(model("llama"))
    assert not result
    assert result.wrong == []
    assert result.states == []
    assert result.stopped is not None
    assert str(error) in result.stopped
    assert f"CONT node {name!r}" in result.stopped
    at = next(i for i, node in enumerate(result.nodes) if (node.step, node.name) == (step, name) and node.op == "CONT")
    assert all(node.cumulative is not None for node in result.nodes[:at] if node.types[0] != " " and node.on)
    assert all(node.cumulative is None and node.on == "" for node in result.nodes[at:])
    assert [(n.op, n.name, n.isolated is None) for n in result.compared] == [
        (n.op, n.name, n.isolated is None) for n in whole.compared
    ]
    assert result.text == whole.text


def test_a_node_that_fails_alone_stops_the_run(model: Models) -> None:
    with default_backend().ops.having(planted("CONT", fails_at(2, ValueError("no rows today")))):
        result = run(model("llama"))
    assert [(node.step, node.name, node.verdict) for node in result.wrong] == [(0, "kqv_out-1", Verdict.FAILED)]
    where = f"({Path(__file__).name} line {fails_at.__code__.co_firstlineno + 7})"
    assert result.wrong[0].failure == f"ValueError: no rows today {where}"
    assert result.stopped is not None
    assert result.stopped.endswith(f"CONT node 'kqv_out-1': ValueError: no rows today {where}")


# the error of a whole run


def logits(file: Path, device: DeviceName, tokens: list[list[int]]) -> list[np.ndarray]:
    options = replace(FLASH_OFF, device=device, n_ctx=context_for(PROMPT, 2))
    with Session(file, options) as session:
        found = []
        for chunk in tokens:
            session.decode(chunk)
            found.append(session.logits().astype(np.float64))
    return found


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_errors_of_the_run_are_those_of_two_separate_runs(backend: Plugin, model: Models, name: str) -> None:
    with Session(model(name), replace(FLASH_OFF, n_ctx=context_for(PROMPT, 2))) as session:
        chunks = [session.tokenize(PROMPT)]
        for _ in range(2):
            session.decode(chunks[-1])
            chunks.append([Sampler()(session.logits())])
    with default_backend().ops.having(planted("CONT", twice)):
        wrong = logits(model(name), "npu", chunks)
        backend.forget_plans()
        result = run(model(name))
    right = logits(model(name), "cpu", chunks)
    last = {node.step: node.cumulative for node in result.nodes if node.name == "result_output"}
    assert len(last) == 3
    for step, (x, y) in enumerate(zip(right, wrong, strict=True)):
        found = last[step]
        assert found is not None
        assert found.nmse == pytest.approx(np.square(x - y).sum() / np.square(x).sum(), rel=1e-12)
        assert found.max_abs == np.abs(x - y).max() > 0
        assert found.cosine == pytest.approx(x @ y / sqrt((x @ x) * (y @ y)), rel=1e-12)
