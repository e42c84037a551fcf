"""ROPE, which only the device's own tensors need: what context shift asks of it, against ggml's CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import quant
from ggml_backend_npu.abi.build import Builder
from ggml_backend_npu.abi.plugin import Plugin

NORMAL, NEOX = 0, 2
NE = (64, 3, 5, 2)


def rotated(
    backend: Plugin, device: str, type: str, mode: int, n_dims: int, yarn: float, factors: bool
) -> NDArray[np.float64]:
    random = np.random.default_rng(0)
    x = random.standard_normal(NE[::-1]).astype(np.float32)
    with Builder(backend.ggml, device) as build:
        source, positions = build.tensor(type, NE), build.tensor("i32", (NE[2],))
        ff = build.tensor("f32", (n_dims // 2,)) if factors else None
        scale = 0.25 if yarn else 1.0
        numbers: tuple[Any, ...] = (n_dims, mode, 512, 10000.0, scale, yarn, 1.0, 32.0, 1.0)
        node = build.op("rope_ext", source, positions, ff, *numbers)
        build.set(source, quant.quantize(x, type))
        build.set(positions, np.array([0, 1, 7, -40, 3000], np.int32))
        if ff is not None:
            build.set(ff, random.uniform(1, 8, n_dims // 2).astype(np.float32))
        assert build.compute(node) == 0
        return quant.dequantize(build.get(node), type).astype(np.float64)


@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("mode", [NORMAL, NEOX])
@pytest.mark.parametrize(("n_dims", "yarn", "factors"), [(64, 0.0, False), (32, 0.0, True), (64, 1.0, False)])
def test_rope_rotates_as_the_cpu_does(
    backend: Plugin, type: str, mode: int, n_dims: int, yarn: float, factors: bool
) -> None:
    """The last bit of cos and sin is the C library's: 1e-7 is the bound that test-backend-ops has for ROPE."""
    cpu, npu = (rotated(backend, device, type, mode, n_dims, yarn, factors) for device in ("CPU", "NPU"))
    assert np.square(cpu - npu).sum() <= 1e-7 * np.square(cpu).sum()
