"""The process of a command is started before the command is imported, and only used if it has what a new one has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kit.commands import fresh
from threadpoolctl import threadpool_info

from graph_runner.process import start
from graph_runner.process.child import begun as child
from graph_runner.process.start import DIFF, Started, ahead, started


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """The process that is started ahead for a diff."""
    monkeypatch.setattr(sys, "argv", ["ggml-npu", "diff", "tiny"])
    monkeypatch.setattr(start, "environment", lambda: os.environ | {"PYTEST_CURRENT_TEST": ""})  # that changes now
    ahead()
    (process,) = start._ahead
    yield process
    start._give_up_all()


def test_a_command_has_the_process_that_was_started_ahead(begun: Started) -> None:
    assert started(DIFF) is begun
    assert begun.process.poll() is None
    begun.give_up()


@pytest.mark.parametrize("what", ["environment", "module", "stdout"])
def test_a_process_that_lacks_something_is_ended(begun: Started, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "graph_runner.trace" if what == "module" else DIFF
    if what == "environment":
        monkeypatch.setenv("GGML_NPU_DEVICE_FILE", "torch")  # as --device-file does
    kept, (read, write) = os.dup(1), os.pipe()
    if what == "stdout":  # as --json - does
        os.dup2(write, 1)
    try:
        other = started(module)
    finally:
        os.dup2(kept, 1)
        for each in (kept, read, write):
            os.close(each)
    try:
        assert other is not begun
        assert begun.process.poll() is not None
    finally:
        other.give_up()


@pytest.mark.parametrize("words", [["run", "tiny"], ["diff", "tiny", "--in-process"], ["diff", "--help"], []])
def test_commands_without_a_child_start_none(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ggml-npu", *words])
    ahead()
    assert not start._ahead


def test_a_process_that_cannot_be_started_ahead_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(sys, "argv", ["ggml-npu", "diff", "tiny"])
    monkeypatch.setattr(subprocess, "Popen", refused)
    ahead()
    assert not start._ahead
    with pytest.raises(BlockingIOError):
        started(DIFF)


def _blas_threads(send: object, trail: object) -> list[int]:
    """A job: how many threads each BLAS of its process has."""
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_numpy_multiplies_with_one_thread_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    with child(DIFF) as process:
        assert set(process.run(_blas_threads, receive=print, node_timeout=60)) == {1}


@pytest.mark.slow
def test_a_command_that_is_refused_leaves_no_process_and_says_one_line() -> None:
    found = fresh("diff", "nofile.gguf")
    assert (found.code, found.err.count("\n")) == (2, 1)
