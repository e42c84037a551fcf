"""The examples run, and do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("generate.py", "nodes on the NPU"),
        ("diff_model.py", "right within rounding: "),
        ("find_a_bug.py", "CONT ignores the strides from nb[1] on of src0"),
    ],
)
def test_an_example_runs(name: str, says: str) -> None:
    command = [sys.executable, EXAMPLES / name, "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
