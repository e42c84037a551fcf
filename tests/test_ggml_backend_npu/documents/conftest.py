"""What every test of the four documents may run with: either engine."""

from __future__ import annotations

import pytest
from kit.support import ENGINES


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compiled kernels, then the definitions."""
    name: str = request.param
    monkeypatch.setenv("GGML_NPU_ENGINE", name)
    return name
