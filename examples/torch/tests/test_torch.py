"""The torch device: its kernels beside the project's own, and a model of which all nodes are on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install examples/torch")

from ggml_npu_torch import Torch

import quant
from ggml_backend_npu import Backend, DeviceBackend, DeviceError, Node, Options, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.diff.run import DiffOptions, run_in_step
from graph_runner.run.session import Session, Settings

PROMPT = "The capital of France is"
OURS = Backend("ours", options=Options(ops="all", matmul="exact"))


@pytest.fixture(scope="module")
def device() -> DeviceBackend:
    found = Torch()
    try:
        found.open()
    except DeviceError as error:
        pytest.skip(str(error))
    found.is_open = True
    return DeviceBackend(found)


def tensor(*shape: int, type: str = "f32", seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if type in ("f32", "f16"):
        return Tensor.of(values.astype(type.replace("f", "float")))
    blocks = quant.codec(type).encode(values.reshape(-1, 32), "reference")
    return Tensor.of(blocks.reshape(*shape[:-1], -1), type)


def params(op: str, **given: float) -> bytes:
    record: Any = OWN[op].params
    return bytes(record(**{name: given.get(name, 0) for name in record.__annotations__}).packed)


IDS = Tensor.of(np.array([1, 4, 2], np.int32))
ROPE = {"n_dims": 48, "freq_base": 10000.0, "freq_scale": 1.0, "attn_factor": 1.0}
CASES: list[tuple[str, tuple[Tensor, ...], tuple[int, ...], bytes]] = [
    ("ADD", (tensor(3, 64), tensor(1, 64)), (3, 64), b""),
    ("MUL", (tensor(2, 3, 64), tensor(3, 32)), (2, 3, 64), b""),
    ("SCALE", (tensor(3, 64),), (3, 64), params("SCALE", scale=0.5, bias=1.0)),
    ("CONT", (tensor(3, 64),), (3, 64), b""),
    ("RMS_NORM", (tensor(3, 64),), (3, 64), params("RMS_NORM", eps=1e-5)),
    ("SOFT_MAX", (tensor(3, 64), tensor(3, 64, type="f16")), (3, 64), params("SOFT_MAX", scale=0.5)),
    ("SWIGLU", (tensor(3, 64), tensor(3, 64, seed=1)), (3, 64), params("SWIGLU")),
    ("SWIGLU", (tensor(3, 128),), (3, 64), params("SWIGLU", swapped=1)),
    ("ROPE", (tensor(3, 2, 64), IDS), (3, 2, 64), params("ROPE", mode=0, **ROPE)),
    ("ROPE", (tensor(3, 2, 64), IDS), (3, 2, 64), params("ROPE", mode=2, **ROPE)),
    *(("GET_ROWS", (tensor(5, 64, type=type), IDS), (3, 64), b"") for type in ("f32", "f16", "q8_0", "q4_0", "q4_1")),
    *(
        ("MUL_MAT", (tensor(2, 5, 64, type=type), tensor(4, 3, 64)), (4, 3, 5), b"")
        for type in ("f32", "f16", "q8_0", "q4_0", "q4_1")
    ),
]


@pytest.mark.parametrize(("op", "src", "shape", "given"), CASES, ids=[f"{op}-{src[0].type}" for op, src, *_ in CASES])
def test_a_kernel_gives_what_ours_does(
    op: str, src: tuple[Tensor, ...], shape: tuple[int, ...], given: bytes, device: DeviceBackend
) -> None:
    results = []
    for backend in (device, OURS):
        dst = Tensor.of(np.full(shape, np.nan, np.float32))
        backend.compute(Node(op, dst, src, given.ljust(64, b"\0")))
        results.append(dst.view())
    actual, expected = results
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_set_where_they_belong(device: DeviceBackend) -> None:
    cache = np.zeros((6, 64), np.float16)
    dst = Tensor.of(cache)
    node = Node("SET_ROWS", dst, (tensor(3, 64), Tensor.of(np.array([5, 0, 3], np.int64)), dst))
    device.compute(node)
    assert np.array_equal(cache[[5, 0, 3]], tensor(3, 64).view()[0, 0].astype(np.float16))
    assert not cache[[1, 2, 4]].any()


def test_every_node_of_a_llama_is_on_it_and_right(device: DeviceBackend, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    npu = Plugin(lib.ggml(), device)
    settings = Settings(device="npu", gpu_layers=999, flash_attention="off")
    with Session(model, settings, npu=npu) as session:
        session.decode(session.tokenize(PROMPT))
        assert session.splits == "1"
        assert not session.left_to_the_cpu
    result = run_in_step(model, PROMPT, DiffOptions(steps=2, backend=device))
    assert result, result.wrong
    assert result.ending is not None
    assert result.ending.nmse < 1e-5
