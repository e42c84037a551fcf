"""Two runs in step: verdicts, errors of whole runs, caches and states, tolerances, and the numbers of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, isnan, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import Models
from support import ROWS_APART, Scene, choose, examples, seeds

import quant
from ggml_backend_npu import KernelError, Tensor, default_backend
from ggml_backend_npu.abi import convert
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry import Op
from graph_runner.cli import main
from graph_runner.compare import ULP_BINS, compare, heat
from graph_runner.diff import DiffResult, diff
from graph_runner.results import NodeResult, Verdict
from graph_runner.rules import Rules, ToleranceError
from graph_runner.session import DeviceName, Sampler, Session, Settings, context_for
from graph_runner.state import StateResult

PROMPT = "The capital of France is"
CELLS = 26  # tokens of the prompt
N_CELLS = 256
FLASH_OFF = Settings(flash_attention="off", threads=1)
FLASH_ON = Settings(flash_attention="on", threads=1)
QUANTISED = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", threads=1)

MODELS = [
    *(pytest.param(name, FLASH_OFF, id=f"{name}, flash off") for name in ("llama", "moe", "rwkv7", "mamba")),
    *(pytest.param(name, FLASH_ON, id=f"{name}, flash on") for name in ("llama", "gpt-oss")),
    pytest.param("llama", QUANTISED, id="llama, quantised caches"),
]

CLEAN = {Verdict.EXACT, Verdict.ROUNDING}


@pytest.fixture(autouse=True)
def as_before(backend: Plugin) -> Iterator[None]:
    """Plans with planted kernels are gone after a test."""
    yield
    backend.forget_plans()


def planted(name: str, kernel: Callable[..., None]) -> Op:
    return Op(name, kernel, OWN[name].types, OWN[name].refuse, params=OWN[name].params)


def run(file: Path, settings: Settings = FLASH_OFF, steps: int = 2, **options: Any) -> DiffResult:
    return diff(file, PROMPT, steps=steps, settings=settings, **options)


def is_off(node: NodeResult) -> bool:
    return node.cumulative is not None and not node.cumulative


# verdicts


@pytest.mark.some(7)
@pytest.mark.parametrize(("name", "settings"), MODELS)
@pytest.mark.parametrize("ops", ["default", "all"])
@pytest.mark.parametrize("fusion", ["on", "off"])
def test_right_kernels_are_blamed_for_nothing(
    model: Models, name: str, settings: Settings, ops: str, fusion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inherited error has a node in front that rounds otherwise; where only data is moved, there is none."""
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
    """Behind the node that put it in it is inherited, or amplified."""
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


@pytest.mark.some(2)
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


def test_what_goes_wrong_once_is_not_forgotten_for_a_second_look(model: Models) -> None:
    """A write that no node explains, in the first run alone: the strict one that follows finds nothing."""
    caches: list[Tensor] = []
    calls = iter(range(1 << 30))

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if dst.name.startswith("cache_k_l1"):
            caches[:] = [dst]

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if next(calls) == 3:
            caches[0].view()[0, 0, 40, 5] = 1

    with default_backend().ops.having(planted("SET_ROWS", set_rows), planted("CONT", cont)):
        result = run(model("llama"))
    assert not result
    assert result.wrong == []
    assert result.stray == [StateResult("cache_k_l1", 0, None, (40,), N_CELLS)]


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


# caches and states


def next_cell(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))


@pytest.mark.parametrize("settings", [FLASH_ON, FLASH_OFF, QUANTISED], ids=["flash on", "flash off", "quantised"])
def test_cells_of_a_cache_that_are_wrong(model: Models, settings: Settings) -> None:
    """Without flash attention a cell of V is a column."""
    with default_backend().ops.having(planted("SET_ROWS", next_cell)):
        result = run(model("llama"), settings)
    k, v, *_ = result.states
    reshaped = "cache_v_l0 (reshaped) (view)" if settings is FLASH_OFF else "cache_v_l0 (view)"
    cells = tuple(range(CELLS + 1))
    assert k == StateResult("cache_k_l0", 0, "SET_ROWS node 'cache_k_l0 (view)'", cells, N_CELLS)
    assert v == StateResult("cache_v_l0", 0, f"SET_ROWS node {reshaped!r}", cells, N_CELLS)
    assert [(s.step, s.tensor) for s in result.states if s.step == 1][:1] == [(1, "cache_k_l0")]
    assert next(s for s in result.states if s.step == 1).cells == (CELLS + 1,)


