"""The wheel and the sdist hold what they should, and a foreign package of one of our names is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("quant", "ggml_backend_npu", "graph_runner")
NO_SOURCES = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")


def files(*folders: str) -> set[str]:
    """Files of the tree, but for what Python and tools left there."""
    found = {path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, made from a copy of the tree."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, folder / "tree", ignore=NO_SOURCES)
    shutil.copytree(ROOT / ".ci", folder / "tree" / ".ci")
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder / "tree"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("dist-info/METADATA"))).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    sources = {name for name in files(*PACKAGES) if not name.endswith("README.md")}
    assert inside == sources | {"ggml_npu.py"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= inside
    assert {f"graph_runner/reports/templates/diff.{kind}" for kind in ("css", "html.j2", "js")} <= inside
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: MIT" in metadata


def test_the_sdist_holds_sources_tests_examples_and_docs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    pages = {path.name for path in ROOT.glob("*.md")}
    assert files(*PACKAGES, "examples", "docs", "tests") | pages <= names
    assert {"LICENSE", "CITATION.cff", "pyproject.toml", "ggml_npu.py", "mkdocs.yml", ".ci/run"} <= names
    assert not [name for name in names if name.endswith((".pyc", ".gguf"))]


@pytest.mark.daily(3)
@pytest.mark.slow
def test_the_core_installs_without_a_compiler_and_says_what_is_missing(built: Path, tmp_path: Path) -> None:
    """In a fresh environment, with nothing else on PATH, from wheels alone."""
    (wheel,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "v"], check=True)
    environment = {"PATH": str(tmp_path / "v" / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HOME"))}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "v" / "bin" / str(words[0])), *map(str, words[1:])]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
        return subprocess.run(command, env=environment, cwd=tmp_path, **options)

    done = run("pip", "install", "--quiet", "--only-binary", ":all:", wheel)
    if "No matching distribution" in done.stderr:
        pytest.skip("pip finds no packages here")
    assert done.returncode == 0, done.stderr
    assert run("python", "-c", "import quant, ggml_backend_npu").returncode == 0
    assert run("ggml-npu", "ops").stdout.startswith("op ")
    missing = run("ggml-npu", "run", "tiny")
    assert missing.returncode == 2
    assert missing.stderr == "ggml-npu: llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'\n"
    assert run("ggml-npu", "plugin").stderr.startswith("ggml-npu: plugin: no C compiler is installed")
    assert run("ggml-npu", "doctor").stderr.startswith("ggml-npu: no package here has a ggml: pip install")


@pytest.mark.parametrize("package", ["quant", "graph_runner"])
def test_a_foreign_package_of_our_name_is_named(tmp_path: Path, package: str) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemExit('it was imported')\n")
    done = run_behind(tmp_path, "import ggml_npu; ggml_npu.main()")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ggml-npu: package {package!r} at {str(tmp_path)!r}"[:-1])
    assert done.stderr.count("\n") == 1


def test_the_library_names_it_too(tmp_path: Path) -> None:
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "__init__.py").touch()
    done = run_behind(tmp_path, "import ggml_backend_npu")
    assert "ImportError: package 'quant' at " in done.stderr


def run_behind(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with a folder that comes before ours in sys.path."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
