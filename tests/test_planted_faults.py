"""Every fault of the corpus fails a diff, at the node that is known to be the first wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from planted import ISOLATED, MODELS, PROMPT, Fault, Place, known, loaded, shows

from ggml_backend_npu import DEVICE
from ggml_backend_npu.abi.plugin import Plugin
from graph_runner.diff import DiffResult, diff
from graph_runner.trace import replay

Files = Callable[[str], Path]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Finds the file of a model by name; it is written when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else MODELS[name](path)

    return find


@pytest.fixture(autouse=True)
def as_before(backend: Plugin) -> Iterator[None]:
    """Plans with planted kernels are gone after the test; what kernels do to numbers warns nobody."""
    with np.errstate(all="ignore"):
        yield
    backend.forget_plans()


@pytest.mark.parametrize("fault", ISOLATED, ids=str)
def test_a_kernel_is_wrong_where_it_is_said_to_be(file: Files, fault: Fault) -> None:
    """Without a diff: the kernel, on ggml's own memory, beside the project's own."""
    model = file(fault.model)
    assert shows(model, fault)[0] == known(model, fault)[0]


def assert_found(result: DiffResult, fault: Fault, places: list[Place]) -> None:
    """The first wrong node is the known one, and what is said of it is true."""
    assert not result
    first = result.wrong[0]
    found = Place(first.step, first.index, first.op, first.name)
    assert found in places if fault.scattered else found == places[0]
    if fault.says is not None:
        assert first.diagnosis is not None
        assert fault.says in first.diagnosis
    for words in fault.never:
        assert words not in (first.diagnosis or "")


@pytest.mark.parametrize("fault", ISOLATED, ids=str)
def test_a_fault_is_found(
    file: Files, fault: Fault, backend: Plugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; its reproducer is wrong with the fault, and right without."""
    model = file(fault.model)
    places = known(model, fault)
    for option, value in fault.options.items():
        monkeypatch.setattr(DEVICE, option, value)
    with loaded(fault.path):
        result = diff(model, PROMPT, steps=fault.steps, settings=fault.settings, reproducers=tmp_path)
        assert_found(result, fault, places)
        saved = Path(result.wrong[0].reproducer)
        assert not replay(saved, repeat=fault.repeat)
    assert replay(saved, repeat=fault.repeat)
