"""Right devices are blamed for nothing, whatever their bytes depend on; what is wrong only together is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kit.diffs import FLASH_OFF, FLASH_ON, PROMPT
from kit.models import WRITERS
from kit.right_devices import DEVICES, KERNELS, Fusing, kernel, wrong_devices
from kit.support import choose

from ggml_backend_npu import default_backend
from ggml_backend_npu.device.backend import DeviceBackend
from graph_runner.base import tiny
from graph_runner.diff.run import diff
from graph_runner.judging.results import OWN_RUN, Verdict
from graph_runner.judging.rules import Rules

Files = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("as_before")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A model by name: one of WRITERS, with float matrices where the name says so."""
    folder = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            with pytest.MonkeyPatch.context() as patch:
                if name.endswith("f32"):
                    patch.setattr(tiny, "F16", tiny.F32)
                WRITERS[name.removesuffix(" f32")](path)
        return path

    return find


@pytest.mark.some(2)
@pytest.mark.parametrize("model", ["llama f32", "llama"])
@pytest.mark.parametrize("name", DEVICES)
def test_a_device_that_fuses_is_right(file: Files, name: str, model: str) -> None:
    right = DEVICES[name]
    device = right.device()
    result = diff(
        file(model), PROMPT, steps=1, settings=FLASH_OFF, backend=DeviceBackend(device), rules=Rules(right.tolerances),
        repeat=3 if "f32" in model else 1,
    )  # fmt: skip
    assert result, (result.wrong[:1], result.ending)
    assert device.n_fused
    assert {node.on for node in result.nodes} == {"NPU"}


def test_what_differs_together_is_told(file: Files) -> None:
    device = DeviceBackend(Fusing("RMS_NORM MUL"))
    result = diff(file("llama f32"), PROMPT, steps=0, settings=FLASH_OFF, backend=device)
    assert result
    (remark,) = result.remarks
    assert "gives other bytes when nodes run together, not one by one, within rounding" in remark


@pytest.mark.some(1)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("repeat", [1, 3])
@pytest.mark.parametrize(("ops", "tolerances"), [("all", None), ("default", None), ("all", "gpu")])
def test_a_kernel_that_adds_up_otherwise_is_right(
    file: Files, name: str, repeat: int, ops: str, tolerances: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, ops=ops)
    settings = FLASH_ON if "attention" in name else FLASH_OFF
    with default_backend().ops.having(kernel(name)):
        result = diff(
            file("llama f32"), PROMPT, steps=1, settings=settings, repeat=repeat, rules=Rules(tolerances)
        )  # fmt: skip
    assert result, (result.wrong[:1], result.ending)
    by_chance = "random" in name or "atomics" in name
    assert any("is not the same each time" in remark for remark in result.remarks) == by_chance


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [name for name, _ in wrong_devices()])
def test_what_is_wrong_only_where_nodes_run_together_is_found(file: Files, name: str) -> None:
    device = dict(wrong_devices())[name]
    result = diff(file("llama f32"), PROMPT, steps=1, settings=FLASH_OFF, backend=DeviceBackend(device))
    assert not result
    (wrong,) = result.wrong
    assert (wrong.step, wrong.verdict, wrong.wrong_in) == (0, Verdict.FAILED, OWN_RUN)
    assert (
        wrong.failure
        == "one of these nodes gives other bytes when nodes run together, not one by one; which is not known"
    )
