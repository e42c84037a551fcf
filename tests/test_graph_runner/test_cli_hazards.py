"""ggml-npu hazards: what it prints and writes, and its exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit.commands import Cli, assert_refused, strict_json
from kit.simulated import node, row

from graph_runner.base.console import Console
from graph_runner.hazards import Graph, check, watching
from graph_runner.reports.hazards import hazards_json, print_hazards, verdict


def test_a_model_without_hazards(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("hazards", "tiny", "-n", 0, "--device", "cpu", "--json", tmp_path / "found.json")
    assert outcome.code == 0
    assert outcome.out.splitlines()[0].split() == ["graph", "nodes", "reads", "hazards"]
    assert outcome.out.splitlines()[-1] == "no hazard in 1 graph on CPU, 128 reads checked"
    data = strict_json((tmp_path / "found.json").read_text())
    assert data["schema"] == "ggml-npu hazards 1"
    assert data["passed"]
    assert data["graphs"] == [{"graph": "prompt", "nodes": 50, "reads": 128, "is_as_built": True, "hazards": []}]


def test_a_model_with_hazards(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = row("a", 1, 0), row("b", 2, 32), row("c", 3, 32)
    graph = Graph((node("SQR", b, a), node("NEG", c, a), node("SQRT", row("d", 4, 96), b)), name="prompt")
    graphs = [graph, replace(graph, nodes=graph.nodes[:2], is_as_built=False)]
    monkeypatch.setattr(watching, "watched", lambda *_: graphs)
    outcome = cli("hazards", "tiny", "--json", "-")
    assert outcome.code == 1
    data = strict_json(outcome.out)
    (found,) = data["graphs"][0]["hazards"]
    assert found["kind"] == "overwritten"
    assert found["found"] == {"place": 1, "op": "NEG", "name": "c"}
    assert (found["address"], found["offset"], found["size"], found["reuses"]) == (32, 0, 32, True)
    assert found["text"].endswith(found["right"])
    assert "1 hazard in 2 graphs on NPU, 5 reads checked" in outcome.err
    assert "prompt: overwritten: NEG 'c' (at 1) wrote over what SQR 'b' (at 0) wrote" in outcome.err
    assert "prompt: the CPU's graph has other nodes" in outcome.err


def test_graphs_that_were_written_give_the_same(cli: Cli, tmp_path: Path) -> None:
    first = cli("hazards", "tiny", "-n", 1, "--device", "cpu", "--graphs", tmp_path / "graphs.json")
    again = cli("hazards", tmp_path / "graphs.json", "--json", tmp_path / "found.json")
    assert (first.code, again.code) == (0, 0)
    assert again.out.splitlines()[:3] == first.out.splitlines()[:3]
    assert again.out.splitlines()[3] == f"no hazard in 2 graphs of {tmp_path / 'graphs.json'}, 256 reads checked"
    assert strict_json((tmp_path / "found.json").read_text())["of"] == f"of {tmp_path / 'graphs.json'}"


def test_many_hazards_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = row("a", 1, 0), row("b", 2, 32)
    readers = [node("NEG", row(f"c{i}", 3 + i, 64 + 32 * i), b) for i in range(25)]
    report = check(Graph((node("SQR", b, a), node("NEG", row("x", 99, 32), a), *readers)))
    print_hazards([report], "on NPU", Console())
    printed = capsys.readouterr().out
    assert printed.count("wrote over") == 20
    assert "graph: 5 more\n25 hazards in 1 graph on NPU, 27 reads checked\n" in printed
    assert len(hazards_json([report], "on NPU")["graphs"][0]["hazards"]) == 25
    assert verdict([report], "on NPU").startswith("25 hazards")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.gguf"], ["none.gguf", "no such file"]),
        (["none.json"], ["graphs 'none.json'", "No such file"]),
        (["x.json", "--graphs", "x.json"], ["--graphs 'x.json'", "is what MODEL reads"]),
        (["tiny", "--device", "cpu", "--all"], ["--all", "--device is cpu"]),
        (["tiny", "--device", "Vulkan7"], ["device 'Vulkan7'", "there are: CPU NPU"]),
        (["tiny", "--backend", "none.so", "--device", "x"], ["--backend 'none.so'", "no such file"]),
        (["tiny", "-n", "-1"], ["--steps"]),
        (["tiny", "--json", "/none/x.json", "--device", "cpu", "-n", "0"], ["--json '/none/x.json'"]),
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_refusals(cli: Cli, words: list[str], says: list[str]) -> None:
    outcome = cli("hazards", *words)
    assert outcome.code == 2
    if "--json" not in words:
        assert_refused(outcome, *says)
    assert all(word in outcome.err for word in says)
