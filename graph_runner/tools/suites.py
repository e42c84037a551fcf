"""ggml's own programs, built from the sources of the installed llama-cpp-python, and their results for the device.

test-backend-ops computes every case of an op on the device and on ggml's CPU and compares; test-llama-archs does so for
a model of every architecture. They know nothing of this project: they load its plugin like any other program.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from platform import machine
from typing import Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ggml_backend_npu.ggml import llama
from ggml_backend_npu.plugin.embedding import plugin
from graph_runner.base.console import Console
from graph_runner.base.endings import undone
from graph_runner.base.errors import SuiteError as SuiteError
from quant import folders
from quant.kernels import kept

_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "GGML_CCACHE": "OFF",
    "GGML_NATIVE": "OFF",
    "GGML_RPC": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_NO_AMX = " ".join(f"-mno-amx-{part}" for part in ("tile", "int8", "bf16"))  # some machines announce it and crash


@dataclass(frozen=True)
class Programs:
    """Programs of llama.cpp that are built together.

    options  of cmake
    """

    names: tuple[str, ...]
    options: Mapping[str, str]


TESTS = Programs(("test-backend-ops", "test-llama-archs", "ggml-rpc-server", "llama-completion"), _OPTIONS)
FASTEST = Programs(
    ("llama-bench", "llama-batched-bench"),
    _OPTIONS
    | {"GGML_NATIVE": "ON", "GGML_RPC": "OFF"}
    | ({"CMAKE_C_FLAGS": _NO_AMX, "CMAKE_CXX_FLAGS": _NO_AMX} if machine() == "x86_64" else {}),
)

# of the programs, test-llama-archs alone never looks for plugins
_LOAD_PLUGINS = "\nstatic const bool plugins_are_loaded = (ggml_backend_load_all(), true);\n"

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_BACKEND = re.compile(r"Backend \d+/\d+: (\w+)")
_HEADER = re.compile(r"$|Testing \d+ devices|Backend \d+/\d+: |  Skipping|  Device \w+: |load_backend: ")
_FOOTER = re.compile(r"(  )?\d+/\d+ (tests|backends) passed$|  Backend \w+: |(OK|FAIL)$|Failing tests:$|ggml_\w+: ")
_BUILDING = "building ggml's own programs, once"
_TOLD_EVERY = 10.0  # seconds between lines, if there is no terminal
_COMPILING = "ggml-npu: compiling "
_CASE = re.compile(r".*?  (\w+)\((.*)\): (OK|FAIL|not supported \[(.*)\])")
_FAILING_CASE = re.compile(r"  (\w+)\((.*)\)")
_FAILED_NODE = re.compile(r"ggml-npu: \w+ node ")
_ERROR = re.compile(r"error|assert", re.IGNORECASE)
_NOTHING = "it printed nothing"
_MODEL = re.compile(r"\| *(\S+)\|.*\| *(\S+)\| *(OK|FAIL|SKIP)[^|]*\| *(OK|FAIL|SKIP)\|")

Verdict = Literal["passed", "failed", "not supported"]


@dataclass(frozen=True)
class Case:
    """The result of a test program for one case.

    group       the op, or the model's architecture
    name        its parameters
    refused_by  devices that do not support it
    log         what was printed about it
    """

    group: str
    name: str
    verdict: Verdict
    refused_by: tuple[str, ...] = ()
    log: str = ""


def backend_ops(
    ops: Iterable[str],
    options: Mapping[str, str] | None = None,
    seen: Callable[[Case], object] = lambda case: None,
    pattern: str | None = None,
    device: str = "NPU",
    printed: Callable[[str], object] = lambda line: None,
) -> list[Case]:
    """Runs the cases of test-backend-ops for some ops on a device of the plugin.

    options  environment variables for the plugin: GGML_NPU_MEMORY, GGML_NPU_KERNELS, ...
    seen     called with each case when it is done
    pattern  a regular expression for the parameters of cases; all if omitted
    printed  called with each line that is neither the program's nor the plugin's: kernels print it

    Raises SuiteError if the programs cannot be built, the plugin was not loaded or the program crashed.
    """
    cases: list[Case] = []
    log: list[str] = []
    failing: list[tuple[str, str]] = []
    loaded = False
    verbose = {**(options or {}), "GGML_NPU_VERBOSE": "1"}  # why a case is refused
    chosen = ["-o", ",".join(ops)] + ([] if pattern is None else ["-p", pattern])
    for line in _with_plugin("test-backend-ops", ["test", "-b", device, *chosen], verbose):
        loaded = loaded or ((backend := _BACKEND.fullmatch(line)) is not None and backend[1] == device)
        log += [] if _HEADER.match(line) else [line]
        if found := _CASE.match(line):
            cases.append(_case(found, log))
            seen(cases[-1])
            log = []
        elif found := _FAILING_CASE.fullmatch(line):
            failing.append((found[1], found[2]))
        elif not _HEADER.match(line) and not _FOOTER.match(line) and not line.startswith("ggml-npu: "):
            printed(line)
    if not loaded:
        raise SuiteError(f"test-backend-ops has no device {device}")
    # a case that ends before it is computed, for want of memory, has no line of its own
    told = {(case.group, case.name) for case in cases if case.verdict == "failed"}
    return cases + [Case(*case, "failed", log=f"{case[0]}({case[1]}): FAIL") for case in failing if case not in told]


def _case(found: re.Match[str], log: list[str]) -> Case:
    op, parameters, result, devices = found.groups()
    text = "\n".join(line.strip() for line in log)
    if devices and not any(_FAILED_NODE.match(line) for line in log):
        return Case(op, parameters, "not supported", tuple(devices.split(", ")), text)
    # ggml compares bytes alone: a node that failed may have left the right ones
    failed = result != "OK" or any(_FAILED_NODE.match(line) for line in log)
    return Case(op, parameters, "failed" if failed else "passed", log=text)


def architectures(options: Mapping[str, str] | None = None) -> list[Case]:
    """Runs every model of test-llama-archs on the NPU as a GPU: its results against the CPU's, and saving and loading
    it.

    options  environment variables for the plugin

    Raises SuiteError if the programs cannot be built, the plugin was not loaded or the program crashed.
    """
    verdicts: dict[str, Verdict] = {"OK": "passed", "FAIL": "failed", "SKIP": "not supported"}
    arguments = ["-b", "NPU", "-s", "1"]
    lines = _with_plugin("test-llama-archs", arguments, {"GGML_NPU_DEVICE_TYPE": "gpu", **(options or {})})
    cases = []
    for line in lines:
        if found := _MODEL.match(line):
            result = "FAIL" if "FAIL" in found.groups() else found[3]
            cases.append(Case(found[1], found[2], verdicts[result], log=line))
    if not cases:
        raise SuiteError("test-llama-archs has no device NPU")
    return cases


def support(devices: Iterable[str], libraries: Iterable[Path] = ()) -> str:
    """Returns which cases of test-backend-ops each device supports, as CSV: what ggml's docs/ops is written from.

    devices    by ggml's names: of the NPU's plugin, of ggml itself, or of one of the libraries
    libraries  of backends

    Raises SuiteError if the programs cannot be built, or for a device that test-backend-ops does not have: it asks no
    RPC server.
    """
    rows: list[str] = []
    for device in devices:
        arguments = ["support", "--output", "csv", "-b", device]
        for library in (plugin(), *libraries):
            environment = {"GGML_BACKEND_PATH": str(library), "GGML_NO_BACKTRACE": "1", "GGML_NPU_OPS": "all"}
            lines = printed_by([build() / "test-backend-ops", *arguments], environment, ends=(0, 1))
            header, *found = [line for line in lines if line.startswith('"')]
            if found:
                break
        else:
            raise SuiteError(f"test-backend-ops has no device {device!r}")
        rows += found if rows else [header, *found]
    return "\n".join(rows) + "\n"


def _with_plugin(program: str, arguments: Sequence[str], options: Mapping[str, str] | None) -> Iterator[str]:
    """Yields the lines that a program prints with the plugin. Raises SuiteError if it crashed or does not have the
    device.

    The plugin's message that it compiles kernels may come in the middle of a line: it is left out.
    """
    begun = ""
    environment = {"GGML_BACKEND_PATH": str(plugin()), "GGML_NO_BACKTRACE": "1", **(options or {})}
    for line in printed_by([build() / program, *arguments], environment, ends=(0, 1)):
        if line.startswith("ggml-npu: no device NPU"):
            raise SuiteError(line.removeprefix("ggml-npu: "))
        before, compiling, _ = line.partition(_COMPILING)
        begun += before
        if not compiling:
            yield begun
            begun = ""


# building


def folder(programs: Programs = TESTS) -> Path:
    """Returns the folder for programs that fit the installed llama-cpp-python; they are there after `build`. Raises
    FolderError for a user without a home."""
    made_of = hashlib.sha256(repr((programs.names, programs.options, _LOAD_PLUGINS)).encode()).hexdigest()[:8]
    return folders.cache_root() / f"programs-{llama.version()}-{made_of}" / "bin"


def build(console: Console | None = None, programs: Programs = TESTS) -> Path:
    """Returns the folder of llama.cpp's programs. They are built at the first call and kept in the user's cache
    directory.

    A second process that needs them meanwhile waits. Raises SuiteError if a step fails, or if nothing can be kept.
    """
    try:
        home = folders.kept(folder(programs).parent) / folder(programs).name
    except folders.FolderError as error:
        raise SuiteError(f"ggml's programs cannot be kept: {error}") from None
    if kept.damage(home) is not None:
        with building_in(home.parent):
            wrong = kept.damage(home)
            if wrong is not None:
                if home.exists():
                    kept.say_damaged(f"ggml's programs in {home}: {wrong}")
                _build(home, console or Console(stderr=True), programs)
    return home


@contextmanager
def building_in(folder: Path) -> Iterator[None]:
    """Creates a folder if needed and locks it, so that no other process builds in it: waits until the lock is free."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(home: Path, console: Console, programs: Programs = TESTS) -> None:
    cmake, ninja = _tool("cmake", "CMAKE_BIN_DIR"), _tool("ninja", "BIN_DIR")
    console.print(f"{_BUILDING}, some 4 minutes; kept in {home}", highlight=False, soft_wrap=True)
    source, built = home.with_name("source"), home.with_name("build")
    if not source.is_dir():
        with console.status("fetching their sources"):
            _fetch(source)
    options = [f"-D{name}={value}" for name, value in programs.options.items()]
    with console.status("configuring"):
        _run([cmake, "-S", source, "-B", built, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options])
    with Progress(
        TextColumn("building"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("building", total=None)
        told = time.monotonic()
        for line in printed_by([ninja, "-C", built, *programs.names]):
            if step := re.match(r"\[(\d+)/(\d+)\]", line):
                progress.update(task, completed=int(step[1]), total=int(step[2]))
                if not console.is_terminal and time.monotonic() - told > _TOLD_EVERY:
                    console.print(f"{_BUILDING}: step {step[1]} of {step[2]}", highlight=False)
                    told = time.monotonic()
    kept.seal(built / "bin")
    shutil.rmtree(home, ignore_errors=True)
    (built / "bin").replace(home)
    shutil.rmtree(source)
    shutil.rmtree(built)


def _fetch(source: Path) -> None:
    """Downloads llama.cpp's sources from the sdist of the installed llama-cpp-python."""
    package = "llama-cpp-python"
    with folders.temporary_folder(source.parent) as here:
        options = ["--no-deps", "--no-binary", package, "--dest", str(here)]  # not :all:, which builds cmake as well
        _run([sys.executable, "-P", "-m", "pip", "download", *options, f"{package}=={llama.version()}"])
        (archive,) = here.glob("*.tar.gz")
        with tarfile.open(archive) as sdist:
            sdist.extractall(here, filter="data")
        (found,) = here.glob("*/vendor/llama.cpp")
        with open(found / "tests" / "test-llama-archs.cpp", "a") as program:
            program.write(_LOAD_PLUGINS)
        rpc = found / "tools" / "rpc" / "CMakeLists.txt"
        rpc.write_text(rpc.read_text().replace("(TARGET rpc-server)", "(TARGET ggml-rpc-server)"))  # its older name
        found.replace(source)


def _tool(package: str, folder: str) -> Path:
    """Returns the program that a PyPI package provides."""
    try:
        return Path(getattr(importlib.import_module(package), folder), package)
    except ImportError:
        raise SuiteError(f"ggml's programs are built with {package}: pip install {package}") from None


def _run(command: Sequence[str | Path]) -> None:
    for _ in printed_by(command):
        pass


def printed_by(
    command: Sequence[str | Path], environment: Mapping[str, str] | None = None, ends: tuple[int, ...] = (0,)
) -> Iterator[str]:
    """Yields what a command prints, on both streams, without colours. Raises SuiteError for an exit code not in
    `ends`."""
    told = _NOTHING
    with subprocess.Popen(
        command, env={**os.environ, **(environment or {})}, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process, undone(process.kill):  # fmt: skip
        for raw in process.stdout or ():
            line = _COLOURS.sub("", raw).rstrip()
            told = _more_telling(told, line)
            yield line
        process.wait()
    if process.returncode not in ends:
        raise _ended(command, process.returncode, told)


def output_of(command: Sequence[str | Path]) -> list[str]:
    """Returns the lines that a command writes to its standard output, which no line of its other stream interrupts.
    Raises SuiteError if it ends with an error."""
    done = subprocess.run(
        command, text=True, errors="replace", stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode:
        lines = _COLOURS.sub("", done.stdout + done.stderr).splitlines()
        raise _ended(command, done.returncode, reduce(_more_telling, lines, _NOTHING))
    return done.stdout.splitlines()


def _more_telling(told: str, line: str) -> str:
    """Returns the line of two that says more of an end: an error, or else the later one with text."""
    return line if _ERROR.search(line) or (line and not _ERROR.search(told)) else told


def _ended(command: Sequence[str | Path], code: int, told: str) -> SuiteError:
    return SuiteError(f"{Path(command[0]).name} ended with {code}: {told.strip()}")
