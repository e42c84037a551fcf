"""Faults of a device's memory are found, and the method that errs is named; right memory is right."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from kit.commands import fresh
from kit.memory_faults import IN_A_DIFF, IN_BATTERY
from kit.models import Models

from ggml_backend_npu import Backend, Options
from ggml_backend_npu.device.backend import DeviceBackend
from ggml_backend_npu.device.sim import Simulator
from ggml_backend_npu.ggml import lib
from graph_runner.diff.run import DiffOptions, DiffResult, run_in_step
from graph_runner.judging.results import Fate
from graph_runner.reports.diff_report import diff_json
from graph_runner.tools.battery import BatteryResult, run_battery

SOON = {"OutSeldomStale", "FillIgnored", "CopySeldomIgnored", "QueuedCopyIgnored", "AllocGivesTheSameTwice"}
SOON_IN_A_DIFF = {"InOneBitAtLoad", "OutShifted", "FillIgnored"}


def some(faults: Iterable[str], soon: set[str]) -> list[object]:
    return [name if name in soon else pytest.param(name, marks=pytest.mark.slow) for name in faults]


def battery(*devices: Simulator) -> BatteryResult:
    return run_battery(lib.ggml(), [DeviceBackend(device) for device in devices], lambda text: None)[0]


def diff(device: Simulator, model: Models, steps: int = 1) -> DiffResult:
    """A diff with the same canaries each time: how often memory is read decides which reading a seldom fault is in."""
    options = DiffOptions(steps=steps, backend=DeviceBackend(device), canary=7)
    return run_in_step(model("llama"), "The capital", options)


@pytest.mark.some(1)
@pytest.mark.daily(12)
@pytest.mark.parametrize("name", some(IN_BATTERY, SOON))
def test_the_battery_names_the_method(name: str) -> None:
    made, methods = IN_BATTERY[name]
    found = battery(made())
    assert {each.method for each in found.faults} & methods, found.faults[:5]
    assert [str(each) for each in found.faults if each.method not in methods] == []


@pytest.mark.some(1)
@pytest.mark.daily(9)
@pytest.mark.parametrize("name", some(IN_A_DIFF, SOON_IN_A_DIFF))
def test_a_diff_names_the_method_and_no_kernel(name: str, model: Models) -> None:
    made, methods = IN_A_DIFF[name]
    result = diff(made(), model)
    assert not result
    assert {each.method for each in result.faults} & methods, (result.faults[:5], result.wrong[:2])
    assert [str(each) for each in result.faults if each.method not in methods] == []
    said = diff_json(result)
    assert said["verdict"].startswith("wrong: the memory of the device errs: ")
    assert not result.wrong


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_memory_does_not_hold_is_not_judged(model: Models) -> None:
    device = IN_A_DIFF["InBeyondRepair"][0]()
    result, right = diff(device, model, steps=0), diff(Simulator(memory=1 << 28), model, steps=0)
    assert sum(right.fates.values()) == right.fates[Fate.JUDGED] > 40
    assert 0 < result.fates[Fate.JUDGED] < right.fates[Fate.JUDGED], "it errs in the run"
    assert result.fates.total() == right.fates.total()
    assert {node.not_judged for node in result.not_judged} == {
        f"the memory of the device errs: {device_errs}" for device_errs in [result.stopped]
    }


def test_there_are_many_kinds_of_faults() -> None:
    assert len(IN_BATTERY) >= 40
    assert len(IN_A_DIFF) >= 20


@pytest.mark.parametrize("delay", [0.0, pytest.param(1e-3, marks=pytest.mark.slow)])
def test_right_memory_is_right(delay: float) -> None:
    device = Simulator(delay=delay, memory=1 << 28)
    found = battery(device)
    assert found.faults == []
    assert found.n_checks > 2000
    assert device.n_buffers == 0


@pytest.mark.slow
def test_two_devices_of_a_kind_are_right() -> None:
    found = run_battery(
        lib.ggml(), [DeviceBackend(Simulator(f"XNPU{i}", delay=1e-4, memory=1 << 28)) for i in range(2)], lambda _: None
    )
    assert [each.faults for each in found] == [[], []]


def test_memory_of_this_projects_own_is_right() -> None:
    npu = Backend("NPU of the battery", options=Options(memory="device", memory_limit=1 << 28))
    assert run_battery(lib.ggml(), [npu], lambda text: None)[0].faults == []


@pytest.mark.slow
def test_a_diff_of_right_memory_finds_nothing(model: Models) -> None:
    device = Simulator(delay=1e-4)
    assert diff(device, model, steps=2).faults == []
    assert device.n_buffers == 0


DEVICE = """
from ggml_backend_npu import register
from ggml_backend_npu.device.sim import Simulator

class Short(Simulator):
    def copy_in(self, handle, offset, data):
        super().copy_in(handle, offset, data[: max(1, data.size - 3)])

register(Short(memory=1 << 28))
"""


@pytest.mark.slow
@pytest.mark.daily(2)
def test_the_command_says_method_buffer_offset_and_size(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(DEVICE)
    done = fresh("test", "--memory", "--device-file", path)
    assert done.code == 1
    said = "copy_in of 257 bytes at offset 0 of buffer 1 of 257 bytes: 3 bytes are wrong, at offset 254 to 256"
    assert said in done.out
    assert done.out.splitlines()[-1].startswith("wrong: copy_in")
