"""More than one machine: ggml's own RPC engine serves the device, on loopback. Part of pytest -m conformance."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.backends import served

from graph_runner.base.models import demo_file
from graph_runner.tools.suites import build

pytestmark = pytest.mark.conformance

TELLING = """
import sys
from ggml_backend_npu import default_backend, op

ours = default_backend().ops["GET_ROWS"]

@op("GET_ROWS", types=ours.types, refuse=ours.refuse)
def telling(dst, src, ids):
    print("GET_ROWS on the NPU", file=sys.stderr, flush=True)
    ours.define(dst, src, ids)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with the NPU: its address, and what it prints."""
    kernels, log = tmp_path / "telling.py", tmp_path / "log"
    kernels.write_text(TELLING)
    with served(log, "NPU", GGML_NPU_KERNELS=str(kernels)) as (address, process):
        yield address, log
        assert process.poll() is None, "the server lives"


def text(*devices: str) -> str:
    """What llama-completion writes."""
    options = ["-nr", "-fa", "on", "-no-cnv", "--no-display-prompt", "-n", "24", "--temp", "0", "-ngl", "99"]
    command: list[str | Path] = [
        build() / "llama-completion",
        "-m",
        demo_file(),
        "-p",
        "The capital of France is",
        *options,
        *devices,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_client_writes_the_same_text_over_rpc_as_alone(server: tuple[str, Path]) -> None:
    address, log = server
    assert text("--rpc", address, "-dev", "RPC0") == text("-dev", "none")
    assert "GET_ROWS on the NPU" in log.read_text()
