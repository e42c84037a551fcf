"""Right devices are blamed for nothing, whatever their bytes depend on; what is wrong only together is found."""

from __future__ import annotations

import pytest
from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT
from kit.models import Models
from kit.right_devices import DEVICES, KERNELS, Fusing, kernel, wrong_devices
from kit.support import choose

from ggml_backend_npu import default_backend
from ggml_backend_npu.device.backend import DeviceBackend
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.judging.results import OWN_RUN, Verdict
from graph_runner.judging.rules import Rules

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("weights", ["llama f32", "llama"])
@pytest.mark.parametrize("name", DEVICES)
def test_a_device_that_fuses_is_right(model: Models, name: str, weights: str) -> None:
    right = DEVICES[name]
    device = right.device()
    options = DiffOptions(
        steps=1, settings=FLASH_OFF, backend=DeviceBackend(device), rules=Rules(right.tolerances),
        repeat=3 if "f32" in weights else 1,
    )  # fmt: skip
    result = diff(model(weights), PROMPT, options)
    assert result, (result.wrong[:1], result.ending)
    assert device.n_fused
    assert result.device == device.name
    assert {node.on for node in result.nodes} == {device.name}


@pytest.mark.slow
@pytest.mark.daily(2)
def test_what_differs_together_is_told(model: Models) -> None:
    device = DeviceBackend(Fusing("RMS_NORM MUL"))
    result = diff(model("llama f32"), PROMPT, DiffOptions(steps=0, settings=FLASH_OFF, backend=device))
    assert result
    (remark,) = result.remarks
    assert "gives other bytes when nodes run together, not one by one, within rounding" in remark


@pytest.mark.slow
@pytest.mark.daily(3)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize(("ops", "tolerances"), [("all", None), ("default", None), ("all", "gpu")])
def test_a_kernel_that_adds_up_otherwise_is_right(
    model: Models, name: str, repeat: int, ops: str, tolerances: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops=ops)
    settings = FLASH_ON if "attention" in name else FLASH_OFF
    with default_backend().ops.having(kernel(*KERNELS[name])):
        options = DiffOptions(steps=1, settings=settings, repeat=repeat, rules=Rules(tolerances))
        result = diff(model("llama f32"), PROMPT, options)
    assert result, (result.wrong[:1], result.ending)
    by_chance = "random" in name or "atomics" in name
    assert any("is not the same each time" in remark for remark in result.remarks) == by_chance


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in wrong_devices()])
def test_what_is_wrong_only_where_nodes_run_together_is_found(model: Models, name: str) -> None:
    device = dict(wrong_devices())[name]
    result = diff(model("llama f32"), PROMPT, DiffOptions(steps=1, settings=FLASH_OFF, backend=DeviceBackend(device)))
    assert not result
    (wrong,) = result.wrong
    assert (wrong.step, wrong.verdict, wrong.wrong_in) == (0, Verdict.FAILED, OWN_RUN)
    assert (
        wrong.failure
        == "one of these nodes gives other bytes when nodes run together, not one by one; which is not known"
    )
