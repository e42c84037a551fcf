"""What only a whole program does wrong is said of the nodes of the smallest program that does it."""

from __future__ import annotations

import re

import pytest
from kit.diffs import FLASH_OFF, PROMPT
from kit.models import Models
from kit.programs_that_err import PROGRAMS, LeavesOutTheLastAdd, Programs

from ggml_backend_npu.device.backend import DeviceBackend
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.reports.diff_report import diff_json


def run(model: Models, device: Programs) -> DiffResult:
    return diff(model("llama"), PROMPT, DiffOptions(steps=2, settings=FLASH_OFF, backend=DeviceBackend(device)))


def some() -> list[object]:
    """Groups of 2, 8 and 64 nodes find it, or only the end of the run does."""
    soon = LeavesOutTheLastAdd, 4
    every = [(device, most) for device in PROGRAMS for most in (1, 4, 20, 45)]
    return [each if each == soon else pytest.param(*each, marks=pytest.mark.slow) for each in every]


@pytest.mark.slow
@pytest.mark.daily(5)
@pytest.mark.parametrize(("device", "most"), some())
def test_the_first_and_the_last_of_several_nodes_are_named(device: type[Programs], most: int, model: Models) -> None:
    result = run(model, device(most))
    assert not result
    (wrong,) = result.wrong
    assert wrong.failure is not None
    assert wrong.failure.startswith("one of these nodes gives other bytes when nodes run together")
    found = re.match(r"step (\d+) node (\d+): |the begin of step (\d+)", wrong.since)
    assert found, wrong
    step, first = int(found[1] or found[3]), int(found[2] or 0)
    assert step == wrong.step
    assert first < wrong.index
    among = [node.op for node in result.nodes if node.step == step and first <= node.index <= wrong.index]
    assert device.op in among
    said = diff_json(result)["nodes"][-1]
    assert said["since"] == wrong.since