@pytest.mark.parametrize("settings", [FLASH_ON, FLASH_OFF], ids=["flash on", "flash off"])
def test_the_first_step_with_a_wrong_cell(model: Models, settings: Settings) -> None:
    def later(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        wrong = dst.name.startswith("cache_v_l1") and ids.view().max() % N_CELLS == CELLS + 1
        OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1) if wrong else ids)

    with default_backend().ops.having(planted("SET_ROWS", later)):
        result = run(model("llama"), settings, steps=3)
    first = result.states[0]
    assert (first.tensor, first.step, first.cells) == ("cache_v_l1", 2, (CELLS + 1, CELLS + 2))
    assert first.node is not None
    assert first.node.startswith("SET_ROWS node 'cache_v_l1 ")
    assert (result.wrong[0].step, result.wrong[0].name) == (2, first.node.split("'")[1])


@pytest.mark.parametrize("name", ["rwkv7", "mamba"])
def test_a_recurrent_state_that_is_wrong(model: Models, name: str) -> None:
    def later(dst: Tensor, src: Tensor) -> None:
        OWN["CPY"].define(dst, src)
        if dst.name.startswith("cache_s_l1") and dst.n_elements and steps:
            dst.view()[..., 7] += 1

    steps: list[NodeResult] = []
    with default_backend().ops.having(planted("CPY", later)):
        result = run(model(name), seen=lambda node: steps.append(node) if node.step == 1 else None)
    first = result.states[0]
    assert (first.tensor, first.step, first.cells, first.n_cells) == ("cache_s_l1", 1, (0,), 1)
    assert first.node is not None
    assert first.node.startswith("CPY node 'cache_s_l1 (view) (copy of")
    assert all(state.node is not None for state in result.states)


def test_a_write_into_a_cache_by_a_node_that_does_not_write_there(model: Models) -> None:
    """No node's result is wrong: found at the end of the step."""
    caches: list[Tensor] = []

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if dst.name.startswith("cache_k_l1"):
            caches[:] = [dst]

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if dst.name == "kqv_out-1" and dst.ne[1] == 1 and caches:
            caches[0].view()[0, 0, 40, 5] = 1

    with default_backend().ops.having(planted("SET_ROWS", set_rows), planted("CONT", cont)):
        result = run(model("llama"))
    assert result.wrong == []
    assert result.stray == result.states == [StateResult("cache_k_l1", 1, None, (40,), N_CELLS)]
    assert not result


@pytest.mark.slow
def test_a_write_into_a_cache_that_is_read_next(model: Models) -> None:
    """The node that reads it is right, and is not blamed; in the next step the one that writes there is not, either."""
    caches: list[Tensor] = []

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if dst.name.startswith("cache_k_l1"):
            caches[:] = [dst]
        elif dst.name.startswith("cache_v_l1"):
            caches[0].view()[0, 0, 3, 5] = 1

    with default_backend().ops.having(planted("SET_ROWS", set_rows)):
        result = run(model("llama"))
    assert result.wrong == []
    assert not result
    assert result.stray == [StateResult("cache_k_l1", 0, None, (3,), N_CELLS)]
    first = next(node for node in result.nodes if is_off(node))
    assert (first.step, first.op, first.name, first.verdict) == (0, "MUL_MAT", "kq-1", Verdict.INHERITED)


def test_a_kernel_that_is_wrong_in_the_run_alone(model: Models) -> None:
    """As one that races: from the same inputs, computed again, it is right."""
    calls = iter(range(1 << 30))

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if next(calls) == 1:
            dst.view()[0, 0, 3, 5] = 1

    with default_backend().ops.having(planted("SET_ROWS", set_rows)):
        result = run(model("llama"))
    assert [(node.step, node.name) for node in result.wrong] == [(0, "cache_k_l0 (view)")]
    assert result.wrong[0].isolated
    assert result.states[0] == StateResult("cache_k_l0", 0, "SET_ROWS node 'cache_k_l0 (view)'", (3,), N_CELLS)


# tolerances


