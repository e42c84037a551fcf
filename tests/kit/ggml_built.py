"""Libraries of ggml's backends, built by CMake and ninja from the source of the installed llama-cpp-python."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tools.layouts import sources

from graph_runner.tools import suites

_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_BACKEND_DL": "ON",  # ggml's own programs load it by GGML_BACKEND_PATH
    "GGML_BUILD_EXAMPLES": "OFF",
    "GGML_BUILD_TESTS": "OFF",
    "GGML_CCACHE": "OFF",
    "GGML_NATIVE": "OFF",
}
# a project of its own: ggml alone wants files that llama.cpp's copy has not
_PROJECT = 'cmake_minimum_required(VERSION 3.19)\nproject({} C CXX)\nadd_subdirectory("{}" ggml)\n'


def kept(home: Path, backend: str, options: Mapping[str, str | Path]) -> Path:
    """A backend's library in a folder, built if it is not there; the folder is `suites.building_in` by this process.
    Raises SuiteError if a step fails.

    backend  "vulkan" of libggml-vulkan.so
    options  of CMake, besides those of all
    """
    library = home / f"libggml-{backend}.so"
    if not library.is_file():
        shutil.copy2(_built(home / "build", backend, options), library.with_suffix(".new"))
        library.with_suffix(".new").replace(library)
        shutil.rmtree(home / "build")
    return library


def _built(made: Path, backend: str, options: Mapping[str, str | Path]) -> Path:
    made.mkdir(exist_ok=True)
    (made / "CMakeLists.txt").write_text(_PROJECT.format(backend, sources(version("llama-cpp-python"))))
    every = {**_OPTIONS, f"GGML_{backend.upper()}": "ON", **options}
    ninja, cmake = suites._tool("ninja", "BIN_DIR"), suites._tool("cmake", "CMAKE_BIN_DIR")
    given = [f"-D{option}={value}" for option, value in every.items()]
    suites._run([cmake, "-S", made, "-B", made, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *given])
    suites._run([ninja, "-C", made, f"ggml-{backend}"])
    return next(made.glob(f"**/libggml-{backend}.so"))
