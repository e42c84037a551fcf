"""Every fault of the corpus fails a diff, at the node that is known to be the first wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import (
    FUSED,
    ISOLATED,
    LIVE,
    MODELS,
    PROMPT,
    RUNS,
    SOURCES,
    STRAYS,
    Fault,
    known,
    loaded,
    shows,
    spills,
)

from ggml_backend_npu import DEVICE
from ggml_backend_npu.abi.plugin import Plugin
from graph_runner.session import Sampler, Session, context_for, generate

Files = Callable[[str], Path]

TIMEOUT = 5  # seconds, of a node


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


def spread(faults: list[Fault], every: int) -> list[Any]:
    """All faults, of which one in so many is in the default tier."""
    return [
        pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] * (i % every > 0)) for i, fault in enumerate(faults)
    ]


# the corpus itself


@pytest.mark.parametrize("fault", spread([*ISOLATED, *SOURCES, *RUNS, *LIVE], every=8))
def test_a_kernel_is_wrong_where_it_is_said_to_be(file: Files, fault: Fault) -> None:
    """Without a diff: the kernel, on ggml's own memory, beside the project's own."""
    model = file(fault.model)
    wrong, places = shows(model, fault)[0], known(model, fault)
    assert wrong in places if fault.scattered else wrong == places[0]


@pytest.mark.parametrize("fault", STRAYS, ids=str)
def test_a_kernel_writes_beside_its_output(file: Files, fault: Fault) -> None:
    model = file(fault.model)
    assert spills(model, fault)[0] == known(model, fault)[0]


def text_of(model: Path, fault: Fault) -> list[int]:
    """Tokens that the device alone decides on."""
    settings = replace(fault.settings, device="npu", n_ctx=context_for(PROMPT, 4))
    with Session(model, settings) as session:
        return [*generate(session, session.tokenize(PROMPT), 4, Sampler())]


@pytest.mark.parametrize("fault", FUSED, ids=str)
def test_an_operator_is_wrong_where_it_takes_the_place_of_its_nodes(
    file: Files, fault: Fault, backend: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fusion a run takes another way, without it does not."""
    for option, value in fault.options.items():
        monkeypatch.setattr(DEVICE, option, value)
    right = logits(file(fault.model), fault, backend)
    with loaded(fault.path):
        assert not np.array_equal(logits(file(fault.model), fault, backend), right)
        monkeypatch.setattr(DEVICE, "fusion", "off")
        unfused = logits(file(fault.model), fault, backend)
    assert np.allclose(unfused, right, rtol=1e-3, atol=1e-4)


def logits(model: Path, fault: Fault, backend: Plugin) -> np.ndarray:
    """Of the device's run of the prompt."""
    backend.forget_plans()
    settings = replace(fault.settings, device="npu", n_ctx=context_for(PROMPT, 1))
    with Session(model, settings) as session:
        session.decode(session.tokenize(PROMPT))
        return np.array(session.logits())
