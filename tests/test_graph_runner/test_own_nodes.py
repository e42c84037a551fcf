"""Every node that the device runs is looked at, and what nobody has looked at is never called right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.diffs import FLASH_OFF, PROMPT, planted
from kit.models import OTHERS, WRITERS, Models
from kit.support import choose
from tools.own_nodes import WAYS, Way, counted_diff, counting, found, missing, table

from ggml_backend_npu import Backend, Graph, Node, Tensor, default_backend
from ggml_backend_npu.backend import fusion
from ggml_backend_npu.backend.options import Options
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ops import OWN, routing
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.registry.entry import Call, Op
from graph_runner.base.console import Console
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import OWN_RUN, STOPPED, Fate, Verdict
from graph_runner.reports.diff_report import diff_json, print_diff
from graph_runner.reports.html import diff_html
from graph_runner.tools.suites import folder
from graph_runner.trace import replay


@pytest.fixture(autouse=True)
def as_before(backend: Plugin) -> Iterator[None]:
    yield
    backend.forget_plans()


def run(file: Path, steps: int = 1, **options: Any) -> DiffResult:
    return diff(file, PROMPT, DiffOptions(steps=steps, settings=FLASH_OFF, **options))


# it adds up


@pytest.mark.some(3)
@pytest.mark.daily(3)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", [*WRITERS, *OTHERS])
def test_every_node_of_the_own_run_is_accounted_for(model: Models, name: str, way: Way) -> None:
    result, counted = counted_diff(model(name), way)
    assert missing(result, counted) == ""
    assert counted.on_device > 0
    assert result, result.wrong[:1]


@pytest.mark.daily(2)
@pytest.mark.conformance
def test_every_node_of_every_architecture_is_accounted_for(turn: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A sixth of them each time."""
    rows = [*found(sorted(folder().with_name("models").glob("*.gguf"))[turn % 6 :: 6])]
    with capsys.disabled():
        Console(width=140).print(table(rows))
    assert rows
    assert [row for row in rows if row[3]] == []


@pytest.mark.some(1)
@pytest.mark.parametrize(("name", "operator", "n_left_out"), [("moe", "TopKSoftmax", 4), ("rwkv7", "token_shift", 3)])
def test_what_an_operator_leaves_out_has_its_name(
    model: Models, name: str, operator: str, n_left_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops="all")
    result = run(model(name))
    assert result
    left_out = [node for node in result.nodes if node.fate is Fate.FUSED]
    assert {node.fused for node in left_out} == {operator}
    assert len(left_out) == 2 * n_left_out * 2  # layers, steps
    assert f"; {len(left_out)} left out by {operator}" in text(result)
    assert all(node.mirrored is None and node.on == "NPU" for node in left_out)
    written = [node for node in result.nodes if node.fused == operator and node.fate is Fate.JUDGED]
    assert written
    assert all(node.mirrored is not None and node.cumulative is not None for node in written)


# what was held back is judged alone


def soft_max_that_is(off: Callable[[Tensor], bool]) -> Op:
    """A user's SOFT_MAX, 1.001 times off where it is said to be."""

    def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, *, params: SoftMax) -> None:
        OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
        if off(dst):
            dst.view()[...] *= np.float32(1.001)

    return planted("SOFT_MAX", soft_max)


def in_ggmls_memory(dst: Tensor) -> bool:
    """Whether a tensor is no copy: in the device's own run."""
    return dst.memory.owner is None


def each_second_time() -> Callable[[Tensor], bool]:
    """Of two calls for each node, the first is isolated."""
    calls = count()
    return lambda dst: next(calls) % 2 == 1


def assert_wrong_in_the_own_run(result: DiffResult) -> None:
    """Each SOFT_MAX, and nothing else."""
    assert not result
    soft_max = [node for node in result.nodes if node.op == "SOFT_MAX"]
    assert {(node.on, node.verdict, node.wrong_in) for node in soft_max} == {("NPU", Verdict.INTRODUCED, OWN_RUN)}
    assert result.wrong == soft_max


@pytest.mark.some(1)
@pytest.mark.daily(3)
@pytest.mark.parametrize("ops", ["default", "all"])
@pytest.mark.parametrize("name", ["llama", "mpt", "moe"])
def test_a_users_kernel_of_a_fusions_op_is_judged_in_the_own_run(
    model: Models, name: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops=ops)
    with default_backend().ops.having(soft_max_that_is(in_ggmls_memory)):
        assert_wrong_in_the_own_run(run(model(name)))


