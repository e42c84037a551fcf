"""Finds the ggml libraries of an environment, and whether the device can go into them: what `ggml-npu doctor`
prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ggml_backend_npu.ggml import elf, places
from ggml_backend_npu.user_texts import no_file
from graph_runner.base.endings import temporary_folder
from graph_runner.base.errors import BadInputError
from graph_runner.base.python import environment, python

_PLUGIN = 'GGML_BACKEND_PATH="$(ggml-npu plugin)"'
_STATIC = (
    "its ggml, if it has one, is linked statically: build it with -DBUILD_SHARED_LIBS=ON, or link it with -rdynamic"
)
_TIMEOUT = 120
_CHILD = """
import ctypes, sys
if sys.argv[1].startswith("/"):
    try:
        ctypes.CDLL(sys.argv[1])
    except OSError:
        pass
from ggml_backend_npu.ggml.doctor import main
main()
"""
_REGISTERS = "ggml_backend_register"


@dataclass(frozen=True)
class Examined:
    """A place that may have a ggml.

    advice  what to type, or why the device cannot go in
    """

    where: str
    version: str
    layout: str
    fits: bool
    advice: str


def examined(files: Sequence[Path], pid: int | None = None) -> list[Examined]:
    """Examines the packages of this environment, then files: libraries, or programs by the libraries that they load. If
    pid is given, only that running process. Raises BadInputError if a file or process does not exist or cannot be
    read."""
    if pid is not None:
        return [_running(pid)]
    found = [_examined(name, name, _for_package(name)) for name in places.packages()]
    return found + [_file(file) for file in files]


def _for_package(name: str) -> str:
    into = "" if name.replace("-", "_").lower() == "llama_cpp_python" else f'into="{name}"'
    return f"ggml_backend_npu.register({into})"


def _file(given: Path) -> Examined:
    """Examines a library or a program, by its path or by its name on PATH."""
    file = given if given.exists() or len(given.parts) > 1 else Path(shutil.which(given) or given)
    if not file.is_file():
        raise BadInputError(f"{str(file)!r}: {no_file(file)}")
    if ".so" in file.name:
        return _examined(str(file), str(file.resolve()), f'ggml_backend_npu.register(into="{file}")')
    start = f"{_PLUGIN} {file}"
    if elf.exports(file, _REGISTERS):
        return _program(str(file), [file], start)
    done = subprocess.run(["ldd", file], capture_output=True, text=True, errors="surrogateescape", check=False)
    needed = [line.strip().partition(" => ") for line in done.stdout.splitlines()]
    libraries = [Path(where.split(" (")[0]) for _, _, where in needed if where.startswith("/")]
    lost = [file.resolve().with_name(name) for name, _, where in needed if where == "not found" and "ggml" in name]
    for library in lost:
        if not library.is_file():
            reason = f"{library.name} is not found: LD_LIBRARY_PATH has to name its folder"
            return Examined(str(file), "", "", False, reason)
    if lost:
        start = f'LD_LIBRARY_PATH="{lost[0].parent}" {start}'
    return _program(str(file), [*libraries, *lost], start)


def _running(pid: int) -> Examined:
    try:
        libraries = places.loaded(pid)
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError as error:
        raise BadInputError(f"--pid {pid}: {error.strerror}") from None
    return _program(f"{name} ({pid})", libraries, f"{_PLUGIN} {name}, started anew")


def _program(where: str, libraries: Sequence[Path], advice: str) -> Examined:
    """Examines a program by the libraries that it loads: the one that has the function to register backends."""
    for library in libraries:
        if not elf.exports(library, _REGISTERS):
            continue
        if ".so" in library.name:
            return _examined(where, str(library), advice)
        with temporary_folder() as folder:  # the program itself
            if elf.as_library(library, folder / "program.so"):
                return _examined(where, str(folder / "program.so"), advice)
        return Examined(where, "", "", True, f"{advice}  (it exports ggml; its layouts are compared when it starts)")
    return Examined(where, "", "", False, _STATIC)


def _examined(where: str, target: str, advice: str) -> Examined:
    found = _asked(target)
    refused = found.get("refused")
    layout = ", ".join(found.get("layout", ()))
    if refused is None and not found["known"]:
        advice += "  (a version that was not tried; its layouts fit)"
    return Examined(where, found.get("version", ""), layout, refused is None, refused or advice)


def _asked(target: str) -> dict[str, Any]:
    """Asks another process, so that a library that crashes does not end this one. There the library is loaded before
    this project's own ggml, which would stand in for parts of it; what it needs may lie beside it."""
    beside = [str(Path(target).parent)] if Path(target).is_absolute() else []
    folders = os.pathsep.join([*beside, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    found = environment(**({"LD_LIBRARY_PATH": folders} if folders else {}))
    try:
        done = subprocess.run(
            python("-c", _CHILD, target), env=found, capture_output=True, text=True, errors="replace",
            timeout=_TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"refused": f"did not answer within {_TIMEOUT} seconds"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = done.stderr.strip().splitlines()
        return {"refused": f"ends the process that loads it ({told[-1] if told else done.returncode})"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer
