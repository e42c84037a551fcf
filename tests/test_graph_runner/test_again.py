"""The tokens of a diff run once more: each time the same, also when nobody looks on; and how a run ends."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.commands import fresh
from kit.diffs import FLASH_OFF, PROMPT, beside_another, planted
from kit.models import Models
from kit.support import Scene, choose

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.ggml import convert
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.params import Params
from graph_runner.diff import DiffOptions, again
from graph_runner.diff.logits import Ending, Endings, nmse
from graph_runner.diff.run import DiffResult, diff
from graph_runner.judging.results import OWN_RUN, Verdict

KERNELS = """
import os
from itertools import count
import numpy as np
from ggml_backend_npu import op

calls = count()

@op("CONT")
def cont(dst, src):
    if next(calls) >= 60:
        {ends}
    dst.view()[...] = src.view().reshape(dst.view().shape)

@op("MUL_MAT", types=[("f32", "f32", "f32"), ("f32", "f16", "f32")])
def mul_mat(dst, a, b, *_):
    rows = np.repeat(np.repeat(a.view().astype(np.float32), b.ne[2] // a.ne[2], 1), b.ne[3] // a.ne[3], 0)
    order = np.random.default_rng().permutation(a.ne[0])
    columns = b.view().astype(a.view().dtype).astype(np.float32)
    dst.view()[...] = columns[..., order] @ rows[..., order].swapaxes(2, 3)
"""

pytestmark = pytest.mark.usefixtures("as_before")


def run(model: Models, repeat: int = 1) -> DiffResult:
    return diff(model("llama"), PROMPT, DiffOptions(steps=1, settings=FLASH_OFF, repeat=repeat))


@pytest.mark.slow
def test_a_node_that_is_not_the_same_each_time_is_named(model: Models, backend: Plugin) -> None:
    """Right in the first run, and in each isolated one."""
    calls = count()
    n = 20  # calls of the first run: 4 nodes, each isolated, in the own run and, unseen, in the plan of another graph

    def cont(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        if next(calls) >= n and dst.ne[1] == 1:
            dst.view()[..., 0] += 1

    with default_backend().ops.having(planted("CONT", cont)):
        assert run(model)
        calls = count()
        result = run(model, repeat=8)
    assert not result
    assert [(node.op, node.step, node.verdict, node.wrong_in) for node in result.wrong] == [
        ("CONT", 1, Verdict.FAILED, OWN_RUN)
    ]
    assert "is not the same each time: run" in (result.wrong[0].failure or "")


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["raise ValueError('no more')", "os.abort()"])
def test_a_node_that_fails_in_a_repeated_run_is_named(ends: str, tmp_path: Path) -> None:
    """Beside products that are right, and not the same each time."""
    kernels = tmp_path / "kernels.py"
    kernels.write_text(KERNELS.format(ends=ends))
    done = fresh("diff", "tiny", "--kernels", kernels, "--repeat", "12", "--json", tmp_path / "found.json")
    assert done.code == 1, done.err
    found = json.loads((tmp_path / "found.json").read_text())
    (wrong,) = [node for node in found["nodes"] if not node["passed"]]
    assert (wrong["op"], wrong["wrong_in"]) == ("CONT", OWN_RUN)
    assert ("no more" if "no more" in ends else "ended by SIGABRT in its own run") in wrong["failure"]


@pytest.mark.slow
def test_a_node_that_is_right_only_when_it_is_looked_at_is_named(model: Models) -> None:
    """Wrong where it runs in one graph with another node, in the second layer."""
    is_beside_another = beside_another()

    def get_rows(dst: Tensor, table: Tensor, ids: Tensor) -> None:
        OWN["GET_ROWS"].define(dst, table, ids)
        is_beside_another()

    def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
        OWN["SET_ROWS"].define(dst, src, ids)
        if is_beside_another() and dst.name.startswith("cache_v_l1"):
            dst.view()[..., 0] += 1

    with default_backend().ops.having(planted("GET_ROWS", get_rows), planted("SET_ROWS", set_rows)):
        result = run(model)
    assert not result
    (wrong,) = result.wrong
    assert (wrong.op, wrong.step) == ("SET_ROWS", 0)
    assert wrong.name.startswith("cache_v_l1")
    assert (
        wrong.failure
        == "one of these nodes gives other bytes when nodes run together, not one by one; which is not known"
    )
    assert wrong.since.startswith(f"step 0 node {wrong.index - 1}: "), "a group of two"


@pytest.mark.slow
def test_a_run_that_rounds_ends_within_what_is_natural(model: Models) -> None:
    """One last bit more in each norm: the CPU with as large errors is as far from itself."""

    def rms_norm(dst: Tensor, x: Tensor, params: Params) -> None:
        OWN["RMS_NORM"].define(dst, x, params=params)
        dst.view()[...] = np.nextafter(dst.view(), np.float32(np.inf))

    with default_backend().ops.having(planted("RMS_NORM", rms_norm)), pytest.MonkeyPatch.context() as patch:
        choose(patch, ops="all")
        result = run(model)
        assert result, result.wrong[:1]
        assert result.ending is not None
        assert result.ending.natural is not None
        assert 0 < result.ending.nmse <= result.ending.limit  # type: ignore[operator]
        patch.setattr(again, "_FAR", 0.0)
        patch.setattr(again, "_NOTHING", 0.0)
        assert not run(model), "the end of a run counts"


def test_nan_of_another_algorithm_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With flash attention switched the reference may give NaN in other places, which lets nothing else be off."""
    right = np.ones((1, 4), np.float32)
    off = np.array([[1, 1, 1, 1.0001]], np.float32)
    found = {"on": np.full((1, 4), np.nan, np.float32), "off": off}
    monkeypatch.setattr(again.Again, "_run", lambda _, settings, observer=None: [found[settings.flash_attention]])
    device: Any = SimpleNamespace(runs_with=lambda settings: settings)
    computer: Any = SimpleNamespace(reference=SimpleNamespace(is_cpu=False))
    watched = again.Watched([right], [right], {}, [], ["logits"])
    runs = again.Again(None, None, device, computer, FLASH_OFF, [], watched)  # type: ignore[arg-type]
    ending = runs.natural(Ending(0.1, 0.0, None))
    assert ending.natural == pytest.approx(2.5e-9, rel=0.01)
    assert not ending


@pytest.mark.parametrize(("op", "argument"), [("top_k", 8), ("argsort", 0)])
def test_noise_puts_the_indices_of_top_k_in_another_order(backend: Plugin, op: str, argument: int) -> None:
    """Their order means nothing, though what is added up in it is rounded otherwise; of other integers none changes."""
    with Scene(backend.ggml, "CPU") as scene:
        x = scene.root("f32", (40, 3), np.random.default_rng(0).standard_normal((3, 40), np.float32))
        node = scene.op(op, x, argument)
        scene.fill(node)
        scene.compute(node)
        result = convert.tensor(backend.ggml, node).view()
        before = result.copy()
        again._Noise(backend.ggml, {(0, 0): 0.5}, seed=0).saw((0, 0), node)
        assert np.array_equal(np.sort(result, axis=-1), np.sort(before, axis=-1))
        assert np.array_equal(result, before) == (op == "argsort")


def test_an_equal_run_ends_equal(model: Models) -> None:
    result = run(model)
    assert result.ending == Ending(0.0, 0.0, None)


def test_logits_are_compared_step_by_step() -> None:
    a, b = np.array([1, 2, 3], np.float32), np.array([1, 2, 2.5], np.float32)
    endings = Endings()
    endings.add(np.stack([a]), np.stack([a]))
    endings.add(np.stack([a, 9 * a]), np.stack([b, 9 * a]))
    found = endings.ending()
    assert found.nmse == nmse(a, b) == pytest.approx(0.25 / 14)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (a.astype(float), b.astype(float)))
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()))
    assert found.first_token is None
    endings.add(np.stack([a, a]), np.stack([a, -a]))
    assert endings.ending().first_token == 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_infinitely_far(value: float) -> None:
    a = np.ones(3, np.float32)
    b = a.copy()
    b[1] = value
    assert nmse(a, b) == np.inf