@pytest.mark.some(1)
@pytest.mark.parametrize("ops", ["default", "all"])
def test_what_runs_after_a_users_kernel_is_not_blamed_for_it(
    model: Models, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the CPU nor by the device."""
    choose(monkeypatch, ops=ops)
    with default_backend().ops.having(soft_max_that_is(each_second_time())):
        assert_wrong_in_the_own_run(run(model("llama")))


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_node_that_no_fusion_takes_is_judged_though_it_ran_with_later_ones(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPT's SOFT_MAX, by this project's own kernel, may begin a fusion of which nothing else follows."""
    choose(monkeypatch, ops="all")
    result = run(model("mpt"))
    assert result
    soft_max = [node for node in result.nodes if node.op == "SOFT_MAX"]
    assert {(node.on, node.fate, node.fused) for node in soft_max} == {("NPU", Fate.JUDGED, "")}
    assert all(node.mirrored is not None and node.cumulative is not None for node in soft_max)

    right, calls = Backend.bind, count()

    def bind(backend: Backend, node: Node) -> Call:
        call = right(backend, node)

        def wrong() -> None:
            call()
            if next(calls) % 2:
                node.dst.view()[0, 0, 0, 0] *= np.float32(1.01)

        return wrong if node.op == "SOFT_MAX" else call

    monkeypatch.setattr(Backend, "bind", bind)
    result = run(model("mpt"))
    assert {(node.op, node.wrong_in) for node in result.wrong} == {("SOFT_MAX", OWN_RUN)}
    assert len(result.wrong) == len(soft_max)


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_reads_a_node_that_was_held_back_inherits_its_error(model: Models) -> None:
    """An error of the queries reaches the values through SOFT_MAX alone."""

    def queries_off(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, *, params: Rope) -> None:
        OWN["ROPE"].define(dst, x, positions, factors, params=params)
        if dst.name == "Qcur-0":
            dst.view()[...] *= np.float32(1.01)

    kernels = planted("ROPE", queries_off), planted("SOFT_MAX", OWN["SOFT_MAX"].define)
    with default_backend().ops.having(*kernels):
        result = run(model("llama"))
    assert {node.op for node in result.wrong} == {"ROPE"}
    read = [node for node in result.nodes if node.name == "kqv-0"]
    assert {(node.op, node.on, node.verdict) for node in read} == {("MUL_MAT", "CPU", Verdict.INHERITED)}


def test_an_operator_that_is_wrong_in_the_own_run_alone_is_named(
    model: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choose(monkeypatch, ops="all")
    right, calls = routing.bind_routing, count()

    def routed(values: Tensor, ids: Tensor, x: Tensor, **keywords: Any) -> Call:
        call = right(values, ids, x, **keywords)

        def wrong() -> None:
            call()
            if next(calls) % 2 == 0:  # the own run is ahead of the nodes' isolated run as an operator
                values.view()[0, 0, 0, 0] *= np.float32(1.01)

        return wrong

    monkeypatch.setattr(fusion, "bind_routing", routed)
    result = run(model("moe"), reproducers=tmp_path)
    assert {(node.op, node.fused, node.fate, node.wrong_in) for node in result.wrong} == {
        ("DIV", "TopKSoftmax", Fate.JUDGED, OWN_RUN)
    }
    assert "bytes differ in the device's own run by TopKSoftmax, though not alone" in text(result)
    assert result.wrong[0].reproducer is not None
    monkeypatch.setattr(fusion, "bind_routing", right)
    assert replay(Path(result.wrong[0].reproducer))


# what is not judged is not right


class OneProgram(Backend):
    """A device with fusions that computes what it is handed as one program, of which nobody sees the steps."""

    def like(self, name: str | None = None, *, options: Options | None = None) -> Backend:
        return OneProgram(self.name, options=options or self.options, numerics=self._numerics)

    def plan(self, graph: Graph) -> Plan:
        bound = super().plan(replace(graph, producers=()))
        return Plan((("a program", bound.run),), bound.counts, bound.fused)


def text(result: DiffResult) -> str:
    written = StringIO()
    print_diff(result, Console(file=written, width=200))
    return written.getvalue()


@pytest.mark.slow
@pytest.mark.daily(2)
def test_a_result_that_is_gone_before_anybody_sees_it_is_not_right(model: Models) -> None:
    options = default_backend().options.updated({"ops": "all"})
    with counting() as counted:
        result = run(model("rwkv7"), backend=OneProgram(options=options))
    assert result.wrong == []
    n, total = result.fates[Fate.NOT_JUDGED], result.fates.total()
    assert total == counted.nodes
    assert n > 0
    assert not result
    first = result.not_judged[0]
    assert first.on == "NPU"
    assert first.not_judged.startswith("a later node of one program wrote over it: ADD node '")
    where = f"first step 0 node {first.index}, {first.op} {first.name!r}"
    words = f"not judged: {n} of {total} nodes of the own run, {where}"
    assert text(result).splitlines()[-1].startswith(words)
    data = diff_json(result)
    assert (data["passed"], data["verdict"].startswith(words)) == (False, True)
    assert data["own_run"] == {"judged": total - n, "fused": 0, "not_judged": n, "on_cpu": 0}
    of_first = data["nodes"][result.nodes.index(first)]
    assert (of_first["own_run"], of_first["not_judged"]) == ("not judged", first.not_judged)
    page = diff_html(data)
    assert words.replace("'", "&#39;") in page
    assert f"{n} not judged" in page


def test_a_run_that_stops_says_how_many_nodes_were_not_judged(model: Models) -> None:
    def raises(dst: Tensor, src: Tensor) -> None:
        raise ValueError("no rows today")

    with default_backend().ops.having(planted("CONT", raises)):
        result = run(model("llama"))
    assert result.stopped
    n_not_judged = result.fates[Fate.NOT_JUDGED]
    assert 0 < n_not_judged < result.fates.total()
    assert {node.not_judged for node in result.not_judged} == {STOPPED}
    assert all(node.on == "" for node in result.not_judged)
    verdict = diff_json(result)["verdict"]
    assert verdict.startswith("wrong: ")
    assert verdict.endswith(f"; {n_not_judged} nodes of the own run not judged")
