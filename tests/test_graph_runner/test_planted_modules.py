"""Python files beside a model or a trace are not run, whatever they are called; and other processes import what this
one imports."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.commands import fresh
from kit.every_command import COMMANDS, Files

import graph_runner
from graph_runner.cli.app import COMMANDS as KNOWN
from graph_runner.process.child import begun

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "numpy", "quant", "re", "copy", "json", "pickle", "typing", "dataclasses", "numba", "llvmlite",
    "graph_runner", "ggml_backend_npu", "llama_cpp", "gguf", "cffi", "greenlet", "threadpoolctl", "rich", "typer",
    "jinja2", "xxhash", "sitecustomize", "usercustomize", "pip", "readline", "encodings", "os", "site", "random",
    "struct", "ggml_npu", "_cffi_backend", "matplotlib", "scipy", "yaml", "kernels_copy",
)  # fmt: skip
FIRST = ["replay"]


def planted(folder: Path) -> Path:
    """Modules that write their name into a file when they are run. Returns that file."""
    told = folder / "ran"
    for name in NAMES:
        text = f"open({str(told)!r}, 'a').write('{name} ')\nraise SystemExit('{name} of the current folder')\n"
        if not (folder / f"{name}.py").exists():
            (folder / f"{name}.py").write_text(text)
    return told


def test_the_table_has_every_command() -> None:
    assert COMMANDS.keys() == {*KNOWN}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Files of each kind, a kernel file called copy.py among them, and modules beside them."""
    made = Files.within(tmp_path_factory.mktemp("planted"))
    for command in ("capture", "record"):
        assert fresh(*made.line(command), env=made.environment).code == 0
    planted(made.model.parent)
    return made


@pytest.mark.daily(3)
@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in COMMANDS],
)
def test_no_command_runs_modules_of_the_current_folder(files: Files, command: str) -> None:
    environment = {name: value for name, value in files.environment.items() if name != "PYTHONSAFEPATH"}
    folder = files.model.parent
    outcome = fresh(*files.line(command), env=environment, cwd=folder)
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert outcome.code == COMMANDS[command].code, outcome.err
    assert "Traceback" not in outcome.err


def test_a_child_imports_what_its_parent_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of modules that the parent has is one of the child's; the current folder is not."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "only_here.py").write_text(
        "import graph_runner\n\ndef job(send, trail):\n    return graph_runner.__file__\n"
    )
    told = planted(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "before"))
    with begun("json") as child:
        job = importlib.import_module("only_here").job
        assert child.run(job, receive=print, node_timeout=60) == graph_runner.__file__
    assert not told.exists()


@pytest.mark.slow
def test_the_module_starts_without_the_current_folder(files: Files) -> None:
    """python -m has the current folder in front. What the command imports is not looked for there."""
    folder = files.model.parent
    line = [sys.executable, "-m", "graph_runner", "ops"]
    environment = {name: value for name, value in files.environment.items() if name != "PYTHONSAFEPATH"}
    names = ["numba", "llvmlite", "quant", "llama_cpp", "gguf", "rich", "typer"]
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in names:
        (elsewhere / f"{name}.py").write_text("raise SystemExit('of the current folder')")
    done = subprocess.run(line, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_python_is_started_without_the_current_folder() -> None:
    """-P stands with each sys.executable that is a command."""
    for package in ("quant", "ggml_backend_npu", "graph_runner"):
        for path in (ROOT / package).rglob("*.py"):
            for call in re.findall(r"\[\s*sys\.executable[^\]]*\]", path.read_text()):
                assert '"-P"' in call, f"{path}: {call}"


@pytest.mark.slow
def test_a_kernel_file_has_a_name_of_its_own(files: Files) -> None:
    """copy.py is loaded by its path, and is not the module copy, even in the current folder."""
    done = fresh("diff", "tiny", "-n", "0", "--kernels", "copy.py", env=files.environment, cwd=files.kernels.parent)
    assert done.code == 0, done.err
    assert "kernels of copy.py: CONT (replaced)" in done.err
