"""How the command ends: Ctrl-C, closed pipes, full disks, and mistakes of ours."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.commands import COMMAND, assert_refused, fresh, kernel_file, process

from ggml_backend_npu.plugin.plugin import Plugin

# Ctrl-C


LOOPS = """
from ggml_backend_npu import op

@op("SET_ROWS")
def loops(dst, x, ids):
    print("it runs", flush=True)
    while True:
        {body}
"""
BODIES = {"loops": "pass", "sleeps": "import time; time.sleep(1000)"}


def interrupted(*arguments: object, stdout_says: str | None = None, **keywords: object) -> tuple[int, float, str]:
    """Exit code, seconds after Ctrl-C, and stderr of a command that gets it when a kernel of its runs."""
    with subprocess.Popen(
        [str(COMMAND), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        assert command.stdout is not None
        if stdout_says is not None:
            assert command.stdout.readline().strip() == stdout_says
        begin = time.monotonic()
        command.send_signal(signal.SIGINT)
        _, err = command.communicate(timeout=60)
        return command.returncode, time.monotonic() - begin, err


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(("command", "body"), [("run", "loops"), ("run", "sleeps"), ("diff", "loops")])
def test_ctrl_c_ends_a_kernel(tmp_path: Path, command: str, body: str) -> None:
    kernels = kernel_file(tmp_path, LOOPS.format(body=BODIES[body]))
    code, seconds, err = interrupted(command, "tiny", "--kernels", kernels, stdout_says="it runs")
    assert code == 130
    assert seconds < 3, "two seconds are promised; one more for a machine that is busy"
    assert "Traceback" not in err


STUBBORN = """
from ggml_backend_npu import op

@op("SET_ROWS")
def stubborn(dst, x, ids):
    print("it runs", flush=True)
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
"""


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_ctrl_c_ends_a_kernel_that_catches_it(tmp_path: Path) -> None:
    kernels = kernel_file(tmp_path, STUBBORN)
    code, seconds, _ = interrupted("run", "tiny", "--kernels", kernels, stdout_says="it runs")
    assert (code, seconds < 3) == (130, True)


CHILD = """
import os, sys
from ggml_backend_npu.plugin import embedding
from graph_runner import cli
from graph_runner.base.errors import SuiteError
from graph_runner.tools import suites

def backend_ops(*arguments, **keywords):
    for line in suites.printed_by([sys.executable, "-uc", "import os, time; print(os.getpid()); time.sleep(1000)"]):
        print(line, flush=True)
    return []

embedding.check_package = lambda: None
suites.build = lambda console: None
suites.backend_ops = backend_ops
sys.argv = ["ggml-npu", "test", "-o", "SQR"]
cli.main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_child_too() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        child = int(command.stdout.readline())
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=5) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


IMPORTING = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
sys.argv = ["ggml-npu", "run", "tiny", "-n", "1"]
from graph_runner.cli import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_ctrl_c_while_modules_are_imported_is_quiet(module: str) -> None:
    outcome = process(sys.executable, "-c", IMPORTING.format(module=module))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


# pipes and streams


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(backend: Plugin) -> None:
    read, write = os.pipe()
    os.close(read)
    outcome = fresh("run", "tiny", stdout=write)
    os.close(write)
    assert outcome.code > 0
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["run", "tiny", "-n", "4"], ["ops", "--json", "-"]], ids=" ".join)
def test_a_closed_pipe_is_quiet(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    outcome = fresh(*arguments, stdout=write)
    os.close(write)
    assert outcome.code == 141
    assert "Traceback" not in outcome.err
    assert "Broken" not in outcome.err


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["run tiny -n 1", "diff tiny -n 0 --ops CONT --json result.json"])
def test_a_closed_stream_takes_nothing(tmp_path: Path, arguments: str, closed: str) -> None:
    outcome = process("sh", "-c", f"exec {COMMAND} {arguments} {closed}", cwd=tmp_path)
    assert outcome.code == 0
    assert "Traceback" not in outcome.out + outcome.err
    for file in tmp_path.iterdir():
        assert json.loads(file.read_text())["passed"]


# disks and folders


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["ops"], ["run", "tiny", "-n", "4"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_told_in_a_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        outcome = fresh(*arguments, stdout=full)
    assert outcome.code == 2
    assert re.fullmatch(r"ggml-npu: stdout( or a file)?: No space left on device", outcome.err.splitlines()[-1])
    assert "Traceback" not in outcome.err


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("arguments", [["run", "tiny", "-n", "1"], ["capture", "tiny", "-o", "t.gguf"]], ids=" ".join)
def test_a_full_disk_is_told_in_a_line(tmp_path: Path, arguments: list[str]) -> None:
    """A file may grow to 4 KiB, which is less than the model has that is written to TMPDIR."""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    words = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", COMMAND, *arguments]
    assert_refused(process(*words, env=environment, cwd=tmp_path), "File too large")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    environment = os.environ | {"XDG_CACHE_HOME": str(file)}
    assert_refused(fresh("plugin", env=environment), file, "File exists")


# mistakes of ours


OURS = """
import sys
from graph_runner import cli
from graph_runner.cli import app, ops

def wrong(*_):
    raise RuntimeError("of ours")

ops._list = wrong
sys.argv = ["ggml-npu", "ops", *sys.argv[1:]]
cli.main()
"""


@pytest.mark.slow
def test_a_mistake_of_ours_is_exit_code_3_and_a_line() -> None:
    outcome = process(sys.executable, "-c", OURS)
    assert outcome.code == 3
    (line,) = outcome.err.splitlines()
    assert "RuntimeError: of ours" in line
    assert "--verbose" in line
    assert "Traceback" in process(sys.executable, "-c", OURS, "--verbose").err
