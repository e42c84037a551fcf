"""Commands are run in the order of their cost until a fault has a name: `graph_runner.tools.triage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.commands import Cli, assert_refused, fresh, strict_json
from kit.whole import FAULT, SCALES

from graph_runner.cli.triage import _words
from graph_runner.reports.triage import conclusion, triage_json
from graph_runner.tools.triage import Step, named, triage

BISECT = {"schema": "ggml-npu bisect 1", "span": None}
WORDS = ("--all", "--", "m.gguf")


def looked(
    found: Mapping[str, tuple[int, str]], movers: Sequence[str] = ("CPY", "CONT"), said: str = "said"
) -> list[Step]:
    """A triage in which some steps end with a code and a name; the others are right."""
    seen: list[Step] = []

    def run(what: str, words: Sequence[str]) -> Step:
        code, name = found.get(what, (0, ""))
        return Step(what, " ".join(words), code, said, name, 0.1, {})

    steps = triage(WORDS, movers, run, seen.append)
    assert steps == seen
    return steps


def whats(steps: Sequence[Step]) -> list[str]:
    return [step.what for step in steps]


def test_what_is_cheap_comes_first_and_it_ends_with_a_name() -> None:
    order = ["order", "ends", "movers", "all nodes", "again", "halving"]
    for n, what in enumerate(order):
        wrong = {"ends": (1, "")} | {what: (1, "a node")}
        steps = looked(wrong)
        assert whats(steps) == (order if what == "ends" else order[: n + 1])
        if what != "ends":
            assert conclusion(steps) == [f"next: {steps[-1].command}", "wrong: a node"]


def test_a_run_that_is_right_is_not_halved() -> None:
    steps = looked({})
    assert whats(steps) == ["order", "ends", "movers", "all nodes", "again"]
    assert conclusion(steps)[-1] == "right: no step has found a fault"
    assert triage_json(steps)["passed"] is True


def test_movers_are_compared_first_if_they_are_known() -> None:
    assert "movers" not in whats(looked({}, movers=()))
    movers, every = (step.command for step in looked({}) if step.command.startswith("diff"))
    assert (movers, every) == ("diff --ops CPY,CONT --all -- m.gguf", "diff --all -- m.gguf")


def test_what_was_not_judged_is_not_right() -> None:
    steps = looked({}, said="not judged: no node was compared")
    assert conclusion(steps)[-1] == "not judged: no node was compared"


def test_runs_that_are_apart_are_halved_often() -> None:
    steps = looked({"again": (1, "")})
    assert steps[-1].command == "bisect --repeat 10 --all -- m.gguf"
    assert conclusion(steps)[-1].startswith("wrong, and without a name: ")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (
            {"schema": "ggml-npu hazards 1", "graphs": [{"hazards": []}, {"hazards": [{"text": "overwritten"}]}]},
            "overwritten",
        ),
        ({"schema": "ggml-npu flaky 1", "parting": None}, ""),
        ({"schema": "ggml-npu flaky 1", "parting": {"place": None, "text": "none"}}, ""),
        ({"schema": "ggml-npu flaky 1", "parting": {"place": [0, 3], "text": "step 0 node 3"}}, "step 0 node 3"),
        (
            {"schema": "ggml-npu bisect 1", "nodes": [{"op": "MUL", "name": "a"}], "needed": [0], "span": None},
            "MUL 'a'",
        ),
        (BISECT | {"nodes": [], "needed": []}, ""),
        (BISECT | {"span": [0, 9], "verdict": "wrong: the 10 nodes"}, "the 10 nodes"),
    ],
)
def test_names_are_read(data: dict[str, Any], name: str) -> None:
    assert named(data | {"passed": False}) == name
    assert named(data | {"passed": True}) == ""


@pytest.mark.parametrize(("since", "is_named"), [(40, True), (0, False)])
def test_one_of_many_nodes_is_no_name(since: int, is_named: bool) -> None:
    node = {
        "step": 0, "index": 43, "op": "MUL_MAT", "name": "a", "since": f"step 0 node {since}: ADD node 'b'",
        "judged": None, "diagnosis": None, "failure": "gives other bytes",
    }  # fmt: skip
    data = {"schema": "ggml-npu diff 5", "passed": False, "faults": [], "first_introduced": 0, "nodes": [node]}
    assert bool(named(data | {"strays": [], "stopped": None})) == is_named


def test_options_are_handed_on() -> None:
    given = {"prompt": "a b", "all_ops": True, "fusion": False, "steps": 4, "kernels": [Path("a.py"), Path("b.py")]}
    assert [*_words(given)] == ["--prompt", "a b", "--no-fusion", "--all", "--kernels", "a.py", "--kernels", "b.py"]


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    kernels, written = tmp_path / "wrong.py", tmp_path / "result.json"
    kernels.write_text(FAULT.format(does=SCALES))
    outcome = fresh("triage", "tiny", "--all", "--kernels", kernels, "-n", 0, "--json", written)
    assert outcome.code == 1, outcome.err
    assert outcome.out.splitlines()[-1].startswith("wrong: step 0 node ")
    assert "SWIGLU 'ffn_swiglu-1'" in outcome.out.splitlines()[-1]
    steps = strict_json(written.read_text())["steps"]
    assert [step["what"] for step in steps] == ["order", "ends", "movers"]


@pytest.mark.slow
def test_what_a_step_refuses_is_said_in_a_line(tmp_path: Path) -> None:
    assert_refused(fresh("triage", tmp_path / "none.gguf"), "none.gguf")


def test_the_cpu_is_refused(cli: Cli) -> None:
    assert_refused(cli("triage", "tiny", "--device", "cpu"), "--device 'cpu'")
