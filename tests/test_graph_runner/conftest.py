"""What several modules need: ops and plans as they were, traces, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.browser import CHROMIUM, Browser, chromium
from kit.diffs import PROMPT
from kit.models import Models
from kit.traced import ORIGIN, SETTINGS, everything, get_rows

from ggml_backend_npu import default_backend
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.trace import CaptureOptions, capture, write_trace


@pytest.fixture
def as_before(backend: Plugin) -> Iterator[None]:
    """Plans with planted kernels are gone after a test."""
    yield
    backend.forget_plans()


@pytest.fixture
def own_ops(backend: Plugin, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops registered by the test are gone after it."""
    monkeypatch.setattr(default_backend().ops, "_ops", dict(default_backend().ops._ops))
    backend.forget_plans()
    yield
    backend.forget_plans()


@pytest.fixture(scope="session")
def traces(model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The trace of all nodes of a tiny model, made when first asked for."""
    folder = tmp_path_factory.mktemp("traces")

    def find(name: str) -> Path:
        path = folder / f"{name}.gguf"
        if not path.exists():
            capture(model(name), PROMPT, path, CaptureOptions(steps=1, settings=SETTINGS[name], select=everything))
        return path

    return find


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one node."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_trace(path, [get_rows()], ORIGIN)
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser with one page."""
    if CHROMIUM is None:
        pytest.skip("no chromium (Debian's package of that name) to open pages in")
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
