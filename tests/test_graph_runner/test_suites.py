"""What is read from the output of ggml's own programs, without building them: canned output stands in."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from graph_runner.base.console import Console
from graph_runner.tools import suites
from graph_runner.tools.suites import Case, SuiteError, architectures, backend_ops
from quant.kernels import kept

HEADER = """\
load_backend: loaded NPU backend from /a/libggml-npu.so
Testing 2 devices

Backend 1/2: CPU
  Skipping
Backend 2/2: NPU
  Device description: Python kernels (ggml-backend-npu)
  Device memory: 0 MB (0 MB free)

"""

CASES = """\
  SQR(type=f32,ne=[10,5,4,3]): \x1b[1;32mOK\x1b[0m
[SQR] ERR = 1.145425958 > 0.000000100   SQR(type=f32,ne=[7,1,5,3]): \x1b[1;31mFAIL\x1b[0m
ggml-npu: SQR node 'out': ValueError: no
  SQR(type=f16,ne=[7,1,5,3]): \x1b[1;32mOK\x1b[0m
  SQR(type=f16,ne=[10,5,4,3]): not supported [NPU]\x20
  CPY(type_src=q8_0,ne_src=[32,2,1,1]): not supported [NPU, CPU]\x20
failed to allocate tensors [NPU]   SQR(type=f32,ne=[1,1,1,1]): \x1b[1;32mOK\x1b[0m
  3/5 tests passed

Failing tests:
  SQR(type=f32,ne=[7,1,5,3])
  SQR(type=f32,ne=[1024,1024,1,1])
  Backend NPU: \x1b[1;31mFAIL\x1b[0m
1/2 backends passed
\x1b[1;31mFAIL\x1b[0m
"""

MODELS = """\
0.00.001.846 I main: using seed 1, stdev 0.100000
|     Model arch.|                           Device|Config|   NMSE vs. CPU|Roundtrip|
|----------------|---------------------------------|------|---------------|---------|
|            clip|Python kernels (ggml-backend-npu)| Dense|\x1b[1;33mSKIP\x1b[0m           |     \x1b[1;33mSKIP\x1b[0m|
|           llama|Python kernels (ggml-backend-npu)|   MoE|  \x1b[1;32mOK\x1b[0m (6.58e-11)|       \x1b[1;32mOK\x1b[0m|
|          gemma3n|Python kernels (ggml-backend-npu)| Dense|  \x1b[1;32mOK\x1b[0m (7.55e-09)|     \x1b[1;33mSKIP\x1b[0m|
|           rwkv7|Python kernels (ggml-backend-npu)| Dense|  \x1b[1;32mOK\x1b[0m (0.00e+00)|     \x1b[1;31mFAIL\x1b[0m|
|           mamba|Python kernels (ggml-backend-npu)| Dense|\x1b[1;31mFAIL\x1b[0m (6.58e-01)|       \x1b[1;32mOK\x1b[0m|
"""

Program = Callable[[str, int], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Makes both suites programs that print a text and end with an exit code."""
    monkeypatch.setattr(suites, "build", lambda: tmp_path)

    def make(text: str, code: int) -> None:
        for name in ("test-backend-ops", "test-llama-archs"):
            path = tmp_path / name
            path.write_text(f"#!{sys.executable}\nimport os\nprint({text!r}, flush=True)\n{end(code)}\n")
            path.chmod(0o700)

    return make


def end(code: int) -> str:
    return f"os.kill(os.getpid(), {-code})" if code < 0 else f"os._exit({code})"


def test_each_case_has_its_verdict_and_its_log(program: Program) -> None:
    program(HEADER + CASES, 1)
    seen: list[Case] = []
    cases = backend_ops(["SQR", "CPY"], seen=seen.append)
    assert [(case.group, case.name, case.verdict) for case in cases] == [
        ("SQR", "type=f32,ne=[10,5,4,3]", "passed"),
        ("SQR", "type=f32,ne=[7,1,5,3]", "failed"),
        ("SQR", "type=f16,ne=[7,1,5,3]", "failed"),
        ("SQR", "type=f16,ne=[10,5,4,3]", "not supported"),
        ("CPY", "type_src=q8_0,ne_src=[32,2,1,1]", "not supported"),
        ("SQR", "type=f32,ne=[1,1,1,1]", "passed"),
        ("SQR", "type=f32,ne=[1024,1024,1,1]", "failed"),
    ]
    assert seen == cases[:-1]
    assert [case.refused_by for case in cases[3:5]] == [("NPU",), ("NPU", "CPU")]
    assert cases[1].log == "[SQR] ERR = 1.145425958 > 0.000000100   SQR(type=f32,ne=[7,1,5,3]): FAIL"
    assert cases[2].log == "ggml-npu: SQR node 'out': ValueError: no\nSQR(type=f16,ne=[7,1,5,3]): OK"


@pytest.mark.parametrize("row", ["|  \x1b[1;32mOK\x1b[0m (6.58e-11)", "|          gemma3n"])
def test_each_model_has_its_verdict(program: Program, row: str) -> None:
    program(MODELS.replace(row, f"{row}ggml-npu: compiling kernels not used before; kept in /a\n"), 1)
    assert [(model.group, model.name, model.verdict) for model in architectures()] == [
        ("clip", "Dense", "not supported"),
        ("llama", "MoE", "passed"),
        ("gemma3n", "Dense", "passed"),
        ("rwkv7", "Dense", "failed"),
        ("mamba", "Dense", "failed"),
    ]


@pytest.mark.parametrize("suite", [lambda: backend_ops(["SQR"]), architectures], ids=["ops", "models"])
@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("Testing 1 devices\n\nBackend 1/1: CPU\n  Skipping\nOK", 0, "has no device NPU"),
        ("ggml-npu: no device NPU: no such thing\nOK", 0, "^no device NPU: no such thing$"),
        (HEADER + "ggml.c:7: GGML_ASSERT(false) failed\nmore", -6, r"ended with -6: ggml.c:7: GGML_ASSERT\(false\)"),
        ("", 2, "ended with 2: it printed nothing"),
    ],
)
def test_a_suite_without_the_device_or_an_end_is_no_success(
    program: Program, suite: Callable[[], list[Case]], text: str, code: int, reason: str
) -> None:
    program(text, code)
    with pytest.raises(SuiteError, match=reason):
        suite()


def test_two_that_want_the_programs_at_once_build_them_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def build(programs: Path, console: Console, which: suites.Programs) -> None:
        builds.append(programs)
        time.sleep(0.2)
        programs.mkdir()
        kept.seal(programs)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    monkeypatch.setattr(suites, "_build", build)
    with ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: suites.build(), range(3))] == [suites.folder()] * 3
    assert builds == [suites.folder()]


def test_what_the_programs_cannot_be_built_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(SuiteError, match="pip install ninja"):
        suites.build()


def test_a_build_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is no terminal, in lines; the first one says that it takes minutes."""

    def lines(command: list[object], *_: object) -> list[str]:
        if "--build" not in command and "-C" in command:
            (tmp_path / "build" / "bin").mkdir(parents=True)
            return [f"[{step}/30] Building" for step in range(1, 31)]
        return []

    monkeypatch.setattr(suites, "_TOLD_EVERY", -1.0)
    monkeypatch.setattr(suites, "printed_by", lines)
    monkeypatch.setattr(suites, "_tool", lambda package, folder: Path(package))
    (tmp_path / "source").mkdir()
    out = io.StringIO()
    suites._build(tmp_path / "bin", Console(file=out, width=200))
    first, *told = out.getvalue().splitlines()
    assert "some 4 minutes" in first
    assert told == [f"building ggml's own programs, once: step {step} of 30" for step in range(1, 31)]
