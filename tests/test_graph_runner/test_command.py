"""What the command says and how it ends: exit codes, pipes, Ctrl-C, variables, and the habits of other commands."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from io import StringIO
from pathlib import Path

import pytest
from commands import COMMAND, Cli, assert_refused, fresh, kernel_file, process
from gguf import GGUFReader

import ggml_backend_npu
import graph_runner
import quant
from graph_runner import suites
from graph_runner.cli.app import COMMANDS
from graph_runner.console import Console, table
from graph_runner.limits import MOST_THREADS
from graph_runner.session import Sampler, Session, SessionError, Settings, generate

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
from graph_runner import cli, suites
from graph_runner.errors import SuiteError

def backend_ops(*arguments, **keywords):
    for line in suites._lines([sys.executable, "-uc", "import os, time; print(os.getpid()); time.sleep(1000)"]):
        print(line, flush=True)
    return []

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


# exit codes


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


OURS = """
import sys
from graph_runner import cli
from graph_runner.cli import app
import ggml_backend_npu.registry

def wrong(self):
    raise RuntimeError("of ours")

ggml_backend_npu.registry.Op.signatures = wrong
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


@pytest.mark.parametrize("module", ["typer", "numpy"])
def test_ctrl_c_while_modules_are_imported_is_quiet(module: str) -> None:
    outcome = process(sys.executable, "-c", IMPORTING.format(module=module))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


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
    assert_refused(fresh("plugin", env=environment), file, "Not a directory")


WRONG = "from ggml_backend_npu import op\n@op('CONT')\ndef cont(dst, x):\n    dst.view()[...] = 0\n"


@pytest.mark.slow
def test_a_diff_needs_no_folder_to_keep_wrong_nodes_in(tmp_path: Path) -> None:
    kernels, file = kernel_file(tmp_path, WRONG), tmp_path / "file"
    file.touch()
    command = ["diff", "tiny", "-n", "0", "--ops", "CONT", "--kernels", kernels]
    outcome = fresh(*command, env=os.environ | {"XDG_CACHE_HOME": str(file)})
    assert outcome.code == 1
    assert outcome.err.startswith(f"ggml-npu: wrong nodes are not kept: '{file}")
    assert "wrong: " in outcome.out


