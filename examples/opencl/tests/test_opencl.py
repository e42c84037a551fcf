"""The OpenCL device: its kernels beside the project's own, and a model of which all nodes are on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyopencl", reason="pyopencl is not installed: pip install 'examples/opencl[cpu]'")

from ggml_npu_opencl import OpenCL
from kit.sdk_devices import assert_gives_what_ours_does, cases_of_a_llama, each, in_one_split, opened, tensor

from ggml_backend_npu import DeviceBackend, Node, Tensor
from graph_runner.base.tiny import write_tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:Non-empty compiler output")  # PoCL says something of each program


@pytest.fixture(scope="module")
def device() -> DeviceBackend:
    return opened(OpenCL())


@each(cases_of_a_llama(size=64))
def test_a_kernel_gives_what_ours_does(
    op: str, src: tuple[Tensor, ...], shape: tuple[int, ...], given: bytes, device: DeviceBackend
) -> None:
    assert_gives_what_ours_does(device, op, src, shape, given)


def test_rows_are_set_where_they_belong(device: DeviceBackend) -> None:
    cache = np.zeros((6, 64), np.float16)
    dst = Tensor.of(cache)
    node = Node("SET_ROWS", dst, (tensor(3, 64), Tensor.of(np.array([5, 0, 3], np.int64)), dst))
    device.compute(node)
    assert np.array_equal(cache[[5, 0, 3]], tensor(3, 64).view()[0, 0].astype(np.float16))
    assert not cache[[1, 2, 4]].any()


def test_every_node_of_a_llama_is_on_it_and_right(device: DeviceBackend, tmp_path: Path) -> None:
    result = in_one_split(device, write_tiny_llama(tmp_path / "tiny.gguf"), "off")
    assert result, result.wrong
    assert result.ending is not None
    assert result.ending.nmse < 1e-5
