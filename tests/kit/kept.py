"""Processes whose cache of compiled kernels is where a test says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FEW = """
from quant.kernels import threads
print(threads._run.address > 0, threads._take_chunks.address > 0)
"""


def started(code: str, **variables: str | Path) -> subprocess.Popen[str]:
    """A Python whose cache of kernels is where the variables say."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """What it printed, and the lines on stderr."""
    output, notes = process.communicate(timeout=600)
    assert process.returncode == 0, notes
    return output.strip(), notes.splitlines()
