"""Nodes that an older ggml is not given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import aborts


@pytest.mark.parametrize(
    ("version", "offset", "refuses"), [("0.15.3", 4, True), ("0.15.3", 0, False), ("0.25.3", 4, False)]
)
def test_a_rotation_from_an_offset_on_is_newer(version: str, offset: int, refuses: bool) -> None:
    ggml: Any = SimpleNamespace(version=version)
    x, params = Tensor.of(np.zeros((1, 8), np.float32)), bytes(60) + offset.to_bytes(4, "little")
    why = aborts.why(ggml, Node("ROPE", x, (x,), params))
    assert (why is not None) == refuses