@pytest.mark.slow
def test_a_diff_goes_on_where_wrong_nodes_cannot_be_kept(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    kernels = kernel_file(tmp_path, WRONG + f"    import shutil; shutil.rmtree({str(folder)!r}, ignore_errors=True)\n")
    outcome = cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--kernels", kernels, "--reproducers", folder)
    assert outcome.code == 1
    assert outcome.err.count("ggml-npu: wrong nodes are not kept: trace '") == 1
    assert "wrong: " in outcome.out


# threads


@pytest.mark.parametrize("count", [MOST_THREADS + 1, 32768, 100_000, 99_999_999_999, -1])
@pytest.mark.parametrize("command", ["run", "diff", "coverage"])
def test_threads_have_a_bound(cli: Cli, command: str, count: int) -> None:
    assert_refused(cli(command, "tiny", "--threads", count), "'--threads'", f"see ggml-npu {command} -h")


def test_the_most_threads_work(cli: Cli) -> None:
    assert cli("run", "tiny", "-n", "2", "--threads", MOST_THREADS).code == 0


def test_a_session_has_the_same_bounds(tiny: Path) -> None:
    with pytest.raises(SessionError, match=f"threads 100000: must be 0 to {MOST_THREADS}"):
        Session(tiny, Settings(threads=100_000))
    with pytest.raises(SessionError, match="cache_type_k 'q8': must be one of f32 f16 "):
        Session(tiny, Settings(cache_type_k="q8"))


# what was silent


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


SQR = "from ggml_backend_npu import op\n@op('SQR')\ndef sqr(dst, x):\n    dst.view()[...] = x.view() ** 2\n"
CONT = "from ggml_backend_npu import op\nimport helps\n@op('CONT')\ndef cont(dst, x):\n    helps.cont(dst, x)\n"
HELPS = "def cont(dst, x):\n    dst.view()[...] = x.view().reshape(dst.ne[::-1])\n"


def test_kernels_come_from_several_files_that_import_their_neighbours(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in {"one.py": SQR, "two.py": CONT, "helps.py": HELPS}.items():
        (tmp_path / name).write_text(text)
    files = tmp_path / "one.py", tmp_path / "two.py"
    said = [f"kernels of {files[0]}: SQR (replaced)", f"kernels of {files[1]}: CONT (replaced)"]
    command = ["run", "tiny", "-n", "2", "--flash-attn", "off"]
    outcome = cli(*command, "--kernels", files[0], "--kernels", files[1])
    assert (outcome.code, outcome.err.splitlines()[:2]) == (0, said)
    monkeypatch.setenv("GGML_NPU_KERNELS", os.pathsep.join(map(str, files)))
    outcome = cli(*command)
    assert (outcome.code, outcome.err.splitlines()[:2]) == (0, said)


@pytest.mark.parametrize(
    "options",
    [["--all"], ["--memory", "device"], ["--kernels", "k.py"], ["--device-type", "gpu"], ["--profile", "full"]],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["run", "diff", "replay"])
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


def test_a_prompt_beyond_the_training_context_is_told(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "short.gguf"
    file.write_bytes(tiny.read_bytes())
    reader = GGUFReader(file, "r+")
    field = reader.fields["llama.context_length"]
    field.parts[field.data[0]][0] = 16
    reader.data.flush()
    outcome = cli("run", file, "-n", "4")
    assert outcome.code == 0
    assert "ggml-npu: 26 + 4 tokens are more than the 16 that the model was trained for" in outcome.err


def test_a_session_has_no_logits_before_a_token(tiny: Path) -> None:
    with Session(tiny, Settings()) as session, pytest.raises(SessionError, match="no token has been decoded"):
        session.logits()


def test_a_prompt_tells_how_far_it_is(tiny: Path) -> None:
    seen: list[int] = []
    with Session(tiny, Settings(n_ctx=1024)) as session:
        tokens = session.tokenize("a" * 700)
        assert [*generate(session, tokens, 1, Sampler(), seen.append)]
    assert seen == [512, len(tokens)]


def test_a_wrong_option_is_not_blamed_on_the_model(cli: Cli) -> None:
    outcome = cli("run", "tiny", "--flash-attn", "off", "--cache-type-v", "q4_0")
    assert_refused(outcome, "cache type q4_0 of V", "flash attention, which is off")
    assert "model" not in outcome.err


# what a model names


def test_what_a_model_names_does_not_reach_the_terminal(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "\x1b[2J.gguf"
    file.write_bytes(tiny.read_bytes().replace(b"token_embd.weight", b"token\x1b[2J.weight"))
    outcome = cli("run", file)
    assert outcome.code == 2
    assert "\x1b" not in outcome.err
    assert "\\x1b[2J" in outcome.err


def test_names_of_nodes_are_escaped(tmp_path: Path) -> None:
    written = StringIO()
    shown = table("op")
    shown.add_row("\x1b[2J\x07name\x9b")
    console = Console(file=written)
    console.print(shown)
    console.print("\x1b]0;title\x07", markup=False)
    assert "\x1b" not in written.getvalue()
    assert "\\x1b[2J\\x07name\\x9b" in written.getvalue()


def test_a_narrow_terminal_gets_whole_names() -> None:
    written, name = StringIO(), "a_very_long_name_of_a_node"
    shown = table("op", "name")
    shown.add_row("GET_ROWS", name)
    Console(file=written, force_terminal=True, width=20).print(shown)
    parts = [line[10:].strip() for line in written.getvalue().splitlines()[1:]]
    assert "".join(parts) == name


@pytest.mark.slow
def test_a_pipe_gets_whole_lines() -> None:
    narrow = os.environ | {"COLUMNS": "40"}
    outcome = fresh("devices", env=narrow)
    assert re.search(r"^NPU +ACCEL +NPU +Python kernels \(ggml-backend-npu\) *$", outcome.out, re.MULTILINE)
    assert max(map(len, fresh("ops", env=narrow).out.splitlines())) > 100


@pytest.mark.slow
def test_json_stands_alone_where_text_goes_to_the_same_place() -> None:
    outcome = fresh("coverage", "tiny", "--json", "-", stderr=subprocess.STDOUT)
    assert json.loads(outcome.out)["schema"].startswith("ggml-npu coverage")


# habits


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


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_h_is_help(cli: Cli, command: str | None) -> None:
    outcome = cli(*([] if command is None else [command]), "-h")
    assert outcome.code == 0
    assert "Usage: ggml-npu" in outcome.out
    if command is not None:
        assert "--verbose" in outcome.out


@pytest.mark.slow
def test_a_shell_completes_commands() -> None:
    words = {"_GGML_NPU_COMPLETE": "complete_bash", "COMP_WORDS": "ggml-npu cov", "COMP_CWORD": "1"}
    assert fresh(env=os.environ | words).out.strip() == "coverage"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["cpu", "CPU", "npu", "NPU"])
def test_devices_have_one_word_in_every_command(cli: Cli, tmp_path: Path, word: str) -> None:
    trace = tmp_path / "trace.gguf"
    assert cli("run", "tiny", "-n", "1", "--device", word).code == 0
    assert cli("diff", "tiny", "-n", "0", "--ops", "CONT", "--device", word, "--reference", "CPU").code == 0
    assert cli("capture", "tiny", "-o", trace, "--nodes", "CONT").code == 0
    assert cli("replay", trace, "--device", word).code == 0


def test_a_prompt_from_a_file(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    assert cli("run", "tiny", "-n", "2", "-f", file).out == cli("run", "tiny", "-n", "2", "-p", "abc").out
    assert_refused(cli("run", "tiny", "-f", file, "-p", "x"), "--file", "--prompt")
    assert_refused(cli("run", "tiny", "-f", tmp_path / "none"), "--file", "No such file")
    file.write_bytes(b"\xff")
    assert_refused(cli("run", "tiny", "-f", file), "--file", "not UTF-8 at byte 0")


def test_cells_of_the_context(cli: Cli) -> None:
    assert cli("run", "tiny", "-n", "4", "-c", "1024").code == 0
    outcome = cli("run", "tiny", "-n", "600", "-c", "256")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == "ggml-npu: context of 256 cells is full"


@pytest.mark.slow
def test_verbose_shows_the_log_of_llama_cpp() -> None:
    outcome = fresh("run", "tiny", "-n", "1", "--verbose")
    assert outcome.code == 0
    assert "llama_context" in outcome.err


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


@pytest.mark.slow
def test_what_the_plugin_takes_to_be_asked_is_told() -> None:
    outcome = fresh("plugin")
    assert Path(outcome.out.strip()).is_file()
    (line,) = outcome.err.splitlines()
    assert "llama-cli, llama-server and llama-completion" in line
    assert "-dev NPU" in line


def test_what_test_needs(cli: Cli) -> None:
    assert_refused(cli("test"), "-o")
