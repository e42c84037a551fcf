"""Nodes on ggml's CPU with repacked weights."""

from __future__ import annotations

import numpy as np
import pytest

import quant
from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.repacking import Repacking
from ggml_backend_npu.plugin.replica import Replica
from quant.kernels.processor import announces_amx

pytestmark = pytest.mark.skipif(announces_amx(), reason="this processor announces AMX, with which repacking may crash")


def product(name: str) -> Node:
    """A product of 64 rows of 512 weights in q4_0."""
    random = np.random.default_rng(5)
    blocks = quant.quantize(random.standard_normal((64, 512)).astype(np.float32), "q4_0", rounding="reference")
    memory = Memory.of(np.ascontiguousarray(blocks).view(np.uint8).reshape(-1))
    weights = Tensor(name, "q4_0", (512, 64, 1, 1), (18, 288, 288 * 64, 288 * 64), memory, 0)
    x = Tensor.of(random.standard_normal((8, 512)).astype(np.float32), name="x")
    return Node("MUL_MAT", Tensor.of(np.zeros((8, 64), np.float32), name="y"), (weights, x))


def computed(kind: type[Replica], node: Node) -> np.ndarray:
    with kind(lib.ggml(), "CPU", threads=1) as cpu:
        cpu.compute(node)
    return node.dst.view().copy()


def test_weights_are_repacked_and_nothing_else_is() -> None:
    """Another kernel adds in another order; what is no weight is computed as it lies."""
    plain = computed(Replica, product("w.weight"))
    node = product("w.weight")
    before = node.src[0].memory.bytes().copy()  # type: ignore[union-attr]
    repacked = computed(Repacking, node)
    np.testing.assert_array_equal(before, node.src[0].memory.bytes())  # type: ignore[union-attr]
    assert plain.tobytes() != repacked.tobytes()
    np.testing.assert_allclose(repacked, plain, rtol=1e-4, atol=1e-4)
    assert computed(Repacking, product("cache_k_l0")).tobytes() == plain.tobytes()


def test_weights_that_ggml_does_not_repack_stay_as_they_are() -> None:
    """Rows that are no multiple of 8."""
    node = product("w.weight")
    weights, x = node.src
    assert weights is not None
    few = Tensor("w.weight", "q4_0", (512, 63, 1, 1), weights.nb, weights.memory, 0)
    results = []
    for kind in (Replica, Repacking):
        dst = Tensor.of(np.zeros((8, 63), np.float32), name="y")
        results.append(computed(kind, Node("MUL_MAT", dst, (few, x))).tobytes())
    assert results[0] == results[1]
