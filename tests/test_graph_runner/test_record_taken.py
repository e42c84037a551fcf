"""What a device computes in any program, recorded: `graph_runner.record.taken`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.capture import Capture
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.record import Run, compare, read_run, taken
from graph_runner.record.recorder import measured
from graph_runner.reports.record import verdict

PROGRAM = """
import os, sys
import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder
plugin = ggml_backend_npu.register()
with Builder(plugin.ggml, "NPU") as build:
    x = build.tensor("f32", (64, 3))
    assert build.compute(build.op("cont", build.permute(x, (1, 0, 2, 3)))) == 0
print(dict(plugin.statistics.computed), flush=True)
if sys.argv[1:]:
    os.kill(os.getpid(), int(sys.argv[1]))
"""


def recorded(plugin: Plugin, monkeypatch: pytest.MonkeyPatch, wanted: Capture, values: np.ndarray) -> Run:
    """Two graphs of two nodes each, as they are recorded."""
    ends: list[Callable[[], object]] = []
    monkeypatch.setattr(taken, "at_end", ends.append)
    monkeypatch.setattr(plugin, "handed", None)
    taken.record(plugin, wanted)
    with Builder(plugin.ggml, plugin.backend.name) as build:
        x = build.tensor("f32", (8, 3))
        out = build.op("cont", build.permute(build.op("cont", x), (1, 0, 2, 3)))
        build.set(x, values)
        for _ in range(2):
            assert build.compute(out) == 0
    ends[0]()
    return read_run(wanted.path)


def test_each_graph_is_a_step_and_each_node_a_row(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values, path = np.arange(24, dtype=np.float32).reshape(3, 8), tmp_path / "run.gguf"
    run = recorded(backend, monkeypatch, Capture(path, "0", "record"), values)
    assert f"2 graphs, 4 results of nodes, in {path}" in capsys.readouterr().err
    (form,) = run.forms
    assert [(node.op, node.sources) for node in form.nodes] == [("CONT", (-1,)), ("CONT", (0,))]
    for step in run.steps:
        assert bytes(step.rows[0]) == bytes(measured(values)[0])
        assert bytes(step.rows[1]) == bytes(measured(values.T)[0])
    assert {place: data.tobytes() for place, data in run.data.items()} == {
        (step, 0): values.tobytes() for step in (0, 1)
    }
    assert run.about.settings["device"] == backend.backend.name


def test_two_of_them_are_compared_step_by_step(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values, a, b = np.ones((3, 8), np.float32), tmp_path / "a.gguf", tmp_path / "b.gguf"
    run = recorded(backend, monkeypatch, Capture(a, None, "record"), values)
    assert compare(run, run, a, a)
    other = recorded(backend, monkeypatch, Capture(b, None, "record"), values + 1)
    result = compare(run, other, a, b)
    assert not result
    assert (result.compared, result.differ, result.ends, result.origins) == (4, 4, [], None)
    (form,) = run.forms
    strange = replace(form, nodes=tuple(replace(node, op="SQR", name="x") for node in form.nodes[:1]), pattern=(0,) * 4)
    steps = [replace(step, rows=step.rows[:1]) for step in run.steps]
    nothing = compare(run, replace(run, forms=[strange], steps=steps), a, b)
    assert (bool(nothing), verdict(nothing)) == (False, "part: nothing of them can be compared")
    assert str(result.first) == "CONT ' (cont)', node 0 of step 0"


def program(path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GGML_NPU_CAPTURE": str(path), "GGML_NPU_CAPTURE_AS": "record"}
    command = [sys.executable, "-c", PROGRAM, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_path_that_cannot_be_written_is_one_line_and_the_program_goes_on(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("none of ours")
    for path, why in ((tmp_path / "nowhere" / "run.gguf", "no such directory"), (text, "is a file that is no record")):
        done = program(path)
        assert (done.returncode, done.stdout) == (0, "{'CONT': 1}\n"), done.stderr
        (line,) = [line for line in done.stderr.splitlines() if "compiling" not in line]
        assert line.startswith(f"ggml-npu: GGML_NPU_CAPTURE {str(path)!r}: {why}")
        assert line.endswith("; nothing is recorded")
    assert [*tmp_path.iterdir()] == [text]
    assert text.read_text() == "none of ours"


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        done = program(tmp_path / "run.gguf", number)
        assert (done.returncode, done.stdout) == (-number, "{'CONT': 1}\n"), done.stderr
        assert not [*tmp_path.iterdir()]
    assert program(tmp_path / "run.gguf").returncode == 0
    assert read_run(tmp_path / "run.gguf").n_rows == 1


@pytest.mark.slow
def test_a_kind_of_file_that_nobody_writes() -> None:
    environment = {**os.environ, "GGML_NPU_CAPTURE": "x.gguf", "GGML_NPU_CAPTURE_AS": "film"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.stderr.endswith("GGML_NPU_CAPTURE_AS='film': no such kind of file; there are: record trace\n")
