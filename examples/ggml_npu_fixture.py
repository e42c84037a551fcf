"""A pytest plugin to test kernels: the fixture ggml_npu compares a node with ggml's CPU, byte for byte.

pytest -p ggml_npu_fixture tests/        with examples/ in PYTHONPATH; or copy it into your conftest.py

    def test_sqr(ggml_npu):
        x = np.random.default_rng(0).standard_normal((4, 300), np.float32)
        ggml_npu.assert_node_equal("SQR", np.empty_like(x), x)
"""

from dataclasses import replace

import numpy as np
import pytest

import ggml_backend_npu
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.plugin.replica import Replica


class Checker:
    """Computes nodes on the NPU and on ggml's CPU, and compares the results."""

    def __init__(self, cpu):
        self.npu, self.cpu = ggml_backend_npu.register().backend, cpu

    def assert_node_equal(self, op, out, *sources, params=b""):
        """Computes a node on both devices. Raises AssertionError if their bytes differ.

        out      an array of the output's shape and type, or a Tensor; its content is not used
        sources  arrays, with axes in NumPy's order, or Tensors
        params   the node's op_params as bytes
        """
        src = tuple(x if isinstance(x, Tensor) else Tensor.of(x) for x in sources)
        node = Node(op, Tensor.of(np.zeros_like(out)), src, params)
        expected = replace(node, dst=Tensor.of(np.zeros_like(out)))
        self.npu.compute(node)
        self.cpu.compute(expected)
        np.testing.assert_array_equal(node.dst.memory.bytes(), expected.dst.memory.bytes(), f"{op}: bytes differ")


@pytest.fixture
def ggml_npu():
    """The fixture: a Checker whose CPU device lives as long as the test."""
    with Replica(ggml_backend_npu.register().ggml, "CPU") as cpu:
        yield Checker(cpu)
