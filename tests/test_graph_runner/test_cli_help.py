"""What every command has in common: help, names of devices, versions; and the commands that list or ask."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from kit.commands import MOVERS, Cli, assert_refused, fresh, process

import ggml_backend_npu
import graph_runner
import quant
from ggml_backend_npu.profiles.generations import PROFILES
from graph_runner.cli.app import COMMANDS
from graph_runner.tools import suites

# help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"Usage: ggml-npu {command}" in outcome.out
    if command in ("run", "diff"):
        for word in ("MODEL", "demo", "tiny", "--prompt", "--cache-type-k", "--cache-type-v", "--flash-attn"):
            assert word in outcome.out
        assert "--kernels" in outcome.out


def test_help_names_the_profiles(cli: Cli) -> None:
    shown = " ".join(re.sub(r"[│|]", " ", cli("run", "--help").out).split())
    assert f"Device generation: {', '.join(PROFILES)}, or a file" in shown, "graph_runner/cli/options.py"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_h_is_help(cli: Cli, command: str | None) -> None:
    outcome = cli(*([] if command is None else [command]), "-h")
    assert outcome.code == 0
    assert "Usage: ggml-npu" in outcome.out
    if command is not None:
        assert "--verbose" in outcome.out


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2)], ids=["asked for", "no command"])
def test_help_names_every_command(cli: Cli, arguments: list[str], code: int) -> None:
    outcome = cli(*arguments)
    assert outcome.code == code
    assert {"run", "diff", "devices", "ops"}.issubset(COMMANDS)
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", outcome.out + outcome.err, re.MULTILINE)


@pytest.mark.slow
def test_a_shell_completes_commands() -> None:
    words = {"_GGML_NPU_COMPLETE": "complete_bash", "COMP_WORDS": "ggml-npu cov", "COMP_CWORD": "1"}
    assert fresh(env=os.environ | words).out.strip() == "coverage"


# names and versions


@pytest.mark.slow
@pytest.mark.parametrize("module", ["ggml_backend_npu", "graph_runner"])
def test_the_modules_are_the_command(module: str) -> None:
    outcome = process(sys.executable, "-m", module, "--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"ggml-backend-npu {version('ggml-backend-npu')}, llama-cpp-python ")


def test_every_package_has_a_version() -> None:
    assert {package.__version__ for package in (quant, ggml_backend_npu, graph_runner)} == {version("ggml-backend-npu")}


def test_graph_runner_says_what_is_public() -> None:
    assert graph_runner.__doc__
    assert all(getattr(graph_runner, name) is not None for name in graph_runner.__all__)


@pytest.mark.slow
@pytest.mark.parametrize("word", ["cpu", "CPU", "npu", "NPU"])
def test_devices_have_one_word_in_every_command(cli: Cli, tmp_path: Path, word: str) -> None:
    trace = tmp_path / "trace.gguf"
    assert cli("run", "tiny", "-n", "1", "--device", word).code == 0
    assert cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--device", word, "--reference", "CPU").code == 0
    assert cli("capture", "tiny", "-o", trace, "--nodes", "CONT").code == 0
    assert cli("replay", trace, "--device", word).code == 0


# devices, ops, test, plugin


def test_devices_lists_the_cpu_and_the_npu(cli: Cli) -> None:
    outcome = cli("devices")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"^CPU +CPU +CPU ", outcome.out, re.MULTILINE)
    assert len(re.findall(r"^NPU +ACCEL +NPU ", outcome.out, re.MULTILINE)) == 1
    assert re.search(r"^ggml \d+\.\d+\.\d+\b", outcome.out, re.MULTILINE)


def test_ops_lists_the_ops_by_type(cli: Cli) -> None:
    outcome = cli("ops")
    assert (outcome.code, outcome.err) == (0, "")
    assert set(re.findall(r"^([A-Z_]+) ", outcome.out, re.MULTILINE)) >= MOVERS
    for type_name in ("q8_0", "q4_0", "bf16", "i64", "same"):
        assert re.search(rf"\b{type_name}\b", outcome.out)


def test_ops_fits_a_terminal(cli: Cli) -> None:
    assert max(map(len, cli("ops").out.splitlines())) <= 100


def test_ops_describes_an_op(cli: Cli) -> None:
    outcome = cli("ops", "soft_max", "ROPE")
    assert outcome.code == 0
    assert "src0 x, src1 mask (may be left out), src2 sinks (may be left out)\n" in outcome.out
    assert "parameters: scale (f32), max_bias (f32)\n" in outcome.out
    assert "freq_base (f32)" in outcome.out
    assert re.search(r"^f32 \+ i32 +f32", outcome.out, re.MULTILINE)
    assert set(json.loads(cli("ops", "ROPE", "--json", "-").out)["ops"]) == {"ROPE"}
    assert_refused(cli("ops", "SOFTMAX"), "no op 'SOFTMAX'; did you mean 'SOFT_MAX'?")
    assert_refused(cli("ops", "MAP_CUSTOM1"), "MAP_CUSTOM1")


def test_ops_as_json(cli: Cli) -> None:
    found = json.loads(cli("ops", "--json", "-").out)
    assert found["ops"]["CONT"]
    assert set(found["ops"]) == set(ggml_backend_npu.default_backend().ops)


def test_cases_are_chosen_by_a_pattern(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of test-backend-ops that a diff prints is one of the command."""
    called = []

    def lines(program: str, arguments: list[str], options: object) -> list[str]:
        called.append([program, *arguments])
        return ["Backend 1/1: NPU", "  SQR(type=f16,ne=[1,1,1,1]): OK"]

    monkeypatch.setattr(suites, "build", lambda console: None)
    monkeypatch.setattr(suites, "_with_plugin", lambda *given: iter(lines(*given)))
    assert cli("test", "-o", "SQR", "-p", "type=f16").code == 0
    assert called == [["test-backend-ops", "test", "-b", "NPU", "-o", "SQR", "-p", "type=f16"]]
    assert_refused(cli("test", "-o", "SQR,NOPE"), "no case of NOPE")
    assert_refused(cli("test", "-o", "NOPE", "-p", "x"), "match 'x'")


def test_what_test_needs(cli: Cli) -> None:
    assert_refused(cli("test"), "-o")


@pytest.mark.slow
def test_what_the_plugin_takes_to_be_asked_is_told() -> None:
    outcome = fresh("plugin")
    assert Path(outcome.out.strip()).is_file()
    (line,) = outcome.err.splitlines()
    assert "llama-cli, llama-server and llama-completion" in line
    assert "-dev NPU" in line
