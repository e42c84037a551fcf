"""A device of which a call never returns: the diff ends within the limit and names the call."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.commands import Outcome, fresh, strict_json

HANGS = """
import time
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator

class Hanging(Simulator):
    n = 0

    def {method}(self, *arguments):
        Hanging.n += 1
        if Hanging.n >= {first}:
            {hangs}
        return super().{method}(*arguments)

register(Hanging())
"""
SLEEPS, DEADLOCKS = "time.sleep(1000)", "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
LIMIT = 2


def diff(tmp_path: Path, method: str, first: int, hangs: str = SLEEPS) -> Outcome:
    file = tmp_path / "hanging.py"
    file.write_text(HANGS.format(method=method, first=first, hangs=hangs))
    options = ["--all", "-n", 1, "--device-file", file, "--reproducers", tmp_path, "--node-timeout", LIMIT]
    return fresh("diff", "tiny", *options, "--json", "-")


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("method", ["open", "alloc", "copy_in", "fill", "refusal"])
def test_while_a_model_is_loaded(tmp_path: Path, method: str) -> None:
    outcome = diff(tmp_path, method, 1)
    assert outcome.code == 2
    (line,) = outcome.err.splitlines()
    assert f"XNPU0: {method}" in line
    assert f"was not done after {LIMIT} s (--node-timeout)" in line


@pytest.mark.daily(2)
@pytest.mark.slow
@pytest.mark.parametrize("hangs", [SLEEPS, DEADLOCKS], ids=["sleeps", "deadlocks"])
@pytest.mark.parametrize(("method", "first"), [("copy_out_async", 2)])
def test_between_nodes(tmp_path: Path, method: str, first: int, hangs: str) -> None:
    outcome = diff(tmp_path, method, first, hangs)
    assert outcome.code == 1, outcome.err
    result = strict_json(outcome.out)
    said = f"XNPU0: {method}"
    assert said in result["stopped"]
    assert f"was not done after {LIMIT} s (--node-timeout)" in result["stopped"]
    assert said in result["verdict"]
    assert result["first_introduced"] is None, "no node is to blame"


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("method", "first"), [("compile", 3), ("copy_out", 400), ("synchronize", 5), ("free", 1), ("copy_in", 40)]
)
def test_in_a_node(tmp_path: Path, method: str, first: int) -> None:
    outcome = diff(tmp_path, method, first)
    assert outcome.code == 1, outcome.err
    result = strict_json(outcome.out)
    failure = result["nodes"][result["first_introduced"]]["failure"]
    assert f"XNPU0: {method}" in failure
    assert f"was not done after {LIMIT} s (--node-timeout)" in failure
