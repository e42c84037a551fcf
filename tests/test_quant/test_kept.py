"""What is kept between runs and is damaged: it is seen before it is used, and made anew, with a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kit.commands import fresh, process
from kit.kept import FEW, ended, started

from graph_runner.tools import suites
from quant.kernels import kept

MADE_ANEW = "made anew"


def damaged(path: Path, how: str, random: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        data[int(random.integers(0, len(data)))] ^= 1 << int(random.integers(0, 8))
        path.write_bytes(data)
    elif how == "foreign":
        path.write_bytes(b"\x80\x05not a cache" * 20)
    else:
        path.unlink()


HOW = ["cut", "empty", "flipped", "foreign", "missing"]


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("suffix", ["so", "o"])
@pytest.mark.parametrize("how", HOW)
def test_a_damaged_kernel_is_compiled_anew(tmp_path: Path, how: str, suffix: str) -> None:
    variables = {"NUMBA_CACHE_DIR": tmp_path, "CC": "cc" if suffix == "so" else "no-such-compiler"}
    expected, _ = ended(started(FEW, **variables))
    files = [*tmp_path.glob(f"*/*.{suffix}")]
    assert len(files) == 2
    for path in files:
        damaged(path, how, np.random.default_rng(0))
    output, notes = ended(started(FEW, **variables))
    assert output == expected
    assert [MADE_ANEW in note for note in notes] == [True, False] if how != "missing" else len(notes) == 1
    assert ended(started(FEW, **variables)) == (expected, [])


@pytest.mark.slow
@pytest.mark.daily(3)
def test_a_hundred_damaged_files(tmp_path: Path) -> None:
    """The next run works, and the one after it finds all whole. Of small kernels, which are soon compiled again."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = ("run", "tiny", "-n", "4", "--all")
    first = fresh(*run, env=environment)
    assert first.code == 0
    files = sorted(tmp_path.rglob("*.so"), key=lambda path: path.stat().st_size)[:12]
    random = np.random.default_rng(1)
    for number in range(9):
        for place, path in enumerate(random.permutation(np.array(files, object))):
            damaged(path, HOW[(number + place) % len(HOW)], random)
        again = fresh(*run, env=environment)
        assert (again.code, again.out) == (0, first.out), again.err
        assert "Traceback" not in again.err
        assert again.err.count(MADE_ANEW) == 1
    whole = fresh(*run, env=environment)
    assert (whole.code, whole.out) == (0, first.out)
    assert MADE_ANEW not in whole.err
    assert "compiling" not in whole.err


@pytest.mark.slow
def test_a_cache_on_a_full_disk_is_told_once(tmp_path: Path) -> None:
    code = (
        "from quant.kernels import objects\n"
        "def full(path, content): raise OSError(28, 'No space left on device')\n"
        "objects.write_sealed = full\n" + FEW
    )
    output, notes = ended(started(code, NUMBA_CACHE_DIR=tmp_path))
    assert output == "True True"
    assert sum("not kept" in note and "No space left on device" in note for note in notes) == 1
    assert len(notes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_a_damaged_plugin_is_built_anew(tmp_path: Path, how: str) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    library = Path(fresh("plugin", env=environment).out.strip())
    whole = library.read_bytes()
    damaged(library, how, np.random.default_rng(0))
    outcome = fresh("plugin", env=environment)
    assert (outcome.code, Path(outcome.out.strip())) == (0, library)
    assert (MADE_ANEW in outcome.err) == (how != "missing")
    assert len(library.read_bytes()) == len(whole)
    assert MADE_ANEW not in fresh("plugin", env=environment).err


@pytest.mark.parametrize("how", ["cut", "flipped", "missing"])
def test_damaged_programs_are_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    builds = []

    def build(programs: Path, console: object, which: suites.Programs) -> None:
        builds.append(programs)
        programs.mkdir(exist_ok=True)
        (programs / "test-backend-ops").write_bytes(b"a program")
        kept.seal(programs)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(suites, "_build", build)
    program = suites.build() / "test-backend-ops"
    damaged(program, how, np.random.default_rng(0))
    suites.build()
    assert program.read_bytes() == b"a program"
    assert MADE_ANEW in capsys.readouterr().err
    suites.build()
    assert len(builds) == 2


@pytest.mark.slow
def test_the_command_shows_and_clears_what_is_kept(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")}
    mine = tmp_path / "ggml-npu" / "mine"
    mine.mkdir(parents=True)
    node = tmp_path / "ggml-npu" / "reproducers" / "model" / "0-1-CONT.gguf"
    node.parent.mkdir(parents=True)
    node.touch()
    fresh("plugin", env=environment)
    subprocess.run([sys.executable, "-c", FEW], env=environment, check=True, capture_output=True)
    shown = fresh("cache", env=environment)
    assert shown.code == 0
    for word in (
        "compiled kernels",
        "the plugin",
        "wrong nodes of diffs",
        str(tmp_path / "kernels"),
        "of processors",
        "kept: 4",
    ):
        assert word in shown.out
    assert "deleted: 4" in fresh("cache", "--clear", env=environment).out
    assert "kept: 0" in fresh("cache", env=environment).out
    assert mine.is_dir()
    assert not node.exists()
    assert process(sys.executable, "-c", FEW, env=environment).code == 0
