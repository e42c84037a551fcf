"""Sweeps of diffs: which cells there are, what is run again, what fails beside a baseline, what files hold."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from io import StringIO
from itertools import chain
from pathlib import Path
from threading import Barrier, Event
from typing import Any
from xml.etree import ElementTree

import pytest
from kit.backends import blas
from kit.browser import Browser
from kit.commands import COMMAND, WRONG_CONT, Cli, assert_refused, fresh, kernel_file, strict_json

from graph_runner.base.console import Console
from graph_runner.base.errors import BadInputError, SuiteError
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.cli.matrix import alone_in, setting_of
from graph_runner.reports.matrix import junit_xml, matrix_html, matrix_json, print_matrix, verdict
from graph_runner.tools.matrix import (
    Cell,
    Result,
    Setting,
    StoppedError,
    Sweep,
    cells_of,
    judged,
    models_of,
    results_of,
    run_diff,
    sweep,
)
from graph_runner.tools.suites import support

SETTINGS = [Setting(), Setting("-fa on", ("-fa", "on"))]


@pytest.fixture
def models(tmp_path: Path) -> dict[str, str]:
    """Two models of no content."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
    return models_of([str(folder)], tmp_path / "out")


class Runner:
    """Runs no diff: gives the verdicts that are chosen, others are right."""

    def __init__(self, **verdicts: str) -> None:
        self.verdicts, self.ran = verdicts, list[tuple[str, str]]()

    def __call__(self, cell: Cell, folder: Path, stopped: Event) -> Result:
        assert [*folder.iterdir()] == []
        (folder / "diff.html").write_text("a page")
        self.ran.append((cell.model, cell.settings))
        found = self.verdicts.get(cell.model, "right")
        first = "CONT" if found == "wrong" else ""
        why = f"{cell.model} is {found}"
        return Result(cell.model, cell.device, cell.settings, cell.key, found, why, 7, 1e-9, first, 1.5, "diff.html")


def cells(models: dict[str, str], *common: str) -> list[Cell]:
    return cells_of(models, ["NPU"], SETTINGS, common)


def swept(models: dict[str, str], folder: Path, baseline: Sweep | None = None, **verdicts: str) -> Sweep:
    planned = cells(models)
    before = None if baseline is None else {each.cell: each for each in baseline.results}
    return Sweep("CPU", planned, sweep(planned, folder, Runner(**verdicts)), before)


# models and cells


def test_models_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "out").mkdir()
    parts = [f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    for name in ("a.gguf", "below/b.gguf", "below/a.gguf", "out/0-9-X.gguf", *parts):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "text.txt").write_text("no model")
    found = models_of(["tiny", str(tmp_path), str(tmp_path / "a.gguf")], tmp_path / "out")
    twice = {str(tmp_path / name): str(tmp_path / name) for name in ("a.gguf", "below/a.gguf")}
    others = {"b": "below/b.gguf", "m-00001-of-00002": "m-00001-of-00002.gguf"}
    assert found == {"tiny": "tiny", **twice} | {name: str(tmp_path / file) for name, file in others.items()}


def test_there_is_a_cell_for_each_model_device_and_setting(models: dict[str, str]) -> None:
    found = cells_of(models, ["NPU", "RPC0"], SETTINGS, ["--rpc", "h:1"])
    assert len({each.key for each in found}) == len({each.folder for each in found}) == len(found) == 8
    assert found[3].words == ("--device", "RPC0", "--rpc", "h:1", "-fa", "on")


def test_folders_of_cells_are_names_of_files(models: dict[str, str]) -> None:
    cell = replace(cells(models)[0], model="../../x/\x1b\udce9" + "long" * 99, device="a/b")
    assert cell.folder.parts[0] == "cells"
    assert len(cell.folder.parts) == 2
    assert cell.folder.name.isascii()
    assert len(cell.folder.name) < 100


# what stands


def test_a_cell_that_stands_is_not_run_again(models: dict[str, str], tmp_path: Path) -> None:
    first, again = Runner(), Runner()
    before = sweep(cells(models), tmp_path / "out", first)
    assert len(first.ran) == 4
    assert sweep(cells(models), tmp_path / "out", again) == before
    assert again.ran == []


