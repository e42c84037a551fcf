"""Kernels are compiled once: by whichever process is first, or by each where nothing can be kept."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.kept import FEW, ended, started

from graph_runner.judging import promises
from quant.kernels import cache

ROOT = Path(__file__).resolve().parents[2]
COMPILING = "ggml-npu: compiling kernels not used before; "

WHERE = "from quant.kernels.cache import cache_directory; print(cache_directory().name)"
ALL = """
import gc, sys
import ggml_backend_npu
from graph_runner.run import session
from quant.kernels.jit import CFunction

ggml_backend_npu.register()
kernels = [each for each in gc.get_objects() if isinstance(each, CFunction)]
print(*sorted({each._function.__name__ for each in kernels if each.address}))
"""
TEXT = """
import sys
from graph_runner.cli import main
sys.argv = ["ggml-npu", "run", "tiny", "-n", "2", "--all"]
main()
"""


def kept(folder: Path) -> dict[str, int]:
    """The files in a folder, with the time at which each was written."""
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def beside_the_sources() -> list[Path]:
    """Kernels where numba keeps them by itself, which does not notice that a part of one has changed."""
    return [*ROOT.rglob("__pycache__/*.nbi")]


def compiled_by_two(code: str, cache: Path) -> str:
    """What two processes print that begin at once, and a third one that comes later and compiles nothing."""
    processes = [started(code, NUMBA_CACHE_DIR=cache) for _ in range(2)]
    results = [ended(process) for process in processes]
    files = kept(cache)
    (folder,) = (path for path in cache.iterdir() if path.name != "kernels-processors")
    for output, notes in results:
        assert output == results[0][0]
        assert notes in ([], [f"{COMPILING}kept in {folder}"])
    assert any(notes for _, notes in results)
    assert ended(started(code, NUMBA_CACHE_DIR=cache)) == (results[0][0], [])
    assert kept(cache) == files
    return results[0][0]


KERNELS = ("quant.kernels.jit", "quant.kernels.late")


def modules(name: str) -> list[str]:
    """The file of a module of ours by its dotted name, and of each package that it is in."""
    path = ROOT.joinpath(*name.split("."))
    packages = [each / "__init__.py" for each in (path, *path.parents) if each != ROOT and each.is_relative_to(ROOT)]
    return [str(each.relative_to(ROOT)) for each in (path.with_suffix(".py"), *packages) if each.is_file()]


def imported(path: Path) -> set[str]:
    """Files of ours that a module imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {file for name in names if name.startswith(cache.PACKAGES) for file in modules(name)}


def parts_of_kernels() -> list[str]:
    """Modules that hold kernels, and all that these import, and so on."""
    files = [path for package in cache.PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if any(name in path.read_text() for name in KERNELS)}
    while new := {file for each in found for file in imported(ROOT / each)} - found:
        found |= new
    return sorted(found)


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages, to be edited."""
    folder = tmp_path_factory.mktemp("copied")
    for package in (*cache.PACKAGES, "graph_runner"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edited(copied: Path, part: str, *packages: str) -> str:
    """The digest of a copy of the packages in which one module has a byte more."""
    data = (copied / part).read_bytes()
    (copied / part).write_bytes(data + b"#")
    digest = cache.sources.__wrapped__(*packages, root=copied)
    (copied / part).write_bytes(data)
    return str(digest)


@pytest.mark.slow
@pytest.mark.daily(3)
def test_an_edit_of_whatever_a_kernel_imports_makes_another_folder(copied: Path) -> None:
    parts = parts_of_kernels()
    wanted = {
        "quant/kernels/vectors.py",
        "ggml_backend_npu/ops/kernels/recurrent.py",
        "ggml_backend_npu/ggml/structs.py",
    }
    assert wanted | {"ggml_backend_npu/ggml/layouts/ggml_0_25.py"} <= {*parts}
    whole = cache.sources.__wrapped__(*cache.PACKAGES, root=copied)
    assert whole == cache.sources(*cache.PACKAGES)
    digests = {edited(copied, part, *cache.PACKAGES) for part in parts}
    assert len({whole, *digests}) == len(parts) + 1


def test_an_edit_of_what_measures_promises_forgets_them(
    copied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "libggml-cpu.so"
    file.touch()
    ggml: Any = SimpleNamespace(version="1", cpu_file=file)
    names = {promises._identity.__wrapped__(ggml)}
    for part in ("graph_runner/judging/promises.py", "graph_runner/judging/compare.py", "quant/kernels/vectors.py"):
        monkeypatch.setattr(promises, "sources", lambda *packages, part=part: edited(copied, part, *packages))
        names.add(promises._identity.__wrapped__(ggml))
    assert len(names) == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", ["quant/kernels/vectors.py", "ggml_backend_npu/ggml/layouts/ggml_0_25.py"])
def test_a_process_of_edited_sources_has_another_folder(copied: Path, part: str) -> None:
    before = ended(started(WHERE, PYTHONPATH=copied))
    with (copied / part).open("a") as file:
        file.write("#")
    assert ended(started(WHERE, PYTHONPATH=copied)) != before


@pytest.mark.slow
def test_two_processes_compile_at_once_and_a_third_one_nothing(tmp_path: Path) -> None:
    assert compiled_by_two(FEW, tmp_path / "cache") == "True True"


@pytest.mark.slow
@pytest.mark.daily(3)
def test_every_kernel_is_compiled_once(tmp_path: Path) -> None:
    compiled = compiled_by_two(ALL, tmp_path / "cache")
    assert {"walk", "transpose", "graph_compute", "softmax", "_count_node"} <= {*compiled.split()}


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("where", ["a folder that cannot be", "a file"])
def test_where_nothing_can_be_kept_kernels_are_compiled_all_the_same(tmp_path: Path, variable: str, where: str) -> None:
    file = tmp_path / "a file"
    file.touch()
    before = beside_the_sources()
    output, notes = ended(
        started(FEW, HOME="/proc/nothing", **{variable: "/proc/nothing" if "folder" in where else file})
    )
    assert output == "True True"
    assert len(notes) == 1
    assert notes[0].startswith(f"{COMPILING}not kept: ")
    assert beside_the_sources() == before


@pytest.mark.daily(4)
@pytest.mark.slow
def test_the_device_works_where_nothing_can_be_kept() -> None:
    before = beside_the_sources()
    text, notes = ended(started(TEXT, NUMBA_CACHE_DIR="/proc/nothing", HOME="/proc/nothing"))
    assert text
    assert sum(note.startswith(COMPILING) for note in notes) == 1
    assert beside_the_sources() == before