def test_tolerances_by_op_and_type() -> None:
    own = Rules()
    assert own.bound("GET_ROWS", "q8_0") == own.bound("SET_ROWS", "f32") == own.bound("NO_SUCH_OP", "f32") == 0
    assert own.bound("MUL_MAT", "q4_K") == own.bound("MUL_MAT", "f32") == 1e-10
    assert own.bound("FLASH_ATTN_EXT", "f32") == 1e-11
    assert own.bound("FLASH_ATTN_EXT", "f16") == 1e-6, "the CPU adds up v of that type in half floats"
    assert own.bound("ROPE", "f16") == own.bound("ROPE", "bf16") == 1e-11


def test_a_file_of_tolerances_lies_over_the_own_ones(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text('[MUL_MAT]\nf32 = 0.5\n[GET_ROWS]\n"*" = 1\n')
    found = Rules(path)
    assert found.bound("MUL_MAT", "f32") == 0.5
    assert found.bound("MUL_MAT", "f16") == 1e-10
    assert found.bound("GET_ROWS", "q8_0") == 1.0
    assert Rules().bound("GET_ROWS", "q8_0") == 0


BAD = [
    ("MUL_MAT = 3", "MUL_MAT = 3: must be a table of types"),
    ("[MUL_MAT]\nf32 = -1", "MUL_MAT.f32 = -1: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = nan", "MUL_MAT.f32 = nan: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = inf", "MUL_MAT.f32 = inf: must be a number of 0 or more"),
    ("[MUL_MAT]\nf32 = true", "MUL_MAT.f32 = True: must be a number of 0 or more"),
    ('[MUL_MAT]\nf32 = "0.1"', "MUL_MAT.f32 = '0.1': must be a number of 0 or more"),
    ("[MUL_MAT\n", "at line 1, column 9"),
    (b"\xff\xfe", "codec can't decode byte"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_file_of_tolerances_that_is_none(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ToleranceError) as refused:
        Rules(path)
    assert str(refused.value).startswith(f"tolerances {str(path)!r}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "message"), [("none.toml", "No such file or directory"), ("", "Is a directory")])
def test_no_file_of_tolerances(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ToleranceError, match=message):
        Rules(tmp_path / name)


def test_the_command_refuses_a_file_of_tolerances_in_one_line(
    model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[CONT]\nf32 = -1\n")
    monkeypatch.setattr(sys, "argv", ["ggml-npu", "diff", str(model("llama")), "--tolerances", str(path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"ggml-npu: tolerances {str(path)!r}: CONT.f32 = -1: must be a number of 0 or more\n"


def test_a_diff_goes_by_the_tolerances_that_it_is_given(model: Models, tmp_path: Path) -> None:
    def off(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        dst.view()[...] *= np.float32(1 + 1e-4)

    path = tmp_path / "own.toml"
    path.write_text("[CONT]\nf32 = 1e-7\n")
    with default_backend().ops.having(planted("CONT", off)):
        assert not run(model("llama"), steps=0)
        result = run(model("llama"), steps=0, rules=Rules(path))
    assert result
    first, second = (node for node in result.nodes if node.op == "CONT")
    assert (first.verdict, second.verdict) == (Verdict.ROUNDING, Verdict.INHERITED)


# metrics

FLOATS = {"f32": np.float32, "f16": np.float16}


def bits(type: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Any bits, many of them special."""
    width = np.uint32 if type == "f32" else np.uint16
    any_bits = rng.integers(0, np.iinfo(width).max, n, dtype=width, endpoint=True)
    if type == "f32":
        any_bits = np.where(rng.random(n) < 0.5, rng.standard_normal(n).astype(np.float32).view(width), any_bits)
    special = quant.quantize(np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 6e-8]), type).view(width)
    return np.where(rng.random(n) < 0.1, rng.choice(special.reshape(-1), n), any_bits).astype(width)


def tensor(type: str, values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    if type == "bf16":
        import ml_dtypes

        return Tensor.of(values.view(ml_dtypes.bfloat16).reshape(shape))
    return Tensor.of(values.view(FLOATS[type]).reshape(shape))


def ordinals(type: str) -> np.ndarray:
    """By bits, the place of each 16-bit float among all of its type in ascending order; both zeros at one place."""
    values = quant.dequantize(np.arange(1 << 16, dtype=np.uint16).view(np.uint8), type).reshape(-1)
    distinct = np.unique(values[~np.isnan(values)])
    return np.searchsorted(distinct, values)


def bin_of(apart: int) -> int:
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    return next((i for i, edge in enumerate(edges) if apart <= edge), len(edges))


def float64(t: Tensor) -> np.ndarray:
    return t.view().astype(np.float64).reshape(-1)


@pytest.mark.filterwarnings("error")
@examples(60)
@given(seed=seeds, type=st.sampled_from(["f32", "f16", "bf16"]), n=st.integers(1, 60))
def test_a_comparison_is_what_it_is_defined_as(seed: int, type: str, n: int) -> None:
    rng = np.random.default_rng(seed)
    a = bits(type, n, rng)
    b = np.where(rng.random(n) < 0.5, a, bits(type, n, rng)).astype(a.dtype)
    close = rng.random(n) < 0.3
    b[close] = a[close] ^ rng.integers(0, 300, int(close.sum()), dtype=a.dtype)
    reference, result = tensor(type, a, (n,)), tensor(type, b, (n,))
    with np.errstate(all="ignore"):
        x, y = float64(reference), float64(result)
    found = compare(reference, result)
    assert (found.n_bytes, bool(found)) == (a.nbytes, a.tobytes() == b.tobytes())
    if found:
        return
    assert found.n_different == sum(p != q for p, q in zip(a.tobytes(), b.tobytes(), strict=True))
    assert found.where == (0, 0, 0, next(i for i in range(n) if a[i] != b[i]))
    assert found.nan == (np.isnan(x).sum(), np.isnan(y).sum())
    assert found.inf == (np.isinf(x).sum(), np.isinf(y).sum())

    pairs = [(float(p), float(q)) for p, q in zip(x, y, strict=True) if np.isfinite(p) and np.isfinite(q)]
    odd = [(p, q) for p, q in zip(x, y, strict=True) if not (np.isfinite(p) and np.isfinite(q))]
    same = all(p == q or (isnan(p) and isnan(q)) for p, q in odd)
    assert found.max_abs == (max((abs(p - q) for p, q in pairs), default=0.0) if same else inf)
    assert found.max_rel == max((abs((p - q) / p) for p, q in pairs if p), default=0.0)
    power, other = sum(p * p for p, _ in pairs), sum(q * q for _, q in pairs)
    squares = sum((p - q) ** 2 for p, q in pairs)
    nmse = nan if not pairs else squares / power if power else squares
    assert found.nmse == pytest.approx(nmse, rel=1e-9, nan_ok=True)
    if power and other:
        cosine = sum(p * q for p, q in pairs) / sqrt(power) / sqrt(other)
        assert found.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-12)
    assert found.error == (inf if not same or isnan(nmse) else found.nmse)
    assert sum(found.ulp) == sum(not (isnan(p) or isnan(q)) for p, q in zip(x, y, strict=True))
    if type != "f32":
        places = ordinals(type)
        expected = [0] * len(ULP_BINS)
        for i in range(n):
            if not (isnan(x[i]) or isnan(y[i])):
                expected[bin_of(abs(int(places[a[i]]) - int(places[b[i]])))] += 1
        assert list(found.ulp) == expected


@given(seed=seeds, steps=st.integers(0, 300))
def test_ulp_of_float32_are_steps_to_the_next_one(seed: int, steps: int) -> None:
    """Through zero, too."""
    rng = np.random.default_rng(seed)
    start = np.float32(rng.choice([1.0, -1.0, 0.0, 1e-44, -1e-44, 1e-38, 3.4028235e38, rng.standard_normal()]))
    value, taken = start, 0
    with np.errstate(over="ignore", under="ignore"):
        while taken < steps and value != np.inf:
            value, taken = np.nextafter(value, np.float32(np.inf)), taken + 1
    found = compare(Tensor.of(np.array([start, 1], np.float32)), Tensor.of(np.array([value, 2], np.float32)))
    expected = [0] * len(ULP_BINS)
    expected[bin_of(taken)] += 1
    expected[bin_of(1 << 23)] += 1
    assert list(found.ulp) == expected


def test_a_comparison_of_zeros() -> None:
    zero, negative, one = (Tensor.of(np.full(4, value, np.float32)) for value in (0.0, -0.0, 1.0))
    found = compare(zero, negative)
    assert not found
    assert (found.n_different, found.nmse, found.max_abs, found.cosine, found.ulp[0]) == (4, 0, 0, 1, 4)
    assert found.within(0)
    found = compare(zero, one)
    assert (found.nmse, found.max_rel, found.cosine) == (4, 0, 0)


@examples(20)
@given(seed=seeds)
def test_a_comparison_of_rows_with_gaps(backend: Plugin, seed: int) -> None:
    """Bytes between the rows count as bytes, and are no values."""
    rng = np.random.default_rng(seed)
    with Scene(backend.ggml, "CPU") as scene:
        views = [ROWS_APART.put(scene, "f32", (4, 3, 2, 1), lambda n: np.zeros(n, np.float32)) for _ in range(2)]
        for root, data in scene.roots:
            scene.set(root, data)
        a, b = (convert.tensor(scene.ggml, view) for view in views)
        b = replace(b, memory=replace(b.memory, writable=True))
        where = tuple(int(rng.integers(n)) for n in (1, 2, 3, 4))
        b.view()[where] = 2
        found = compare(a, b)
        assert (found.where, found.max_abs, found.n_different, found.ulp[0]) == (where, 2, 1, 23)
        b.view()[where] = 0
        b.memory.bytes()[b.offset + 20] = 1
        found = compare(a, b)
        assert (found.where, found.max_abs, found.n_different) == (None, 0, 1)
        assert not found.within(1)


@examples(60)
@given(seed=seeds, rows=st.integers(1, 70), cols=st.integers(1, 70))
def test_a_heat_map_has_the_largest_difference_of_each_patch(seed: int, rows: int, cols: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal((rows, cols)).astype(np.float32) for _ in range(2))
    a[rng.random(a.shape) < 0.02] = np.nan
    b[rng.random(b.shape) < 0.02] = np.inf
    found = heat(Tensor.of(a), Tensor.of(b))
    assert (found.n_rows, found.ne0, found.rows, found.cols) == (rows, cols, min(rows, 32), min(cols, 32))
    expected = [0.0] * (found.rows * found.cols)
    place_of = {
        (n, parts): [max(part for part in range(parts) if n * part // parts <= i) for i in range(n)]
        for n, parts in ((rows, found.rows), (cols, found.cols))
    }
    for i in range(rows):
        for j in range(cols):
            error = abs(float(a[i, j]) - float(b[i, j]))
            error = inf if isnan(error) else error
            place = place_of[rows, found.rows][i] * found.cols + place_of[cols, found.cols][j]
            expected[place] = max(expected[place], error)
    assert list(found.values) == expected


# memory of the device's own

IN_DEVICE_MEMORY = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from ggml_backend_npu import default_backend, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry import Op
from graph_runner.diff import diff
from graph_runner.session import Settings

def set_rows(dst, src, ids):
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))

def prepare(dst, src, ids):
    if dst.packed is not None:
        packed.add(dst.type)

def run():
    settings = Settings(
        flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", gpu_layers=999, threads=1
    )
    result = diff(Path(sys.argv[1]), sys.argv[2], steps=2, settings=settings)
    return {
        "passed": bool(result), "stopped": result.stopped, "on": sorted({node.on for node in result.nodes}),
        "verdicts": sorted({node.verdict for node in result.nodes}), "states": [asdict(s) for s in result.states],
        "wrong": [(node.step, node.op, node.name) for node in result.wrong],
        "rows": [node.on for node in result.nodes if node.op == "SET_ROWS"],
        "packed": sorted(packed),
    }

packed = set()
right = run()
own = OWN["SET_ROWS"]
with default_backend().ops.having(Op("SET_ROWS", set_rows, own.types, own.refuse, prepare=prepare)):
    wrong = run()
print(json.dumps([right, wrong]))
"""


@pytest.mark.slow
def test_caches_packed_in_memory_of_the_device(model: Models) -> None:
    environment = os.environ | {"GGML_NPU_MEMORY": "device", "GGML_NPU_DEVICE_TYPE": "gpu"}
    command = [sys.executable, "-c", IN_DEVICE_MEMORY, str(model("llama")), PROMPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    right, wrong = json.loads(done.stdout)
    assert right["passed"], right
    assert (right["stopped"], right["states"], wrong["packed"]) == (None, [], ["q4_0", "q8_0"])
    assert set(right["verdicts"]) <= {"exact", "rounding"}
    assert set(right["rows"]) == {"NPU"}
    assert not wrong["passed"]
    assert wrong["wrong"][0] == [0, "SET_ROWS", "cache_k_l0 (view)"]
    first = wrong["states"][0]
    assert (first["tensor"], first["step"], first["cells"]) == ("cache_k_l0", 0, [*range(CELLS + 1)])