@pytest.mark.parametrize("what", ["model", "options", "variable", "library", "report", "result"])
def test_a_cell_is_run_again(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """If anything is another that the result depends on, or what stands there is damaged."""
    out, library, again = tmp_path / "out", tmp_path / "lib.so", Runner()
    library.write_text("1")
    before = cells_of(models, ["NPU"], SETTINGS, [], [library])
    sweep(before, out, Runner())
    if what == "model":
        Path(models["a"]).write_bytes(b"GGUF, longer")
    elif what == "variable":
        monkeypatch.setenv("GGML_VK_DISABLE_FUSION", "1")
    elif what == "library":
        library.write_text("12")
    elif what == "report":
        (out / before[0].folder / "diff.html").unlink()
    elif what == "result":
        (out / before[0].folder / "cell.json").write_text("[" * 100_000)
    common = ["--strict"] if what == "options" else []
    sweep(cells_of(models, ["NPU"], SETTINGS, common, [library]), out, again)
    n = {"model": 2, "options": 4, "variable": 4, "library": 4, "report": 1, "result": 1}[what]
    assert len(again.ran) == n


def test_how_much_is_told_does_not_matter(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep(cells(models), tmp_path / "out", Runner())
    monkeypatch.setenv("GGML_NPU_VERBOSE", "1")
    again = Runner()
    sweep(cells(models), tmp_path / "out", again)
    assert again.ran == []


def test_what_failed_to_run_is_run_again(models: dict[str, str], tmp_path: Path) -> None:
    sweep(cells(models), tmp_path / "out", Runner(a="failed to run", b="wrong"))
    again = Runner()
    found = sweep(cells(models), tmp_path / "out", again)
    assert {name for name, _ in again.ran} == {"a"}
    assert [each.verdict for each in found] == ["right", "right", "wrong", "wrong"]


def test_what_is_done_stays_if_a_sweep_ends(models: dict[str, str], tmp_path: Path) -> None:
    class Interrupted(Runner):
        def __call__(self, cell: Cell, folder: Path, stopped: Event) -> Result:
            if len(self.ran) == 2:
                assert stopped.wait(10)
                raise StoppedError
            return super().__call__(cell, folder, stopped)

    def seen(result: Result, kept: bool) -> None:
        if result.settings:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(cells(models), tmp_path / "out", Interrupted(), seen)
    again = Runner()
    sweep(cells(models), tmp_path / "out", again)
    assert again.ran == [("b", ""), ("b", "-fa on")]


def test_cells_run_at_once(models: dict[str, str], tmp_path: Path) -> None:
    """Two do, in threads that wait for each other; the results are in the order of the cells."""
    meeting = Barrier(2, timeout=30)

    class Together(Runner):
        def __call__(self, cell: Cell, folder: Path, stopped: Event) -> Result:
            meeting.wait()
            return super().__call__(cell, folder, stopped)

    seen: list[Result] = []
    found = sweep(cells(models), tmp_path / "out", Together(), lambda result, kept: seen.append(result), jobs=2)
    assert [each.cell for each in found] == [each.name for each in cells(models)]
    assert seen == found


# the verdict of a diff


def of_diff(text: str, first: int | None = None, **node: Any) -> dict[str, Any]:
    """A diff's JSON, as far as a sweep reads it."""
    made = {
        "step": 1, "index": 5, "op": "CONT", "name": "kqv", "isolated": {"nmse": 1e-3}, "mirrored": None,
        "diagnosis": None, "failure": None, "judged": None,
    }  # fmt: skip
    nodes = [made | {"isolated": {"n_bytes": 4}}, made | node]
    summary = [{"nodes": 2}, {"nodes": 3}]
    return {"verdict": text, "first_introduced": first, "nodes": nodes, "summary": summary, "faults": []}


def test_a_verdict_is_that_of_the_diff() -> None:
    found = judged(of_diff("right within rounding: 5 nodes compared, 1 differ"))
    said = {"verdict": "right within rounding", "why": "5 nodes compared, 1 differ"}
    assert found == said | {"nodes": 5, "nmse": 1e-3, "first_op": ""}
    assert judged(of_diff("no node was compared: the model has no CONT"))["verdict"] == "not judged"
    assert judged(of_diff("not judged: 3 of 5"))["why"] == "3 of 5"
    assert judged(of_diff("wrong: x", isolated={"nmse": None}))["nmse"] is None


def test_a_wrong_cell_names_its_node() -> None:
    of_row = {"row": 3, "n_rows": 9, "error": 0.5, "limit": 1e-9, "against": "the reference"}
    for node, says in (
        ({"diagnosis": "ignores nb[2]"}, "ignores nb[2]"),
        ({"failure": "ended by SIGSEGV"}, "ended by SIGSEGV"),
        ({"judged": of_row}, "row 3 is 5.00e-01 from the reference, the limit is 1.00e-09"),
        ({}, "1 of 5 nodes differ"),
    ):
        found = judged(of_diff("wrong: 1 of 5 nodes differ", 1, **node))
        assert found["why"] == f"step 1 node 5, CONT 'kqv': {says}"
        assert found["first_op"] == "CONT"
    errs = "wrong: the memory of the device errs: copy_in"
    assert judged(of_diff(errs, 1) | {"faults": [{}]})["why"] == "the memory of the device errs: copy_in"


# a baseline


def test_only_what_is_new_fails(models: dict[str, str], tmp_path: Path) -> None:
    before = swept(models, tmp_path / "before", a="wrong")
    assert not before
    same = swept(models, tmp_path / "same", before, a="wrong")
    assert same
    assert len(same.known) == 2
    assert verdict(same) == "4 cells: 2 right, 2 wrong; 0 not as in the baseline, 2 as in it, 0 newly right"
    right = swept(models, tmp_path / "right", before)
    assert right
    assert [each.model for each in right.newly_right] == ["a", "a"]
    for other in ("not judged", "failed to run"):
        assert not swept(models, tmp_path / other, before, a=other)
    assert not swept(models, tmp_path / "more", before, a="wrong", b="wrong")


def test_another_op_is_another_fault(models: dict[str, str], tmp_path: Path) -> None:
    before = swept(models, tmp_path / "before", a="wrong")
    known = {each.cell: replace(each, first_op="ROPE") for each in before.results}
    assert len(replace(before, baseline=known).wrong) == 2


def test_what_is_only_in_the_baseline_does_not_fail(models: dict[str, str], tmp_path: Path) -> None:
    before = swept(models, tmp_path / "before", b="wrong")
    fewer = swept({"a": models["a"]}, tmp_path / "fewer", before)
    assert fewer
    assert [each.model for each in fewer.gone] == ["b", "b"]


def test_a_sweep_that_has_not_ended_has_not_passed(models: dict[str, str], tmp_path: Path) -> None:
    found = swept(models, tmp_path / "out")
    assert found
    begun = replace(found, results=found.results[:1])
    assert not begun
    assert not matrix_json(begun)["complete"]
    assert verdict(begun) == "1 of 4 cells: 1 right"


def test_a_baseline_is_the_json(models: dict[str, str], tmp_path: Path) -> None:
    found = swept(models, tmp_path / "out", a="wrong", b="not judged")
    file = tmp_path / "known.json"
    file.write_text(json.dumps(matrix_json(found)))
    assert results_of("--baseline", file) == {each.cell: each for each in found.results}


@pytest.mark.some(3)
@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "is no JSON of ggml-npu matrix"),
        ('{"schema": "ggml-npu diff 5"}', "has the schema 'ggml-npu diff 5', not 'ggml-npu matrix 1'"),
        ('{"schema": "ggml-npu matrix 1"}', "is no JSON of ggml-npu matrix"),
        ('{"schema": "ggml-npu matrix 1", "cells": 1}', "is no JSON of ggml-npu matrix"),
        ('{"schema": "ggml-npu matrix 1", "cells": [1]}', "a cell is 1"),
        ('{"schema": "ggml-npu matrix 1", "cells": [{"model": 1}]}', "a cell has model 1"),
    ],
)
def test_a_damaged_baseline(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "known.json"
    file.write_bytes(text.encode("latin-1"))
    assert_refused(cli("matrix", "tiny", "--baseline", file, "-o", tmp_path / "out"), f"--baseline '{file}'", says)
    assert not (tmp_path / "out").exists()


def test_every_cut_of_a_baseline_is_refused(models: dict[str, str], tmp_path: Path) -> None:
    file, text = tmp_path / "known.json", json.dumps(matrix_json(swept(models, tmp_path / "out")))
    for end in range(0, len(text) - 1, 37):
        file.write_text(text[:end])
        with pytest.raises(BadInputError, match="--baseline"):
            results_of("--baseline", file)


def test_a_setting_has_a_name() -> None:
    assert setting_of("-fa   on") == Setting("-fa on", ("-fa", "on"))
    assert setting_of("flash: -fa on") == Setting("flash", ("-fa", "on"))
    assert setting_of("'two words:'") == Setting("two words")
    assert setting_of("-p x:").name == "-p x:"


def test_settings_of_one_name_are_refused(cli: Cli, tmp_path: Path) -> None:
    words = ("--settings", "a: -n 1", "--settings", "a: -n 2")
    assert_refused(cli("matrix", "tiny", *words, "-o", tmp_path / "out"), "--settings 'a: -n 2'", "'a' is given twice")


# bad input


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("-fa maybe", "maybe"),
        ("--nope", "--nope"),
        ("--json x", "--json is the same for all cells"),
        ("-dev CPU", "--device is the same for all cells"),
        ("--steps=-1", "--steps"),
        ("'", "No closing quotation"),
        ("other.gguf", "extra argument(s) (other.gguf)"),
        ("--help", "--help is no setting"),
        ("q8_0: --nope", "--nope"),
    ],
)
def test_a_setting_that_is_none(cli: Cli, tmp_path: Path, setting: str, says: str) -> None:
    outcome = cli("matrix", "tiny", "--settings", setting, "-o", tmp_path / "out")
    assert_refused(outcome, f"--settings {setting!r}", says)
    assert not (tmp_path / "out").exists()


