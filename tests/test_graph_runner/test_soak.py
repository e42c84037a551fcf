"""A tenth of the soak: python -m graph_runner.bench.soak runs all of it, in some minutes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graph_runner.bench.soak import Held


@pytest.mark.daily(3)
@pytest.mark.slow
def test_the_process_keeps_its_size_and_the_text_is_the_cpus() -> None:
    command = [sys.executable, "-m", "graph_runner.bench.soak", "0.1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_not_constant_is_seen() -> None:
    held = Held([900, 1000, *[1000] * 18], [8] * 20, [3] * 20)
    assert held.is_constant
    assert not Held([*held.pages[:-1], 1011], held.files, held.threads).is_constant
    assert not Held(held.pages, [*held.files[:-1], 9], held.threads).is_constant
    for last in 2, 4:
        assert not Held(held.pages, held.files, [*held.threads[:-1], last]).is_constant
    assert Held(held.pages, held.files, [2, *held.threads[1:]]).is_constant
