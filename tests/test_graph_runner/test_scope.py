"""The report's last lines: what a diff has looked at, how many nodes the device computed, and one of three answers."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from kit.diffs import planted, run
from kit.models import Models
from kit.support import choose

from ggml_backend_npu import Tensor, default_backend
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.contexts import Statistics
from graph_runner.base.console import Console
from graph_runner.diff.run import DiffResult
from graph_runner.judging.results import Fate
from graph_runner.reports.diff_report import diff_json, print_diff
from graph_runner.reports.html import diff_html
from graph_runner.reports.scope import canary_line, scope_json, scope_line


def printed(result: DiffResult) -> str:
    written = StringIO()
    print_diff(result, Console(file=written, width=200, color_system="standard", force_terminal=True))
    return written.getvalue()


def test_a_report_ends_with_its_scope(model: Models) -> None:
    result = run(model("llama"), steps=2)
    scope = scope_json(result)
    assert (scope["sequences"], scope["tokens"], scope["unobserved"]) == (1, 28, True)
    assert scope["types"] == ["f16", "f32", "i32", "i64", "q8_0"]
    assert scope["not_compared"] == {}
    lines = printed(result).splitlines()
    assert [line.partition(":")[0].split("m")[-1] for line in lines[-3:-1]] == ["scope", "canary"]
    assert "scope: 1 sequence of 28 tokens; no types but f16 f32 i32 i64 q8_0; " in scope_line(result)
    assert scope_line(result).endswith("order of an unobserved run checked")
    data = diff_json(result)
    assert (data["answer"], data["scope"]["text"]) == ("right", scope["text"])
    assert scope["text"] in diff_html(data)


def test_a_scope_counts_what_was_left_out(model: Models) -> None:
    result = run(model("llama"), steps=0, ops={"CONT"})
    left_out = scope_json(result)["not_compared"]
    on_device = {node.op for node in result.nodes if node.on == "NPU"}
    assert left_out
    assert on_device.isdisjoint(left_out)
    assert f"{sum(left_out.values())} nodes not compared: " in scope_line(result)


def test_a_scope_names_the_fusions(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, ops="all")
    assert scope_json(run(model("moe"), steps=0))["fusions"] == ["TopKSoftmax", "masked_softmax"]
    choose(monkeypatch, ops="all", fusion="off")
    result = run(model("moe"), steps=0)
    assert scope_json(result)["fusions"] == []
    assert "; no fusion seen; " in scope_line(result)


def test_the_device_says_how_many_nodes_it_computed(model: Models) -> None:
    result = run(model("llama"), steps=1)
    assert result.counted == result.n_computed == sum(node.on == "NPU" for node in result.nodes) > 0
    assert canary_line(result).endswith(f"by its own count NPU computed {result.counted} nodes")
    cpu = run(model("llama"), steps=0, reference="NPU", device="CPU")
    assert cpu
    assert cpu.counted is None
    assert "by where results lie CPU computed 50 nodes" in canary_line(cpu)


def test_a_device_that_computed_none_is_not_right(model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it counts itself, whatever the plan says; nodes that it computed alone are right."""
    monkeypatch.setattr(Statistics, "computed", property(lambda _: Counter()))
    result = run(model("llama"), steps=0)
    assert result.fates[Fate.JUDGED] > 0
    assert not result.wrong
    assert not result
    data = diff_json(result)
    assert (data["passed"], data["answer"], data["scope"]["computed"]) == (False, "not judged", 0)
    assert data["verdict"].startswith("not judged: the NPU computed no node of its own run; ")


@pytest.mark.parametrize(
    ("ops", "answer", "green"), [(None, "right", True), ({"DUP"}, "not judged", False), ({"CONT"}, "right", True)]
)
def test_three_answers(model: Models, ops: set[str] | None, answer: str, green: bool) -> None:
    result = run(model("llama"), steps=0, ops=ops)
    data, last = diff_json(result), printed(result).splitlines()[-1]
    assert (data["answer"], data["passed"], bool(result)) == (answer, green, green)
    assert ("\x1b[1;32m" in last) == green
    assert ("\x1b[1;33m" in last) == (answer == "not judged")
    head = diff_html(data).partition("<h1 ")[2].partition(">")[0]
    assert head == f'class="{"passed" if green else "undecided"}"'


def test_a_wrong_diff_is_wrong(model: Models) -> None:

    def off(dst: Tensor, src: Tensor) -> None:
        OWN["CONT"].define(dst, src)
        dst.view()[...] += 1

    with default_backend().ops.having(planted("CONT", off)):
        result = run(model("llama"), steps=0)
    assert diff_json(result)["answer"] == "wrong"
    assert 'class="differs"' in diff_html(diff_json(result))
