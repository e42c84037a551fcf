"""Limits of the machine are never a verdict on a node, and each computation of a node has the time of one."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.commands import COMMAND, Outcome, kernel_file, process, strict_json

from ggml_backend_npu import KernelError, Node, default_backend
from graph_runner.base import limits
from graph_runner.base.errors import LimitError
from graph_runner.base.limits import Outside
from graph_runner.judging.results import failure_of
from graph_runner.run.session import Settings
from graph_runner.trace import CaptureOptions, capture, replay

KERNEL = """
import os, time
import numpy as np
from ggml_backend_npu import op
from ggml_backend_npu.ops import OWN

@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst, a, b):
    OWN["MUL"].define(dst, a, b)
    {does}
"""
BURNS = "end = time.process_time() + 2\n    while time.process_time() < end: pass"
NEEDS = "kept = [np.empty(1 << 27, np.uint8) for _ in range(64)]"
SLEEPS = "time.sleep(0.4)"


def limited(limit: str, folder: Path, does: str, *arguments: object) -> Outcome:
    """The command under a limit of the shell's, with a kernel of MUL that does something beside."""
    kernels = kernel_file(folder, KERNEL.format(does=does))
    return process("sh", "-c", f'{limit}; exec "$@"', "sh", COMMAND, *arguments, "--kernels", kernels)


@pytest.fixture(scope="module")
def trace(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two MULs of the tiny model."""
    path = tmp_path_factory.mktemp("trace") / "mul.gguf"
    chosen: list[int] = []

    def select(step: int, index: int, node: Node) -> bool:
        chosen.extend([index] if node.op == "MUL" and len(chosen) < 2 else [])
        return index in chosen

    capture(tiny, "a", path, CaptureOptions(steps=0, settings=Settings(flash_attention="off"), select=select))
    return path


# CPU time and memory


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("limit", "does", "said"),
    [
        ("ulimit -t 8", BURNS, "no more CPU time: ulimit -t 8 (s)"),
        ("ulimit -S -t 8", BURNS, "no more CPU time: ulimit -t 8 (s)"),
        ("ulimit -v 6000000", NEEDS, "no more memory: ulimit -v 6000000 (KiB)"),
        ("ulimit -d 5000000", NEEDS, "no more memory: ulimit -d 5000000 (KiB)"),
    ],
)
@pytest.mark.parametrize("command", ["diff", "replay"])
def test_a_limit_of_the_machine_is_told_in_a_line(
    tmp_path: Path, trace: Path, command: str, limit: str, does: str, said: str
) -> None:
    arguments = ["diff", "tiny", "-n", 1, "--reproducers", tmp_path] if command == "diff" else ["replay", trace]
    if command == "replay":
        arguments += ["--repeat", 8]
    outcome = limited(limit, tmp_path, does, *arguments)
    assert outcome.code == 2, outcome.out + outcome.err
    assert outcome.out == ""
    assert said in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    "error", [MemoryError("no more"), KernelError("MUL node 'x': MemoryError")], ids=["as it is", "as a plan tells it"]
)
@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_memory_that_a_process_is_not_given_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception, limit: int
) -> None:
    if isinstance(error, KernelError):
        error.__cause__ = MemoryError()
    assert "MemoryError" in failure_of(error)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 30 if which == limit else -1, -1))
    with pytest.raises(LimitError, match=r"no more memory: ulimit -[vd] 1048576"):
        failure_of(error)
    assert "ValueError" in failure_of(ValueError("x"))


def test_who_was_killed_without_a_limit_was_killed_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = Outside()
    for number in (signal.SIGKILL, signal.SIGSEGV, -3, 0):
        outside.refuse(number)
    with pytest.raises(LimitError, match="CPU time"):
        outside.refuse(signal.SIGXCPU)
    monkeypatch.setattr(limits, "_killed_for_memory", lambda: 1 << 40)
    with pytest.raises(LimitError, match="the system has killed"):
        outside.refuse(signal.SIGKILL)
    outside.refuse(signal.SIGSEGV)


# the time of a node


def test_each_computation_of_a_replay_has_its_own_clock(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    backend = default_backend()
    right = type(backend).compute_graph

    def compute_graph(self: Any, graph: Any) -> None:
        told.append("computes")
        right(self, graph)

    monkeypatch.setattr(type(backend), "compute_graph", compute_graph)
    assert replay(trace, repeat=3, about_to=lambda how, *_: told.append(how))
    assert len(told) > 3 * 2 * 3
    assert told == ["isolated", "computes", ""] * (len(told) // 3)


@pytest.mark.slow
def test_a_right_node_that_is_repeated_is_in_time(tmp_path: Path, trace: Path) -> None:
    outcome = limited("true", tmp_path, SLEEPS, "replay", trace, "--repeat", 3, "--node-timeout", 2)
    assert outcome.code == 0, outcome


# copies of the process


@pytest.mark.slow
@pytest.mark.parametrize("does", ["os.fork()", "os.fork() and os.fork()"])
def test_a_fork_in_a_kernel_counts_no_node_twice(tmp_path: Path, does: str) -> None:
    counts = []
    for kernel in ("pass", does):
        arguments = ["diff", "tiny", "-n", 1, "--reproducers", tmp_path, "--json", "-"]
        outcome = limited("true", tmp_path, kernel, *arguments)
        assert outcome.code == 0, outcome.err
        nodes = strict_json(outcome.out)["nodes"]
        counts.append(len(nodes))
        assert len({(node["step"], node["index"], node["op"]) for node in nodes}) == len(nodes)
    assert counts[0] == counts[1]
