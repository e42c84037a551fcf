"""Two runs in step: which cells of caches and states are wrong, since when, and by which node."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kit.diffs import CELLS, FLASH_OFF, FLASH_ON, N_CELLS, PROMPT, QUANTISED, is_off, planted, run
from kit.models import Models

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Op
from graph_runner.diff.state import StateResult
from graph_runner.judging.results import NodeResult, Verdict
from graph_runner.run.session import Settings

pytestmark = pytest.mark.usefixtures("as_before")


def keeping(caches: list[Tensor]) -> Op:
    """SET_ROWS, which is right. `caches` then has the K cache of layer 1."""

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if dst.name.startswith("cache_k_l1"):
            caches[:] = [dst]

    return planted("SET_ROWS", set_rows)


def next_cell(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))


@pytest.mark.some(1)
@pytest.mark.daily(2)
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


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_goes_wrong_once_is_not_forgotten_for_a_second_look(model: Models) -> None:
    """A write that no node explains, in the first run alone: the strict one that follows finds nothing."""
    caches: list[Tensor] = []
    calls = iter(range(1 << 30))

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if next(calls) == 3:
            caches[0].view()[0, 0, 40, 5] = 1

    with default_backend().ops.having(keeping(caches), planted("CONT", cont)):
        result = run(model("llama"))
    assert not result
    assert result.wrong == []
    assert result.stray == [StateResult("cache_k_l1", 0, None, (40,), N_CELLS)]


def test_a_write_into_a_cache_by_a_node_that_does_not_write_there(model: Models) -> None:
    """No node's result is wrong: found at the end of the step."""
    caches: list[Tensor] = []

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if dst.name == "kqv_out-1" and dst.ne[1] == 1 and caches:
            caches[0].view()[0, 0, 40, 5] = 1

    with default_backend().ops.having(keeping(caches), planted("CONT", cont)):
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


# memory of the device's own


IN_DEVICE_MEMORY = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from ggml_backend_npu import default_backend, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Op
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Settings

def set_rows(dst, src, ids):
    OWN["SET_ROWS"].define(dst, src, Tensor.of(ids.view() + 1))

def prepare(dst, src, ids):
    if dst.packed is not None:
        packed.add(dst.type)

def run():
    settings = Settings(
        flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", gpu_layers=999, threads=1
    )
    result = diff(Path(sys.argv[1]), sys.argv[2], DiffOptions(steps=2, settings=settings))
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
