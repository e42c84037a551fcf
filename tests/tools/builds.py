"""The default tests on other builds of ggml: other instructions, vectors, processors, another compiler.

    python tests/tools/builds.py                    what there is, and what has been built
    python tests/tools/builds.py v3 v4-256          builds these and runs the default tests with each
    python tests/tools/builds.py v3 -- -k norm      arguments after -- go to pytest

A build is made once from the sources of the installed llama-cpp-python, in two minutes, and kept in the user's cache
directory beside the installed libllama. LLAMA_CPP_LIB_PATH says which one a process has. A build for a processor with
AVX-512 is skipped on one without.
Exits with 1 where tests fail with one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from llvmlite import binding

from graph_runner.tools import suites
from quant.folders import cache_root

_HAS_AVX512 = binding.get_host_cpu_features().get("avx512f", False)
_V3, _V4 = "-march=x86-64-v3", "-march=x86-64-v4"
_BEST = _V4 if _HAS_AVX512 else _V3
_SHARED = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
    "GGML_CCACHE": "ON" if shutil.which("ccache") else "OFF",
    "GGML_NATIVE": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_TOOLS": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
_AVX512 = {"GGML_AVX512": "ON"}
_BEST_OPTIONS = _AVX512 if _HAS_AVX512 else {}

# the processor's flags, and what cmake is told besides
BUILDS: dict[str, tuple[str, dict[str, str]]] = {
    "v3": (_V3, {}),
    "v4-256": (f"{_V4} -mprefer-vector-width=256", _AVX512),
    "v4-512": (f"{_V4} -mprefer-vector-width=512", _AVX512),
    "rocketlake": (f"{_BEST} -mtune=rocketlake", _BEST_OPTIONS),
    "znver3": (f"{_BEST} -mtune=znver3", _BEST_OPTIONS),
    "skylake-avx512": (f"{_BEST} -mtune=skylake-avx512", _BEST_OPTIONS),
    "clang": (_BEST, _BEST_OPTIONS | {"CMAKE_C_COMPILER": "clang", "CMAKE_CXX_COMPILER": "clang++"}),
    "no-contraction": (f"{_BEST} -ffp-contract=off", _BEST_OPTIONS | {"CMAKE_BUILD_TYPE": "RelWithDebInfo"}),
}


def lacking(name: str) -> str:
    """What this processor lacks to run a build; "" where it lacks nothing."""
    return "AVX-512" if _V4 in BUILDS[name][0] and not _HAS_AVX512 else ""


def folder(name: str) -> Path:
    """Where a build's libraries are."""
    return cache_root() / f"builds-{version('llama-cpp-python')}" / name


def build(name: str) -> Path:
    """The folder of a build's libraries, made where it is not there. Raises SuiteError where a step fails."""
    libraries = folder(name)
    with suites.building_in(libraries.parent):
        if not libraries.is_dir():
            _make(name, libraries)
    return libraries


def _make(name: str, libraries: Path) -> None:
    flags, others = BUILDS[name]
    source, made = libraries.with_name("source"), libraries.with_name(f"{name}.build")
    if not source.is_dir():
        suites._fetch(source)
    ninja = suites._tool("ninja", "BIN_DIR")
    options = {**_SHARED, "CMAKE_C_FLAGS": flags, "CMAKE_CXX_FLAGS": flags, **others}
    arguments = [f"-D{option}={value}" for option, value in options.items()]
    cmake = suites._tool("cmake", "CMAKE_BIN_DIR")
    suites._run([cmake, "-S", source, "-B", made, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", *arguments])
    suites._run([ninja, "-C", made, "ggml"])
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    for library in Path(spec.origin).with_name("lib").glob("libllama.so*"):
        shutil.copy2(library, made / "bin")
    (made / "bin").replace(libraries)
    shutil.rmtree(made)


def main() -> int:
    """Runs the command."""
    arguments = sys.argv[1:]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names, for_pytest = arguments[:end], arguments[end + 1 :]
    unknown = [name for name in names if name not in BUILDS]
    if unknown:
        print(f"no build {unknown[0]!r}; there are: {' '.join(BUILDS)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        if lacking(name):
            print(f"{name}: skipped: this processor has no {lacking(name)}")
            continue
        environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(build(name))}
        print(f"{name}: LLAMA_CPP_LIB_PATH={folder(name)}", flush=True)
        if subprocess.run([sys.executable, "-m", "pytest", *for_pytest], env=environment, check=False).returncode:
            failed.append(name)
    if not names:
        for name, (flags, _) in BUILDS.items():
            state = f"no {lacking(name)}" if lacking(name) else "built" if folder(name).is_dir() else ""
            print(f"{name:15} {state:10} {flags}")
    if failed:
        print(f"failed: {' '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
