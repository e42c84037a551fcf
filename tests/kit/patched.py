"""Builds of ggml that are others: private structs shuffled, or as llama.cpp's pull request 23671 makes them; and faults
of ggml's CPU, with libllama beside them.

Of the ggml that the newest version of tests/tools/layouts.py has; ggml alone, in some minutes for the first, and some
seconds for each other one. Kept in the user's cache directory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tools.layouts import VERSIONS, api_3, sources

from graph_runner.tools import suites
from quant.folders import cache_root

Change = Callable[[str, str], str]  # of a file, by name: its text -> another
_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_BUILD_EXAMPLES": "OFF",
    "GGML_BUILD_TESTS": "OFF",
    "GGML_CCACHE": "ON" if shutil.which("ccache") else "OFF",
}
_PROJECT = "cmake_minimum_required(VERSION 3.14)\nproject(patched C CXX)\nadd_subdirectory(source)\n"


def _swapped(name: str, text: str, *, a: str, b: str) -> str:
    """Two slots in each other's place: where a table is declared, and wherever one is filled."""
    lines = text.splitlines(keepends=True)
    for mark in (r"\(\*\s*{}\s*\)", r"/\* \.{}\s*= \*/"):
        places = {slot: [i for i, line in enumerate(lines) if re.search(mark.format(slot), line)] for slot in (a, b)}
        for first, second in zip(places[a], places[b], strict=True):
            lines[first], lines[second] = lines[second], lines[first]
    return "".join(lines)


def _to_come(name: str, text: str) -> str:
    """What the pull request makes of the tables."""
    if name == "ggml-backend-impl.h":
        return api_3(text)
    for slot, added in {"alloc_buffer": "alloc_buffer_n", "get_alloc_size": "get_alloc_size_n"}.items():
        text = re.sub(rf"(.*/\* \.{slot}\s*= \*/.*\n)", rf"\1/* .{added} = */ NULL,\n", text)
    return text


# the last slot of each pair is the one that a probe comes to first
SHUFFLED: dict[str, Change] = {
    "ggml_backend_reg": partial(_swapped, a="get_device_count", b="get_device"),
    "ggml_backend_device": partial(_swapped, a="get_props", b="init_backend"),
    "ggml_backend": partial(_swapped, a="graph_plan_compute", b="graph_compute"),
    "ggml_backend_buffer_type": partial(_swapped, a="alloc_buffer", b="get_alignment"),
    "ggml_backend_buffer": partial(_swapped, a="set_tensor", b="get_tensor"),
}
TO_COME: dict[str, Change] = {"api_3": _to_come}


def _in_function(name: str, text: str, *, file: str, function: str, old: str, new: str) -> str:
    """A function of a file with what matches `old` as `new`, once or more often."""
    if name != file:
        return text
    begin = re.search(rf"^[^\n;]*\b{function}\([^;{{]*\{{\n", text, re.MULTILINE)
    assert begin is not None, function
    end = text.index("\n}", begin.end())
    body, n = re.subn(old, new, text[begin.end() : end])
    assert n, function
    return text[: begin.end()] + body + text[end:]


_STARTS, _SWIGLU = r"\A", {"file": "ops.cpp", "function": "ggml_compute_forward_swiglu_f32"}
WRONG: dict[str, Change] = {
    "stride": partial(
        _in_function, file="ops.cpp", function="ggml_compute_forward_dup_bytes",
        old=r"(?<=src0->data \+ )i01\*nb01 \+ i02\*nb02 (?=\+ i03\*nb03;)", new="i01*rs + i02*rs*ne01 ",
    ),
    "scale": partial(
        _in_function, file="quants.c", function="quantize_row_q8_0", old=r"(?<=maxScalar / 127)\.f", new=".5f"
    ),
    "crash": partial(_in_function, **_SWIGLU, old=_STARTS, new="*(volatile int *) 8 = 0;\n"),
    "hang": partial(_in_function, **_SWIGLU, old=_STARTS, new="for (volatile int i = 0; i < 1; ) {}\n"),
}  # fmt: skip


def build(name: str) -> Path:
    """The folder of a build's libraries, made where it is not there. Raises SuiteError where a step fails."""
    home = cache_root() / f"patched-{VERSIONS[-1]}"
    with suites.building_in(home):
        if not (home / name).is_dir():
            _make(name, home)
    return home / name


def _make(name: str, home: Path) -> None:
    libraries, source, made = home / name, home / "source", home / "build"
    original, change = sources(VERSIONS[-1]), (SHUFFLED | TO_COME | WRONG)[name]
    if not made.is_dir():
        shutil.copytree(original, source, dirs_exist_ok=True)
        # a project of its own: ggml alone wants files that llama.cpp's copy has not
        (home / "CMakeLists.txt").write_text(_PROJECT)
        options = [f"-D{option}={value}" for option, value in _OPTIONS.items()]
        ninja = suites._tool("ninja", "BIN_DIR")
        cmake = suites._tool("cmake", "CMAKE_BIN_DIR")
        suites._run([cmake, "-S", home, "-B", made, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *options])
    for file in [
        original / "src" / "ggml-backend-impl.h",
        *original.glob("src/*.cpp"),
        *original.glob("src/ggml-cpu/**/*.cpp"),
        original / "src" / "ggml-cpu" / "arch" / "x86" / "quants.c",
    ]:
        copy, text = source / file.relative_to(original), change(file.name, file.read_text())
        if copy.read_text() != text:
            copy.write_text(text)
    suites._run([suites._tool("ninja", "BIN_DIR"), "-C", made, "ggml"])
    libraries.with_suffix(".new").mkdir(exist_ok=True)
    for library in made.glob("**/*.so*"):
        shutil.copy2(library, libraries.with_suffix(".new"), follow_symlinks=True)
    if name in WRONG:  # a whole llama.cpp, but for what it does not need
        spec = find_spec("llama_cpp")
        assert spec is not None
        assert spec.origin is not None
        for library in Path(spec.origin).with_name("lib").glob("libllama.so*"):
            shutil.copy2(library, libraries.with_suffix(".new"))
    libraries.with_suffix(".new").replace(libraries)


def run(code: str, libraries: Path) -> subprocess.CompletedProcess[str]:
    """A Python program that has the ggml of a build, as LIBRARY, before it has any other."""
    head = f"import ctypes\nLIBRARY = {str(libraries / 'libggml.so')!r}\nctypes.CDLL(LIBRARY)\n"
    command = [sys.executable, "-c", head + code]
    return subprocess.run(
        command, env={**os.environ, "GGML_NO_BACKTRACE": "1"}, capture_output=True, text=True, timeout=300
    )
