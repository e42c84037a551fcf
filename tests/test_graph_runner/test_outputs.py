"""What a command writes is nothing that it reads, and is there whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from itertools import combinations
from pathlib import Path

import pytest
import typer
from kit.commands import COMMAND, Cli, assert_refused

from ggml_backend_npu.plugin.capture import Capture
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import TraceError
from graph_runner.base.files import replacing
from graph_runner.cli.app import COMMANDS, application, function_of
from graph_runner.cli.command import files_of
from graph_runner.cli.options import READS, WRITES
from graph_runner.trace.taken import record

READING = {name: files_of(function_of(name), READS) for name in COMMANDS}
WRITING = {name: files_of(function_of(name), WRITES) for name in COMMANDS}
PAIRS = [(name, read, write) for name in COMMANDS for read in READING[name] for write in WRITING[name]]
TWO_OUTPUTS = [(name, *pair) for name in COMMANDS for pair in combinations(WRITING[name], 2)]


def line(command: str, folder: Path, **values: Path) -> list[str]:
    """The arguments of a command with values of some parameters, and files for those that it needs besides."""
    words = [command]
    for parameter in typer.main.get_command(application()).commands[command].params:  # type: ignore[attr-defined]
        value = values.get(parameter.name)
        if value is None and parameter.required:
            value = folder / f"its-{parameter.name}.gguf"
            if parameter.name in READING[command]:
                value.write_bytes(b"GGUF")
        if value is not None:
            words += [str(value)] if parameter.param_type_name == "argument" else [parameter.opts[-1], str(value)]
    return words


def test_every_option_that_names_a_file_is_known_as_such() -> None:
    """An option of a new file has to say whether it is read or written: by its metavar it is told here."""
    for name in COMMANDS:
        for parameter in typer.main.get_command(application()).commands[name].params:  # type: ignore[attr-defined]
            named = str(parameter.metavar or "")
            if "FILE" in named or ".gguf" in named or named == "MODEL":
                assert parameter.name in {**READING[name], **WRITING[name]}, f"{name}: {parameter.opts}"
    assert len(PAIRS) > 15


@pytest.mark.some(10)
@pytest.mark.daily(8)
@pytest.mark.parametrize(
    ("command", "read", "write", "link"),
    [(*pair, "itself") for pair in PAIRS]
    + [("diff", "model", "json_file", link) for link in ("symbolic link", "hard link")],
    ids=str,
)
def test_no_output_is_what_the_command_reads(
    cli: Cli,
    tmp_path: Path,
    command: str,
    read: str,
    write: str,
    link: str,
) -> None:
    file, other = tmp_path / "mine.png", tmp_path / "link.png"
    file.write_bytes(b"GGUF and more")
    if link == "symbolic link":
        other.symlink_to(file)
    elif link == "hard link":
        other.hardlink_to(file)
    target = file if link == "itself" else other
    before = sorted(tmp_path.iterdir())
    outcome = cli(*line(command, tmp_path, **{read: file, write: target}))
    assert_refused(outcome, WRITING[command][write], READING[command][read], "reads")
    assert file.read_bytes() == b"GGUF and more"
    assert {path for path in tmp_path.iterdir() if not path.name.startswith("its-")} == {*before}


@pytest.mark.parametrize(("command", "first", "second"), TWO_OUTPUTS, ids=str)
def test_no_two_outputs_are_one_file(cli: Cli, tmp_path: Path, command: str, first: str, second: str) -> None:
    file, link = tmp_path / "mine.png", tmp_path / "link.png"
    file.write_text("older")
    link.symlink_to(file)
    outcome = cli(*line(command, tmp_path, **{first: file, second: link}))
    assert_refused(outcome, "writes there")
    assert file.read_text() == "older"


def test_no_trace_of_a_wrong_node_is_written_over_the_model(cli: Cli, tmp_path: Path) -> None:
    model = tmp_path / "0-9-CONT.gguf"
    model.write_bytes(b"GGUF and more")
    assert_refused(cli("diff", model, "--reproducers", tmp_path), "--reproducers", "MODEL reads")
    assert model.read_bytes() == b"GGUF and more"


VARIABLES = ("GGML_NPU_KERNELS", "GGML_NPU_PROFILE", "GGML_NPU_DEVICE_FILE")


@pytest.mark.some(10)
@pytest.mark.daily(8)
@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(("command", "write"), [(name, write) for name in COMMANDS for write in WRITING[name]], ids=str)
def test_no_output_is_what_a_variable_names(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, write: str, variable: str
) -> None:
    file = tmp_path / "mine.png"
    file.write_text("x = 1")
    monkeypatch.setenv(variable, f"{tmp_path / 'other'}:{file}" if variable == "GGML_NPU_KERNELS" else str(file))
    assert_refused(cli(*line(command, tmp_path, **{write: file})), WRITING[command][write], variable, "reads")
    assert file.read_text() == "x = 1"


@pytest.mark.some(12)
@pytest.mark.daily(8)
@pytest.mark.parametrize(("command", "read"), [(name, read) for name in COMMANDS for read in READING[name]], ids=str)
def test_no_capture_is_what_the_command_reads(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, read: str
) -> None:
    file, link = tmp_path / "mine.gguf", tmp_path / "link.gguf"
    file.write_bytes(b"GGUF and more")
    link.hardlink_to(file)
    monkeypatch.setenv("GGML_NPU_CAPTURE", str(link))
    outcome = cli(*line(command, tmp_path, **{read: file}))
    assert_refused(outcome, "GGML_NPU_CAPTURE", READING[command][read], "reads")
    assert file.read_bytes() == b"GGUF and more"


@pytest.mark.some(10)
@pytest.mark.daily(8)
@pytest.mark.parametrize("part", [1, 2, 3])
@pytest.mark.parametrize(
    ("command", "write"),
    [(name, write) for name in COMMANDS if "model" in READING[name] for write in (*WRITING[name], "GGML_NPU_CAPTURE")],
    ids=str,
)
def test_no_output_is_a_part_of_a_split_model(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, write: str, part: int
) -> None:
    parts = [tmp_path / f"m.png-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for file in parts:
        file.write_bytes(b"GGUF and more")
    target = tmp_path / "link.png"
    target.symlink_to(parts[part - 1])
    if write == "GGML_NPU_CAPTURE":
        monkeypatch.setenv(write, str(target))
        outcome = cli(*line(command, tmp_path, model=parts[0]))
    else:
        outcome = cli(*line(command, tmp_path, model=parts[0], **{write: target}))
    assert_refused(outcome, WRITING[command].get(write, write), READING[command]["model"], "reads")
    assert [file.read_bytes() for file in parts] == [b"GGUF and more"] * 3


def test_no_trace_of_a_wrong_node_is_a_part_of_the_model(cli: Cli, tmp_path: Path) -> None:
    parts = [tmp_path / f"0-9-CONT-{number:05}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"GGUF and more")
    assert_refused(cli("diff", parts[0], "--reproducers", tmp_path), "--reproducers", "MODEL reads")


def test_a_capture_is_not_written_over_what_is_no_trace(backend: Plugin, tmp_path: Path) -> None:
    """Any program may have the variable: which files it reads is known to nobody."""
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF and more")
    with pytest.raises(TraceError, match="is a file that is no trace"):
        record(backend, Capture(other))
    assert other.read_bytes() == b"GGUF and more"


def test_a_file_takes_the_place_of_another_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("older")
    file.chmod(0o640)
    with replacing(file) as partial:
        partial.write_text("newer")
        assert file.read_text() == "older"
    assert file.read_text() == "newer"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    with suppress(ZeroDivisionError), replacing(file) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert [path.read_text() for path in tmp_path.iterdir()] == ["newer"]


def test_a_partial_file_of_the_user_stays(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "ops.json.part"
    mine.write_text("mine")
    assert cli("ops", "--json", tmp_path / "ops.json").code == 0
    assert mine.read_text() == "mine"


SLOW = """
import time
from ggml_backend_npu import op

@op("SET_ROWS")
def slow(dst, x, ids):
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_half_written_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    kernels, temporary = tmp_path / "slow.py", tmp_path / "tmp"
    kernels.write_text(SLOW)
    temporary.mkdir()
    with subprocess.Popen(
        [str(COMMAND), "run", "tiny", "--kernels", str(kernels)],
        env=os.environ | {"TMPDIR": str(temporary)}, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline().startswith("kernels of ")
        while not [*temporary.glob("ggml-npu-*/*.gguf")]:
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(timeout=5) == 128 + number
    assert [*temporary.iterdir()] == []


CAPTURE_ENDS = """
import os, signal, sys
from graph_runner import cli, trace
put = trace.TraceWriter.add

def add(self, recorded):
    put(self, recorded)
    os.kill(os.getpid(), signal.SIGTERM)

trace.TraceWriter.add = add
sys.argv = ["ggml-npu", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.slow
def test_a_trace_is_not_left_half_written_by_a_signal(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CAPTURE_ENDS, "capture", "tiny", "-o", str(tmp_path / "trace.gguf")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert [*tmp_path.iterdir()] == []
