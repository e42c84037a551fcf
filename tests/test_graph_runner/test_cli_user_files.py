"""A user's files that are none, that are nested without end, or that end the process: one line, and no waiting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from kit.commands import COMMAND, Cli, assert_refused, fresh, process

from ggml_backend_npu import user_texts
from ggml_backend_npu.backend.kernel_files import KernelFileError, load_kernels
from ggml_backend_npu.backend.options import DeviceError
from ggml_backend_npu.device.files import load_devices
from ggml_backend_npu.ggml.guard import Failures
from ggml_backend_npu.profiles.rules import ProfileError, Rule

# pipes and devices


READS = {
    "model": ["run", "FILE"],
    "trace": ["replay", "FILE", "--in-process"],
    "kernels": ["run", "tiny", "--kernels", "FILE"],
    "prompt": ["run", "tiny", "-f", "FILE"],
    "profile": ["run", "tiny", "--profile", "FILE.toml"],
    "tolerances": ["diff", "tiny", "--in-process", "--tolerances", "FILE"],
}
TEXTS = ("prompt", "profile", "tolerances")


@pytest.mark.some(2)
@pytest.mark.parametrize("reads", READS)
def test_a_pipe_that_nobody_writes_into_is_not_waited_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str
) -> None:
    monkeypatch.setattr(user_texts, "_PATIENCE", 0.1)
    arguments = [word.replace("FILE", str(tmp_path / "pipe")) for word in READS[reads]]
    (pipe,) = [word for word in arguments if word.startswith(str(tmp_path))]
    os.mkfifo(pipe)
    assert_refused(cli(*arguments), pipe, "is a pipe")
    if reads in TEXTS:
        held = os.open(pipe, os.O_RDWR)  # somebody might write into it, and does not
        assert_refused(cli(*arguments), pipe, "is a pipe")
        os.close(held)


@pytest.mark.parametrize("reads", [name for name in READS if name not in TEXTS])
def test_a_device_is_called_one(cli: Cli, reads: str) -> None:
    assert_refused(cli(*(word.replace("FILE", "/dev/null") for word in READS[reads])), "'/dev/null': is a device")


def test_what_is_no_device_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(DeviceError, match=r"pipe\.py': is a pipe"):
        load_devices(str(tmp_path / "pipe.py"))


def test_a_text_without_end_is_refused(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_texts, "LONGEST", 1 << 20)
    assert_refused(cli("run", "tiny", "-f", "/dev/zero"), "--file '/dev/zero': has more than 1,048,576 bytes")


def test_a_prompt_may_come_out_of_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["sh", "-c", f"sleep 0.3; printf 'Once\\r\\nupon' > {pipe}"]):
        assert user_texts.read_text(pipe) == "Once\nupon"


# TOML


DEEP = {
    "arrays": f"x = {'[' * 5000}{']' * 5000}",
    "tables": f"x = {'{a=' * 5000}1{'}' * 5000}",
    "keys": f"[MUL_MAT]\nf32{'.a' * 5000} = 1",
    "keys of a clock": f"[clock]\nmemory{'.a' * 5000} = 1\n[host]\nmemory = 1",
    "digits": f"[MUL_MAT]\nf32 = {'9' * 5000}",
    "a large number": f"[MUL_MAT]\nf32 = {'9' * 400}",
    "a large speed": f"[clock]\nmemory = {'9' * 400}\n[host]\nmemory = 1",
}


@pytest.mark.some(3)
@pytest.mark.daily(4)
@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("arguments", [["devices", "--profile"], ["replay", "--in-process", "SMALL", "--tolerances"]])
def test_toml_without_end_is_one_line(cli: Cli, tmp_path: Path, small: Path, arguments: list[str], text: str) -> None:
    file = tmp_path / "deep.toml"
    file.write_text(text)
    outcome = cli(*(str(small) if word == "SMALL" else word for word in arguments), file)
    assert_refused(outcome, file)
    assert "internal" not in outcome.err


@pytest.mark.parametrize("condition", ["src0.ne0 % 0 == 0", "src0.ne0 == params.0 % 0", "src0.ne0 % -0 == 0"])
def test_nothing_is_divided_by_0(condition: str) -> None:
    with pytest.raises(ProfileError, match="divides by 0"):
        Rule(where=(condition,))
    Rule(where=(condition.replace("% 0", "% 10").replace("% -0", "% -10"),))


# files that end the process


ENDS = {
    "import os\nos._exit(7)": "line 2: SystemExit: os._exit(7)",
    "from os import abort\nabort()": "line 2: SystemExit: os.abort()",
    "raise KeyboardInterrupt": "line 1: KeyboardInterrupt",
    "import sys\nsys.exit('no')": "line 2: SystemExit: no",
    "raise GeneratorExit('x')": "line 1: GeneratorExit: x",
    "class Own(BaseException): pass\nraise Own('x')": "line 2: Own: x",
}


@pytest.mark.parametrize(("text", "says"), ENDS.items())
def test_a_file_that_ends_the_process_is_told(cli: Cli, tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)
    assert_refused(cli("ops", "--kernels", file), f"kernels '{file}' {says}")
    with pytest.raises(DeviceError, match=r"device '.*own\.py' line ") as refused:
        load_devices(str(file))
    assert says in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "diff"])
def test_a_file_that_calls_exit_is_told_by_the_command(tmp_path: Path, command: str) -> None:
    file = tmp_path / "own.py"
    file.write_text("import os\nos._exit(0)")
    assert_refused(fresh(command, "tiny", "--kernels", file), f"kernels '{file}' line 2: SystemExit: os._exit(0)")


def test_ctrl_c_while_a_file_is_run_is_ctrl_c(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"import os, signal, time\nos.kill(os.getpid(), {signal.SIGINT:d})\ntime.sleep(10)")
    with pytest.raises(KeyboardInterrupt):
        load_kernels(file, None)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_a_file_forks_may_end(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import os\nif os.fork() == 0:\n    os._exit(7)\nassert os.wait()[1] >> 8 == 7\n")
    with pytest.raises(KernelFileError, match="registers no op"):
        load_kernels(file, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("types", ["[('f32', 'f32', None)]", "[('f32', 'f32'), ('f32', None)]", "[(0, 'f32')]"])
def test_types_that_are_no_names_are_named(cli: Cli, tmp_path: Path, types: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from ggml_backend_npu import op\n@op('SQR', types={types})\ndef sqr(dst, x, y): pass\n")
    assert_refused(cli("ops", "--kernels", file), "line 2: TypeError: op SQR: types (", "must be names of types")


# the machine


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["NUMBA_NUM_THREADS=0", "NUMBA_NUM_THREADS=-1"])
def test_a_variable_that_numba_refuses_is_named(tmp_path: Path, variable: str) -> None:
    """Where a kernel is to be compiled; else numba is not loaded."""
    name, value = variable.split("=")
    environment = os.environ | {name: value, "NUMBA_CACHE_DIR": str(tmp_path)}
    outcome = fresh("run", "tiny", "-n", "1", "--all", env=environment)
    assert_refused(outcome, f"{name}={value!r}", "threads")


IN_A_SMALL_DISK = 'mount -t tmpfs -o size=8k tmpfs "$TMPDIR" && exec "$@"'


@pytest.mark.slow
def test_a_full_tmpdir_is_told(tmp_path: Path, small: Path) -> None:
    words = ["unshare", "-rm", "sh", "-c", IN_A_SMALL_DISK, "sh"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    if shutil.which("unshare") is None or process(*words, "true", env=environment).code != 0:
        pytest.skip("nothing may be mounted here")
    for command in (["run", "tiny", "-n", "1"], ["diff", "tiny"], ["capture", "tiny", "-o", tmp_path / "t.gguf"]):
        outcome = process(*words, COMMAND, *command, env=environment)
        assert_refused(outcome, f"model 'tiny': cannot be written to '{tmp_path}': No space left on device")
    assert process(*words, COMMAND, "replay", small, env=environment).code == 0


def test_control_characters_of_a_device_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    Failures().add(ValueError("free: \x1b[31mred\x9b"))
    assert capsys.readouterr().err == "ggml-npu: free: \\x1b[31mred\\x9b\n"
