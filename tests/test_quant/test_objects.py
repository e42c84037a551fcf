"""Compiled kernels are files that need no numba: a shared object each, or what LLVM loads where none can be made."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit.kept import FEW, ended, started

from quant.kernels.objects import SYMBOL

LOADED = FEW + "import sys\nprint(*(name in sys.modules for name in ('numba', 'llvmlite')))\n"


def kept(folder: Path, suffix: str) -> list[Path]:
    return sorted(folder.glob(f"kernels-*/*.{suffix}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "suffix", "loaded"),
    [("cc", "so", "False False"), ("no-such-compiler", "o", "False True"), ("false", "o", "False True")],
)
def test_what_a_later_process_loads(tmp_path: Path, compiler: str, suffix: str, loaded: str) -> None:
    """Without a linker, or with one that fails, LLVM: never numba."""
    variables: dict[str, str | Path] = {"NUMBA_CACHE_DIR": tmp_path, "CC": compiler}
    assert ended(started(LOADED, **variables))[0] == "True True\nTrue True"
    assert len(kept(tmp_path, suffix)) == len(kept(tmp_path, "*o")) == 2
    assert ended(started(LOADED, **variables)) == (f"True True\n{loaded}", [])


@pytest.mark.slow
def test_a_shared_object_needs_the_c_library_alone(tmp_path: Path) -> None:
    ended(started(FEW, NUMBA_CACHE_DIR=tmp_path))
    for path in kept(tmp_path, "so"):
        words: list[str | Path] = ["nm", "-D", "--format=posix", path]
        lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
        names = {kind: [line.split()[0] for line in lines if line.split()[1] == kind] for kind in "TU"}
        assert SYMBOL in names["T"]
        of_c = {"malloc", "free", "memset", "memcpy", "memmove", "clock_gettime", "sched_yield"}
        assert {name.split("@")[0] for name in names["U"]} <= of_c