def test_models_that_are_none(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    out = ("-o", tmp_path / "out")
    assert_refused(cli("matrix", tmp_path / "empty", *out), "a folder without a GGUF file")
    assert_refused(cli("matrix", tmp_path / "no.gguf", *out), "no.gguf", "no such file")


def test_nothing_is_written_over_what_is_read(cli: Cli, tmp_path: Path, models: dict[str, str]) -> None:
    out, folder = tmp_path / "out", tmp_path / "models"
    outcome = cli("matrix", folder, "-o", out, "--junit", folder / "a.gguf")
    assert_refused(outcome, "--junit", "is what MODEL reads")
    out.mkdir(exist_ok=True)
    found = swept(models, tmp_path / "before")
    (out / "matrix.json").write_text(json.dumps(matrix_json(found)))
    outcome = cli("matrix", folder, "-o", out, "--baseline", out / "matrix.json")
    assert_refused(outcome, "--output", "is what --baseline reads")
    assert json.loads((out / "matrix.json").read_text()) == matrix_json(found)
    (out / "matrix.json").write_text("{}")
    assert_refused(cli("matrix", folder, "-o", out), "--output", "matrix.json", "is no JSON of ggml-npu matrix")
    assert (out / "matrix.json").read_text() == "{}"
    (tmp_path / "file").write_text("mine")
    assert_refused(cli("matrix", folder, "-o", tmp_path / "file"), "--output", "File exists")


def test_two_sweeps_have_two_folders(cli: Cli, tmp_path: Path, models: dict[str, str]) -> None:
    out = tmp_path / "out"
    with alone_in(out):
        assert_refused(cli("matrix", tmp_path / "models", "-o", out), "--output", "another sweep runs there")
    assert [*out.iterdir()] == []


# files


def test_test_cases_of_junit(models: dict[str, str], tmp_path: Path) -> None:
    """The elements and attributes that Jenkins' schema has (junit-10.xsd), and numbers that add up."""
    before = swept(models, tmp_path / "before", a="wrong")
    planned = cells_of(models, ["NPU", "RPC0"], SETTINGS, [])
    results = sweep(planned, tmp_path / "out", Runner(a="wrong", b="failed to run"))
    odd = replace(results[0], why="\x1b[31m & <\udce9> \ufffe", settings="other \x00")
    found = Sweep("CPU", planned, [odd, *results[1:]], {each.cell: each for each in before.results})
    root = ElementTree.fromstring(junit_xml(found))
    allowed = {
        "testsuites": {"name", "time", "tests", "failures", "errors"},
        "testsuite": {"name", "time", "tests", "failures", "errors", "skipped"},
        "testcase": {"classname", "name", "time"},
        "failure": {"message", "type"}, "error": {"message", "type"}, "skipped": {"message"}, "system-out": set(),
    }  # fmt: skip
    for element in root.iter():
        assert {*element.keys()} == allowed[element.tag]
    assert [root.get(name) for name in ("tests", "failures", "errors")] == ["8", "3", "4"]
    suites = [[suite.get(name) for name in ("name", "tests", "failures", "errors", "skipped")] for suite in root]
    assert suites == [["NPU", "4", "1", "2", "1"], ["RPC0", "4", "2", "2", "0"]]
    ends = {"failure", "error", "skipped"}
    assert all(len([each for each in case if each.tag in ends]) < 2 for case in root.iter("testcase"))


def test_json_is_json(models: dict[str, str], tmp_path: Path) -> None:
    found = swept(models, tmp_path / "out", a="wrong")
    results = [replace(each, nmse=None) for each in found.results]
    data = strict_json(json.dumps(matrix_json(replace(found, results=results)), allow_nan=False))
    said = (data["schema"], data["passed"], data["verdict"])
    assert said == ("ggml-npu matrix 1", False, "4 cells: 2 right, 2 wrong")
    assert [(each["model"], each["passed"], each["nmse"]) for each in data["cells"][1:3]] == [
        ("a", False, None),
        ("b", True, None),
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_table_fits_a_terminal(models: dict[str, str], tmp_path: Path, width: int) -> None:
    found = swept(models, tmp_path / "out", a="not judged")
    console = Console(file=StringIO(), width=width)
    print_matrix(replace(found, results=[replace(each, settings="-p [bold]x") for each in found.results]), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line for line in lines if " on NPU, " not in line and "cells: " not in line]
    assert max(map(len, rows)) <= width
    assert "[bold]x" in "".join(lines)


# the page


def test_a_page_takes_texts_as_texts(models: dict[str, str], tmp_path: Path) -> None:
    found = swept(models, tmp_path / "out", a="wrong")
    results = [replace(each, why="<script>alert(1)</script>\udce9") for each in found.results]
    text = matrix_html(replace(found, results=results))
    assert "<script>alert" not in text
    assert text.count("<script") == 1
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.slow
def test_the_page_in_a_browser(browser: Browser, models: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = swept(models, out, a="wrong")
    page = out / "matrix.html"
    page.write_text(matrix_html(replace(found, results=found.results[:3])))
    for width in (1366, 400):
        browser.resize(width, 900)
        browser.open(page)
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []
    assert len(browser.requests()) == 1
    assert browser.texts("td")[-1] == "has not run"
    active = "document.activeElement.dataset.verdict"
    browser.key("n")
    assert browser.run(active) == "wrong"
    browser.key("ArrowDown")
    assert browser.run(active) == "right"
    browser.click(".chip[data-verdict=wrong]")
    assert browser.run("location.hash") == "#verdict=wrong"
    assert browser.run("document.querySelectorAll('.dim').length") == 1
    link = browser.run("document.querySelector('.cell').getAttribute('href')")
    assert (out / link).is_file()


# diffs


def cell_of(*words: str, file: str = "tiny") -> Cell:
    (made,) = cells_of({"tiny": file}, ["NPU"], [Setting("", words)], ["--reference", "CPU"])
    return made


@pytest.mark.slow
def test_a_diff_that_takes_no_options_says_why(tmp_path: Path) -> None:
    result = run_diff(cell_of("--kernels", str(tmp_path / "none.py")), tmp_path, Event(), 300)
    assert (result.verdict, result.report) == ("failed to run", "log.txt")
    assert "none.py" in result.why


SLOW = """
import time
from ggml_backend_npu import op

@op("CONT")
def slow(dst, x):
    open({!r}, "a").write("x")
    time.sleep(1000)
"""


def children(process: int) -> list[int]:
    """Processes that a process has started, and that these have."""
    told = [each.read_text().split() for each in Path(f"/proc/{process}/task").glob("*/children")]  # of each thread
    return [each for child in map(int, chain(*told)) for each in (child, *children(child))]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_diff_that_takes_too_long(tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, SLOW.format(str(tmp_path / "told")))
    result = run_diff(cell_of("--kernels", str(kernels)), tmp_path, Event(), 15)
    assert (result.verdict, result.why) == ("failed to run", "was not done after 15 s (--cell-timeout)")


@pytest.mark.daily(3)
@pytest.mark.slow
def test_a_small_matrix(tmp_path: Path) -> None:
    """Two models under two settings; then nothing runs again; then a kernel is wrong, as a baseline knows."""
    folder, out = tmp_path / "models", tmp_path / "out"
    folder.mkdir()
    for name in ("one", "two"):
        write_tiny_llama(folder / f"{name}.gguf")
    words = ["matrix", folder, "-o", out, "--settings", "-n 0", "--settings", "-n 0 -ctk q8_0"]
    outcome = fresh(*words, "--junit", tmp_path / "junit.xml", "--json", "-")
    assert outcome.code == 0, outcome.err
    data = strict_json(outcome.out)
    assert [each["verdict"].startswith("right") for each in data["cells"]] == [True] * 4
    assert all(each["nodes"] > 40 for each in data["cells"])
    assert all((out / each["report"]).is_file() for each in data["cells"])
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("tests") == "4"
    begin = time.monotonic()
    again = fresh(*words)
    assert again.code == 0
    assert again.err.count("(has run before)") == 4
    assert time.monotonic() - begin < 60
    kernels = kernel_file(tmp_path, WRONG_CONT.format(value="x + 1"))
    wrong = [*words, "--settings", f"-n 0 --kernels {kernels}"]
    outcome = fresh(*wrong)
    assert outcome.code == 1
    assert "6 cells: 4 right, 2 wrong" in outcome.out.replace(" within rounding", "")
    found = json.loads((out / "matrix.json").read_text())
    (first, _) = [each for each in found["cells"] if each["verdict"] == "wrong"]
    assert first["first_op"] == "CONT"
    assert "CONT" in first["why"]
    known = tmp_path / "known.json"
    known.write_text((out / "matrix.json").read_text())
    outcome = fresh(*wrong, "--baseline", known)
    assert outcome.code == 0, outcome.out
    assert outcome.out.count("known: ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_cell_that_is_killed_and_a_sweep_that_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    told, out = tmp_path / "told", tmp_path / "out"
    kernels = kernel_file(tmp_path, SLOW.format(str(told)))
    command = [COMMAND, "matrix", "tiny", "-o", out, "--settings", "-n 0", "--settings", f"-n 0 --kernels {kernels}"]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not told.exists() and process.poll() is None:
            time.sleep(0.2)
        started = children(process.pid)
        assert len(started) >= 2, "a diff, and the process of its kernels"
        os.kill(started[0] if number == signal.SIGKILL else process.pid, number)
        printed, _ = process.communicate(timeout=60)
    time.sleep(1)
    assert [each for each in started if is_alive(each)] == []
    data = json.loads((out / "matrix.json").read_text())
    if number == signal.SIGKILL:
        assert process.returncode == 1
        assert "failed to run: ended by SIGKILL" in printed
        assert [each["verdict"] for each in data["cells"]] == ["right", "failed to run"]
    else:
        assert process.returncode == 130
        assert [each["verdict"] for each in data["cells"]] == ["right"]
        assert not data["complete"]
    assert (out / "matrix.html").is_file()


@pytest.mark.conformance
def test_a_library_with_a_fault_and_what_it_supports(tmp_path: Path) -> None:
    prompt = "The capital of France is a city that many people visit each year, and its name is"  # 32 tokens and more
    words = ["tiny", "--device", "BLAS", "--device", "cpu", "--backend", blas(tmp_path, "SCALED")]
    words += ["-o", tmp_path / "out", "--settings", f"-n 0 -p '{prompt}'", "--ops-csv", tmp_path / "ops.csv"]
    outcome = fresh("matrix", *words)
    assert outcome.code == 1, outcome.err
    blas_cell, cpu = json.loads((tmp_path / "out" / "matrix.json").read_text())["cells"]
    assert (blas_cell["verdict"], blas_cell["first_op"], cpu["verdict"]) == ("wrong", "MUL_MAT", "right")
    assert "MUL_MAT" in outcome.out
    header, *rows = (tmp_path / "ops.csv").read_text().splitlines()
    names = "backend_name op_name op_params test_mode supported error_message backend_reg_name"
    assert header == ",".join(f'"{name}"' for name in names.split())
    assert {row.split(",")[0] for row in rows} == {'"BLAS"', '"CPU"'}
    assert any(row.startswith('"BLAS","MUL_MAT"') and '"support","1","yes"' in row for row in rows)


@pytest.mark.conformance
def test_a_server_is_asked_by_no_test() -> None:
    with pytest.raises(SuiteError, match="test-backend-ops has no device 'RPC0'"):
        support(["RPC0"])


# the workflow


def test_the_workflow_has_options_that_there_are(cli: Cli, tmp_path: Path) -> None:
    """But for its library, the command of the workflow is taken, with each of its settings."""
    text = (Path(__file__).parents[2] / "examples" / "matrix.yml").read_text()
    (line,) = [line for line in text.replace("\\\n", "").splitlines() if "ggml-npu matrix " in line and "#" not in line]
    words = shlex.split(line)
    words[words.index(".github/matrix-known.json")] = str(tmp_path / "none.json")
    assert words.count("--settings") == 3
    assert_refused(cli(*words[1:]), "--baseline", "none.json", "No such file")
