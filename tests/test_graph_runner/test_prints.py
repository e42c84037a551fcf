"""What a user's code prints never goes into a report, and what cannot be written does not change a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Cli, Outcome, fresh, kernel_file, strict_json

from graph_runner.base.errors import BadInputError
from graph_runner.cli.outputs import delivered
from graph_runner.tools import suites

PRINTS = """
import os
import sys
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN

print("it is loaded")

@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst, a, b):
    print("it runs")
    os.write(1, b"as C prints\\n")
    OWN["MUL"].define(dst, a, b)
    dst.view()[..., :1] = {wrong}
"""
RIGHT, WRONG = "dst.view()[..., :1]", "7"
DEVICE = """
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator

class Talking(Simulator):
    def refusal(self, node):
        print("it refuses")
        return super().refusal(node)

print("it is loaded")
register(Talking())
"""


def printing(folder: Path, wrong: str = RIGHT) -> list[object]:
    return ["--kernels", kernel_file(folder, PRINTS.format(wrong=wrong))]


def only_json(outcome: Outcome, code: int = 0) -> None:
    assert outcome.code == code, outcome.err
    strict_json(outcome.out)
    assert "it is loaded" in outcome.err


def diff(folder: Path, *arguments: object, wrong: str = RIGHT, **keywords: object) -> Outcome:
    """A diff of a kernel that prints."""
    common = ["diff", "tiny", "-n", 0, "--ops", "MUL", "--reproducers", folder]
    return fresh(*common, *printing(folder, wrong), *arguments, **keywords)


# prints


@pytest.mark.slow
def test_a_kernel_prints_beside_the_json_of_a_diff(cli: Cli, tmp_path: Path) -> None:
    arguments = ["diff", "tiny", "-n", 0, "--ops", "MUL", "--reproducers", tmp_path, *printing(tmp_path)]
    outcome = cli(*arguments, "--json", "-")
    only_json(outcome)
    assert "it runs" in outcome.err
    assert "as C prints" in outcome.err
    outcome = cli(*arguments, "--in-process", "--html", "-")
    assert outcome.out.startswith("<!")
    assert "it runs" not in outcome.out


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.parametrize("option", ["--json", "--html", "--model-explorer"])
@pytest.mark.parametrize("how", [[], ["--in-process"]], ids=["child", "in process"])
def test_a_kernel_prints_beside_any_output(tmp_path: Path, option: str, how: list[str]) -> None:
    outcome = diff(tmp_path, option, "-", *how, wrong=WRONG)
    assert outcome.code == 1
    assert "it runs" not in outcome.out
    assert "as C prints" not in outcome.out
    assert "it runs" in outcome.err
    assert "wrong: " in outcome.err


@pytest.mark.slow
def test_a_kernel_prints_beside_the_json_of_other_commands(tmp_path: Path) -> None:
    kernels = printing(tmp_path)
    only_json(fresh("coverage", "tiny", "--json", "-", *kernels))
    device = tmp_path / "talking.py"
    device.write_text(DEVICE)
    only_json(fresh("coverage", "tiny", "--json", "-", "--all", "--device-file", device))
    fresh("capture", "tiny", "-n", 0, "--nodes", "MUL", "-o", tmp_path / "t.gguf")
    for how in ([], ["--in-process"]):
        only_json(fresh("replay", tmp_path / "t.gguf", "--json", "-", *kernels, *how))


@pytest.mark.slow
def test_a_kernel_that_prints_is_heard_where_stdout_is_no_report(tmp_path: Path) -> None:
    outcome = diff(tmp_path, "--json", tmp_path / "result.json")
    assert "it runs" in outcome.out


LINES = """\
ggml-npu: compiling kernels not used before; kept
Testing 2 devices

Backend 1/2: NPU
  Device description: Python kernels
it is loaded
it runs
  SQR(type=f32,ne=[10,5,4,3]): OK
[SQR] ERR = 1.0 > 0.0   SQR(type=f16,ne=[10,5,4,3]): FAIL
ggml-npu: SQR node 'x': ValueError: no
two words
  1/2 tests passed

Failing tests:
  SQR(type=f16,ne=[10,5,4,3])
  Backend NPU: FAIL
Backend 2/2: CPU
  Skipping CPU backend
1/2 backends passed
FAIL
"""


def test_a_kernel_prints_beside_the_cases_of_ggml(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(suites, "_with_plugin", lambda *_: iter(LINES.splitlines()))
    cases = suites.backend_ops(["SQR"], printed=heard.append)
    assert [case.verdict for case in cases] == ["passed", "failed"]
    assert heard == ["it is loaded", "it runs", "two words"]


@pytest.mark.conformance
def test_a_kernel_prints_beside_the_cases_of_ggml_in_the_command(tmp_path: Path) -> None:
    file = kernel_file(tmp_path, PRINTS.format(wrong=RIGHT))
    outcome = fresh("test", file, "-p", "type=f32,ne=.10,5,4,3.,nr=.1,1,1,1.")
    assert outcome.code == 0, outcome.err
    assert "it runs" in outcome.err
    assert "it runs" not in outcome.out


# full disks


@pytest.mark.daily(3)
@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "code", "verdict"), [(WRONG, 1, "wrong: "), (RIGHT, 2, "right: ")])
@pytest.mark.parametrize("option", ["--json", "--html", "--model-explorer"])
def test_a_report_that_cannot_be_written(tmp_path: Path, option: str, wrong: str, code: int, verdict: str) -> None:
    other = tmp_path / "other.json"
    more = ["--json", other] if option != "--json" else ["--html", other]
    outcome = diff(tmp_path, option, "/dev/full", *more, wrong=wrong)
    assert outcome.code == code
    assert verdict in outcome.out, "the verdict comes first"
    assert outcome.err.splitlines()[-1] == f"ggml-npu: {option} '/dev/full': No space left on device"
    assert other.stat().st_size > 1000, "what can be written is"


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "code", "verdict"), [(WRONG, 1, "wrong: "), (RIGHT, 2, "right: ")])
def test_a_report_on_a_full_stdout(tmp_path: Path, wrong: str, code: int, verdict: str) -> None:
    with open("/dev/full", "w") as full:
        outcome = diff(tmp_path, "--json", "-", wrong=wrong, stdout=full)
    assert outcome.code == code
    assert verdict in outcome.err
    assert outcome.err.splitlines()[-1].endswith("No space left on device")


def fails(error: Exception) -> None:
    raise error


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [BadInputError("--json 'x': No space left on device"), FULL], ids=repr)
@pytest.mark.parametrize(("passed", "code"), [(True, 2), (False, 1)])
def test_each_output_is_made_though_one_fails(
    capsys: pytest.CaptureFixture[str], error: Exception, passed: bool, code: int
) -> None:
    made: list[int] = []
    assert delivered(passed, lambda: made.append(1), lambda: fails(error), lambda: made.append(2)) == code
    assert made == [1, 2]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("No space left on device")
    assert delivered(passed) == code % 2


def test_a_file_is_written_though_nobody_reads_stdout() -> None:
    made: list[int] = []
    with pytest.raises(BrokenPipeError):
        delivered(False, lambda: fails(BrokenPipeError()), lambda: made.append(1))
    assert made == [1]
