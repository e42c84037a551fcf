"""The OpenVINO device: its kernels beside ggml's CPU and the project's own, and a model with all nodes on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino", reason="openvino is not installed: pip install examples/openvino")

from ggml_npu_openvino import OpenVINO, built
from ggml_npu_openvino.kernels import KERNELS
from ggml_npu_openvino.numbers import ROUNDED
from kit.beside_cpu import MOVERS, differing
from kit.encoders import write_tiny_bert
from kit.models import write_tiny_moe
from kit.sdk_devices import (
    OURS,
    assert_gives_what_ours_does,
    assert_multiplies_x_as_it_is,
    cases_of_a_llama,
    command,
    each,
    in_one_split,
    moved,
    nmse_beside_decoded,
    opened,
    params,
    tensor,
)

import quant
from ggml_backend_npu import DeviceBackend, Graph, Node, Tensor
from ggml_backend_npu.device.memory import OpaqueMemory
from ggml_backend_npu.registry.calls import KernelError
from graph_runner.base.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def device() -> DeviceBackend:
    return opened(OpenVINO())


EXPERTS, USED = tensor(6, 5, 256, type="q8_0"), Tensor.of(np.array([[5, 0, 2], [2, 3, 1]], np.int32))
QKV = tensor(4, 3, 64), tensor(2, 5, 64, type="f16"), tensor(2, 5, 64, type="f16")
CASES = [
    *cases_of_a_llama(ROUNDED),
    ("CLAMP", (tensor(3, 64),), (3, 64), params("CLAMP", min=-0.5, max=1.0)),
    ("SUM_ROWS", (tensor(3, 64),), (3, 1), b""),
    ("NORM", (tensor(3, 64),), (3, 64), params("NORM", eps=1e-5)),
    ("RMS_NORM", (tensor(1, 1, 3, 39),), (1, 1, 3, 39), params("RMS_NORM", eps=0.0)),  # fused by OpenVINO's CPU
    ("MUL_MAT_ID", (EXPERTS, tensor(2, 1, 256), USED), (2, 3, 5), b""),
    ("MUL_MAT_ID", (EXPERTS, tensor(2, 3, 256), USED), (2, 3, 5), b""),
    ("FLASH_ATTN_EXT", QKV, (3, 4, 64), params("FLASH_ATTN_EXT", scale=0.125)),
]


@each(CASES)
def test_a_kernel_gives_what_ours_does(
    op: str, src: tuple[Tensor, ...], shape: tuple[int, ...], given: bytes, device: DeviceBackend
) -> None:
    assert_gives_what_ours_does(device, op, src, shape, given)


def test_what_moves_data_gives_the_bytes_of_ggmls_cpu() -> None:
    assert not differing(OpenVINO(), MOVERS, 60).wrong


@pytest.mark.slow
def test_3000_nodes_that_move_data_give_the_bytes_of_ggmls_cpu() -> None:
    assert not differing(OpenVINO(), MOVERS, 3_000, seed=1).wrong


@pytest.mark.slow
def test_200_nodes_that_compute_are_right_within_rounding() -> None:
    assert not differing(OpenVINO(), [op for op in KERNELS if op not in MOVERS], 200, seed=1).wrong


def on(memory: OpaqueMemory, tensor: Tensor) -> Any:
    """The float32 that the device has for a tensor."""
    return memory.read(tensor.address, tensor.nbytes).view(np.float32).reshape(tensor.ne[::-1])


@pytest.mark.parametrize("type", [each for each in ROUNDED if quant.codec(each).is_quantized])
def test_x_is_multiplied_as_it_is_if_asked(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OV_ROUND", "0")
    assert_multiplies_x_as_it_is(OpenVINO(), type)


@pytest.mark.parametrize("keeps", ["0", "1"])
def test_weights_that_are_set_again_are_decoded_again(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OV_KEEP", keeps)
    device = opened(OpenVINO())
    memory = device.memory()
    first, second = (tensor(8, 64, type="q8_0", seed=seed) for seed in (0, 1))
    x, dst = tensor(2, 64), Tensor.of(np.zeros((2, 8), np.float32))
    there = [moved(each, memory) for each in (dst, first, x)]
    node = Node("MUL_MAT", there[0], (there[1], there[2]), bytes(64))
    plan = device.plan(Graph((node,), ((None,) * 2,), ((there[0],),)))
    for weights in (first, second):
        memory.write(there[1].address, weights.memory.bytes())
        plan.run()
        OURS.compute(Node("MUL_MAT", dst, (weights, x), bytes(64)))
        np.testing.assert_allclose(on(memory, there[0]), dst.view(), rtol=1e-5, atol=1e-5)


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("keeps", ["0", "1"])
def test_decoded_weights_are_in_memory_if_they_are_kept_alone(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 MiB a part is decoded at a time, into memory that the model has from then on."""
    monkeypatch.setenv("OV_KEEP", keeps)
    device = opened(OpenVINO())
    memory = device.memory()
    weights = Tensor.of(np.full((4096, 8192 // 32 * 18), 1, np.uint8), "q4_0")
    dst, *src = (moved(each, memory) for each in (tensor(1, 4096), weights, tensor(1, 8192)))
    before = resident()
    device.plan(Graph((Node("MUL_MAT", dst, tuple(src), bytes(64)),), ((None,) * 2,), ((dst,),))).run()
    assert (resident() - before > 128 << 20) == (keeps == "1")
    assert resident() - before < (192 if keeps == "1" else 64) << 20


def test_all_rows_are_multiplied_if_they_are_decoded_in_parts(
    device: DeviceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts have equal inputs; the last one is smaller."""
    monkeypatch.setattr(built, "_AT_ONCE", 3 * 256)
    for op, src, shape in (
        ("MUL_MAT", (tensor(2, 5, 256, type="q4_1"), tensor(4, 3, 256)), (4, 3, 5)),
        ("MUL_MAT", (tensor(11, 256, type="q4_0"), tensor(3, 256)), (3, 11)),
        ("MUL_MAT_ID", (EXPERTS, tensor(2, 3, 256), USED), (2, 3, 5)),
    ):
        assert_gives_what_ours_does(device, op, src, shape, b"")


def test_a_failure_on_the_host_fails_the_graph(device: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO goes on when what it called raises."""

    def fails(*_: Any) -> None:
        raise ValueError("no such block")

    monkeypatch.setattr(built, "floats", fails)
    dst = Tensor.of(np.zeros((2, 7), np.float32))
    with pytest.raises(KernelError, match="no such block"):
        device.compute(Node("MUL_MAT", dst, (tensor(7, 96, type="q8_0"), tensor(2, 96)), bytes(64)))


def test_a_program_serves_all_graphs_of_its_topology(device: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model is compiled; it reads and writes where each graph lies."""
    compiled = []
    monkeypatch.setattr(
        OpenVINO, "compile", lambda self, graph, of=OpenVINO.compile: compiled.append(1) or of(self, graph)
    )
    memory = device.memory()
    for seed in range(3):
        a, b, dst = (moved(tensor(3, 7, seed=seed + add), memory) for add in (0, 10, 20))
        device.plan(Graph((Node("ADD", dst, (a, b)),), ((None, None),), ((dst,),))).run()
        assert np.array_equal(on(memory, dst), on(memory, a) + on(memory, b))
    assert len(compiled) == 1


def test_a_cache_is_read_after_it_is_written_in_one_graph(device: DeviceBackend) -> None:
    """Rows of float16 are rounded before they are read, and the other rows stay."""
    memory = device.memory()
    cache, rows, ids = tensor(6, 64, type="f16"), tensor(2, 64, seed=1), Tensor.of(np.array([4, 1], np.int64))
    expected = cache.view()[0, 0].astype(np.float32)
    expected[[4, 1]] = rows.view()[0, 0].astype(np.float16)
    there, given, places, out = (moved(each, memory) for each in (cache, rows, ids, tensor(6, 64)))
    nodes = Node("SET_ROWS", there, (given, places, there), bytes(64)), Node("CPY", out, (there, out), bytes(64))
    device.plan(Graph(nodes, ((None,) * 3, (0, None)), ((there,), (out,)))).run()
    assert np.array_equal(on(memory, out)[0, 0], expected)
    assert np.array_equal(memory.read(there.address, there.nbytes).view(np.float16).reshape(6, 64), expected)


@pytest.mark.parametrize("attention", ["on", "off"])
@pytest.mark.parametrize(
    "write",
    [write_tiny_llama, *(pytest.param(each, marks=pytest.mark.slow) for each in (write_tiny_moe, write_tiny_bert))],
)
def test_every_node_of_a_model_is_on_it_and_right(
    write: Callable[[Path], Path], attention: Any, device: DeviceBackend, tmp_path: Path
) -> None:
    result = in_one_split(device, write(tmp_path / "tiny.gguf"), attention)
    assert result, result.wrong
    assert write is write_tiny_bert or (result.ending is not None and result.ending.nmse < 1e-5)


@pytest.mark.parametrize("type", ["q8_0", "q4_1"])
def test_logits_are_those_of_decoded_weights_on_ggmls_cpu(
    type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OV_ROUND", "0")
    assert nmse_beside_decoded(OpenVINO(), type, tmp_path) < 1e-5


def test_a_device_that_is_not_there_is_one_line() -> None:
    done = command("run", "tiny", "--device-file", "openvino", OV_DEVICE="NPU9")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "OV_DEVICE 'NPU9': " in done.stderr


def test_without_openvino_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "openvino.py").write_text("raise ImportError('No module named openvino')\n")
    done = command("run", "tiny", "--device-file", "openvino", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "ggml-npu: device 'openvino': openvino cannot be imported (No module named openvino): pip install openvino"
    ]


@pytest.mark.slow
def test_its_memory_is_right() -> None:
    done = command("test", "--memory", "--device-file", "openvino")
    assert done.returncode == 0, done.stdout
