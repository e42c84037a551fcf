"""Other places of a ggml: packages, libraries and programs, what the doctor says of them, and traces of what they hand
to the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from ggml_backend_npu.ggml import elf, lib, places
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import BadInputError
from graph_runner.tools import examination
from graph_runner.tools.suites import TESTS, build
from graph_runner.trace import NPU, read_trace, replay

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("no-such-package", "no such package is installed, and no library has this path"),
        ("/nowhere/libggml.so", "no such file"),
        ("numpy", "none of its libraries exports ggml's functions"),
    ],
)
def test_where_there_is_no_ggml(where: str, reason: str) -> None:
    with pytest.raises(places.PlaceError) as refused:
        places.library_of(where)
    assert str(refused.value).startswith(f"into={where!r}: {reason}")


def test_a_library_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "libggml.so").write_bytes(b"no library")
    with pytest.raises(places.PlaceError, match="cannot be loaded"):
        places.library_of(tmp_path / "libggml.so")
    (libm,) = [file for file in places.loaded() if file.name.startswith("libm.so")]
    with pytest.raises(places.PlaceError, match="does not export ggml's functions"):
        places.library_of(libm)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["llama_cpp", "llama-cpp-python", "llama_cpp_python"])
def test_a_package_by_any_of_its_names(backend: Plugin, name: str) -> None:
    assert lib.Ggml(places.library_of(name)).cpu_file == backend.ggml.cpu_file


@pytest.mark.slow
def test_the_packages_that_have_a_ggml() -> None:
    assert "llama_cpp_python" in places.packages()
    assert "numpy" not in places.packages()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A library with the ggml of llama-cpp-python, in another folder."""
    for name in ("libggml.so.0", "libggml-base.so.0", "libggml-cpu.so.0"):
        (tmp_path / name).write_bytes((LIBRARIES / name).read_bytes())
    return tmp_path / "libggml.so.0"


def printed(code: str) -> list[str]:
    """The lines that a Python program prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()


@pytest.mark.slow
def test_a_process_has_one_ggml(copied: Path) -> None:
    code = f"""
import ctypes
ctypes.CDLL({str(copied)!r})
import ggml_backend_npu
from ggml_backend_npu.ggml.places import PlaceError
first = ggml_backend_npu.register(into={str(copied)!r})
assert ggml_backend_npu.register(into={str(copied)!r}) is first is ggml_backend_npu.register()
print(first.ggml.cpu_file)
try:
    ggml_backend_npu.register(into={str(LIBRARIES / "libllama.so")!r})
except PlaceError as error:
    print(error)
"""
    file, reason = printed(code)
    assert Path(file).parent == copied.parent
    assert "this process ha" in reason


@pytest.mark.slow
def test_a_library_that_another_one_stands_in_for(copied: Path) -> None:
    code = f"""
import ggml_backend_npu
try:
    ggml_backend_npu.register(into={str(copied)!r})
except ggml_backend_npu.ggml.places.PlaceError as error:
    print(error)
"""
    (reason,) = printed(code)
    assert reason.endswith("which stands in for its own: load it before ggml_backend_npu is imported")


# the doctor


@pytest.mark.slow
def test_the_doctor_on_this_environment(backend: Plugin) -> None:
    found = {each.where: each for each in examination.examined([])}
    assert found["llama_cpp_python"].fits
    assert found["llama_cpp_python"].version == backend.ggml.version
    assert found["llama_cpp_python"].advice == "ggml_backend_npu.register()"


@pytest.mark.slow
def test_the_doctor_on_files(tmp_path: Path) -> None:
    library = LIBRARIES / "libggml.so"
    found = examination.examined([library, Path(sys.executable)])[-2:]
    assert found[0].advice == f'ggml_backend_npu.register(into="{library}")'
    assert (found[1].fits, found[1].advice) == (False, examination._STATIC)
    with pytest.raises(BadInputError, match="no such file"):
        examination.examined([tmp_path / "nothing"])


@pytest.mark.slow
def test_the_doctor_on_a_program_that_runs(backend: Plugin) -> None:
    (found,) = examination.examined([], os.getpid())
    assert found.fits
    assert found.version == backend.ggml.version
    with pytest.raises(BadInputError, match="--pid 99999999"):
        examination.examined([], 99999999)


def test_a_library_that_crashes_is_a_line(tmp_path: Path) -> None:
    source = "__attribute__((constructor)) static void end(void) { __builtin_trap(); }"
    library = tmp_path / "libcrash.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    found = examination._examined("a library", str(library), "")
    assert not found.fits
    assert found.advice.startswith("ends the process that loads it")


# traces of any program

PROGRAM = """
import numpy as np
import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder

plugin = ggml_backend_npu.register()
with Builder(plugin.ggml, "NPU") as build:
    x, ids = build.tensor("q8_0", (64, 10)), build.tensor("i32", (3,))
    rows = build.op("get_rows", x, ids)
    copied = build.op("cont", build.permute(rows, (1, 0, 2, 3)))
    build.set(x, np.arange(build.nbytes(x), dtype=np.uint8) % 60)
    build.set(ids, np.array([1, 5, 5], np.int32))
    for _ in range(2):
        assert build.compute(copied) == 0
print(dict(plugin.statistics.computed))
"""


@pytest.mark.slow
def test_what_a_program_hands_over_is_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.gguf"
    environment = {**os.environ, "GGML_NPU_CAPTURE": str(trace)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "{'GET_ROWS': 2, 'CONT': 2}\n"
    assert done.stderr.splitlines()[-1].startswith("ggml-npu: 4 nodes, ")
    found = read_trace(trace)
    assert found.origin.device == NPU
    assert [(each.step, each.index, each.node.op) for each in found] == [
        (0, 0, "GET_ROWS"), (0, 1, "CONT"), (1, 0, "GET_ROWS"), (1, 1, "CONT"),
    ]  # fmt: skip
    result = replay(trace)
    assert result
    assert result.device == "CPU"
    assert replay(trace, "NPU")


@pytest.mark.slow
def test_a_trace_of_some_nodes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.gguf"
    environment = {**os.environ, "GGML_NPU_CAPTURE": str(trace), "GGML_NPU_CAPTURE_NODES": "1:CONT"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, check=True, timeout=300)
    assert [(each.step, each.node.op) for each in read_trace(trace)] == [(1, "CONT")]


@pytest.mark.slow
def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    environment = {**os.environ, "GGML_NPU_CAPTURE": str(tmp_path / "nowhere" / "trace.gguf")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode
    assert "no such directory" in done.stderr.splitlines()[-1]


OF_C = """
#include <stdio.h>
const char * ggml_version(void);
void ggml_backend_load_all(void);
int main(void) { ggml_backend_load_all(); puts(ggml_version()); return 0; }
"""


def built(folder: Path, text: str, *options: object) -> Path:
    """A program made of C."""
    (folder / "program.c").write_text(text)
    program = folder / "program"
    subprocess.run(["gcc", folder / "program.c", "-o", program, *map(str, options)], check=True)
    return program


@pytest.mark.daily(2)
@pytest.mark.slow
def test_the_doctor_on_programs_with_their_libraries_beside_them(
    backend: Plugin, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = copied.parent, copied.name
    linked = [f"-L{folder}", f"-l:{name}", "-l:libggml-base.so.0", "-Wl,--allow-shlib-undefined"]
    program = built(folder, OF_C, *linked, "-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for given in (program, Path("program")):
        found = examination.examined([given])[-1]
        assert (found.fits, found.version) == (True, backend.ggml.version)
        assert found.advice == f'GGML_BACKEND_PATH="$(ggml-npu plugin)" {program}'
    program = built(folder, OF_C, *linked)
    found = examination.examined([program])[-1]
    assert (found.fits, found.version) == (True, backend.ggml.version)
    assert found.advice.startswith(f'LD_LIBRARY_PATH="{folder}" GGML_BACKEND_PATH=')
    copied.unlink()
    found = examination.examined([program])[-1]
    assert (found.fits, found.advice) == (False, f"{name} is not found: LD_LIBRARY_PATH has to name its folder")


@pytest.mark.slow
def test_the_doctor_looks_into_a_program_that_exports_ggml(tmp_path: Path) -> None:
    names = ("ggml_backend_register", "ggml_version")
    text = "".join(f"const char * {name}(void) {{ return 0; }}\n" for name in names) + "int main(void) { return 0; }\n"
    hidden = built(tmp_path, text, "-pie", "-fPIE")
    assert not elf.exports(hidden, names[0])
    assert examination.examined([hidden])[-1].advice == examination._STATIC
    program = built(tmp_path, text, "-rdynamic", "-pie", "-fPIE")
    assert elf.exports(program, names[0])
    assert not elf.exports(program, "ggml_backend_load_all")
    assert not elf.exports(Path(__file__), names[0])
    found = examination.examined([program])[-1]
    assert not found.fits
    assert "no function ggml_" in found.advice
    fixed = built(tmp_path, text, "-rdynamic", "-no-pie")
    found = examination.examined([fixed])[-1]
    assert found.fits
    assert "when it starts" in found.advice


@pytest.mark.conformance
@pytest.mark.parametrize("program", TESTS.names)
def test_the_doctor_on_ggmls_own_programs(backend: Plugin, program: str) -> None:
    found = examination.examined([build() / program])[-1]
    assert (found.fits, found.version) == (True, backend.ggml.version)
