"""What the tests of devices made of a Python SDK share: nodes, whole models, arithmetic of float32."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.quantised import write_decoded, write_pair

import quant
from ggml_backend_npu import Backend, Device, DeviceBackend, DeviceError, Node, Options, Tensor
from ggml_backend_npu.device.memory import OpaqueMemory
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.diff.result import DiffResult
from graph_runner.diff.run import DiffOptions, run_in_step
from graph_runner.run.session import Session, Settings

PROMPT = "The capital of France is"
OURS = Backend("ours", options=Options(ops="all", matmul="exact"))
IDS = Tensor.of(np.array([1, 4, 2], np.int32))
ROPE = {"n_dims": 48, "freq_base": 10000.0, "freq_scale": 1.0, "attn_factor": 1.0}
SIMPLE = ("f32", "f16", "q8_0", "q4_0", "q4_1")  # types of weights

Case = tuple[str, tuple[Tensor, ...], tuple[int, ...], bytes]  # op, sources, shape of dst, parameters


def opened(device: Device) -> DeviceBackend:
    """A device as a backend; skips a test whose machine does not have it."""
    try:
        device.open()
    except DeviceError as error:
        pytest.skip(str(error))
    device.is_open = True
    return DeviceBackend(device)


def params(op: str, **given: float) -> bytes:
    """The op's parameters; those that are not given are 0."""
    record: Any = OWN[op].params
    return bytes(record(**{name: given.get(name, 0) for name in record.__annotations__}).packed)


def tensor(*shape: int, type: str = "f32", seed: int = 0) -> Tensor:
    """Random numbers, in blocks of a type."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    codec = quant.codec(type)
    if not codec.is_quantized:
        return Tensor.of(values.astype(codec.dtype))
    blocks = codec.encode(values.reshape(-1, codec.block_size), "reference")
    return Tensor.of(blocks.reshape(*shape[:-1], -1), type)


def cases_of_a_llama(types: Sequence[str] = SIMPLE, size: int = 256) -> list[Case]:
    """Nodes as a llama has them.

    types  of the weights, whose rows have `size` elements
    """
    return [
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
        *(("GET_ROWS", (tensor(5, size, type=type), IDS), (3, size), b"") for type in types),
        *(("MUL_MAT", (tensor(2, 5, size, type=type), tensor(4, 3, size)), (4, 3, 5), b"") for type in types),
    ]


def each(cases: Sequence[Case]) -> pytest.MarkDecorator:
    """A test of `op`, `src`, `shape` and `given` for each case."""
    names = [f"{op}-{src[0].type}" for op, src, *_ in cases]
    return pytest.mark.parametrize(("op", "src", "shape", "given"), cases, ids=names)


def moved(tensor: Tensor, memory: OpaqueMemory) -> Tensor:
    """The tensor in the device's memory."""
    buffer = memory.allocate(tensor.nbytes)
    assert buffer is not None
    memory.write(buffer.address, tensor.memory.bytes())
    return replace(tensor, memory=replace(tensor.memory, address=buffer.address, owner=None), buffer=buffer)


def assert_gives_what_ours_does(
    device: DeviceBackend, op: str, src: tuple[Tensor, ...], shape: tuple[int, ...], given: bytes
) -> None:
    """Computes a node on a device and with the project's own kernel."""
    results = []
    for backend in (device, OURS):
        dst = Tensor.of(np.full(shape, np.nan, np.float32))
        backend.compute(Node(op, dst, src, given.ljust(64, b"\0")))
        results.append(dst.view())
    actual, expected = results
    tolerance = 3e-3 if op == "FLASH_ATTN_EXT" else 1e-5  # ggml's CPU sums float16 values in float16
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def assert_multiplies_x_as_it_is(device: Device, type: str) -> None:
    """A product with weights of a type is that of the decoded weights: x is not rounded."""
    weights, x, dst = tensor(5, 256, type=type), tensor(3, 256), Tensor.of(np.zeros((3, 5), np.float32))
    DeviceBackend(device).compute(Node("MUL_MAT", dst, (weights, x), bytes(64)))
    decoded = quant.dequantize(weights.view(), type).reshape(5, 256)
    exact = x.view()[0, 0] @ decoded.T.astype(np.float64)
    np.testing.assert_allclose(dst.view()[0, 0], exact, rtol=1e-5, atol=1e-5)


def in_one_split(device: DeviceBackend, model: Path, attention: Any) -> DiffResult:
    """Asserts that the device takes all nodes of a model. Returns what a diff finds."""
    settings = Settings(device="npu", gpu_layers=999, flash_attention=attention)
    with Session(model, settings, npu=Plugin(lib.ggml(), device)) as session:
        session.decode(session.tokenize(PROMPT))
        assert session.splits == "1"
        assert not session.left_to_the_cpu
    return run_in_step(model, PROMPT, DiffOptions(steps=2, settings=settings, backend=device))


def nmse_beside_decoded(device: Device, type: str, folder: Path) -> float:
    """NMSE of a tiny llama's logits, its weights of a type, against ggml's CPU on the same weights decoded."""
    _, small = write_pair(folder, type)
    sides = (
        (small, Settings(device="npu", gpu_layers=999), Plugin(lib.ggml(), DeviceBackend(device))),
        (write_decoded(folder / "decoded.gguf", small), Settings(device="cpu"), None),
    )
    logits = []
    for model, settings, plugin in sides:
        with Session(model, settings, npu=plugin) as session:
            session.decode(session.tokenize(PROMPT))
            logits.append(session.logits().copy())
    actual, expected = logits
    return float(np.square(actual - expected).sum() / np.square(expected).sum())


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ggml-npu with environment variables."""
    line = [sys.executable, "-c", "from graph_runner.cli import main; main()", *arguments]
    return subprocess.run(line, env=os.environ | variables, capture_output=True, text=True, timeout=600, check=False)
