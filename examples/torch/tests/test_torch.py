"""The torch device: its kernels beside ggml's CPU and the project's own, and models of which all nodes are on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install examples/torch")

from ggml_npu_torch import Torch
from ggml_npu_torch.kernels import KERNELS
from kit.beside_cpu import MOVERS, differing
from kit.encoders import write_tiny_bert
from kit.models import write_tiny_gpt_oss, write_tiny_moe
from kit.sdk_devices import (
    IDS,
    OURS,
    ROPE,
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
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.diff.run import DiffOptions, run_in_step
from graph_runner.run.session import Session, Settings

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # it is only read

CODECS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_K", "q6_K")


@pytest.fixture(scope="module")
def device() -> DeviceBackend:
    return opened(Torch())


YARN = {**ROPE, "freq_scale": 0.25, "ext_factor": 1.0, "n_ctx_orig": 64, "beta_fast": 32.0, "beta_slow": 1.0}
QKV = tensor(4, 3, 64), tensor(2, 5, 64, type="f16"), tensor(2, 5, 64, type="f16")
CASES = [
    *cases_of_a_llama(("f32", "f16", *CODECS)),
    ("SOFT_MAX", (tensor(3, 3, 64), tensor(3, 64)), (3, 3, 64), params("SOFT_MAX", scale=0.5, max_bias=8.0)),
    ("GEGLU", (tensor(3, 128),), (3, 64), params("GEGLU")),
    ("ROPE", (tensor(3, 2, 64), IDS), (3, 2, 64), params("ROPE", mode=2, **YARN)),
    ("ROPE", (tensor(3, 2, 64), IDS), (3, 2, 64), params("ROPE", mode=2, **YARN | {"n_ctx_orig": 0})),
    ("FLASH_ATTN_EXT", QKV, (3, 4, 64), params("FLASH_ATTN_EXT", scale=0.125)),
    ("FLASH_ATTN_EXT", QKV, (3, 4, 64), params("FLASH_ATTN_EXT", scale=0.125, logit_softcap=10.0)),
]


@each(CASES)
def test_a_kernel_gives_what_ours_does(
    op: str, src: tuple[Tensor, ...], shape: tuple[int, ...], given: bytes, device: DeviceBackend
) -> None:
    assert_gives_what_ours_does(device, op, src, shape, given)


def test_what_moves_data_gives_the_bytes_of_ggmls_cpu() -> None:
    assert not differing(Torch(), MOVERS, 150).wrong


def test_what_computes_is_right_within_rounding() -> None:
    assert not differing(Torch(), [op for op in KERNELS if op not in MOVERS], 80).wrong


@pytest.mark.slow
def test_20000_nodes_that_move_data_give_the_bytes_of_ggmls_cpu() -> None:
    assert not differing(Torch(), MOVERS, 20_000, seed=1).wrong


@pytest.mark.slow
def test_2000_nodes_that_compute_are_right_within_rounding() -> None:
    assert not differing(Torch(), [op for op in KERNELS if op not in MOVERS], 2_000, seed=1).wrong


def test_numbers_that_round_alone_are_encoded_as_on_ggmls_cpu() -> None:
    """Zeros of both signs, numbers so small that the inverse of a scale overflows, ties."""
    rows = np.zeros((6, 32), np.float32)
    rows[1] = -0.0
    rows[2, ::2], rows[3, 5], rows[4] = 1e-40, -1e-38, np.arange(32) - 15.5
    rows[5, :2] = -7, 7
    for type in ("q8_0", "q4_0", "q4_1"):
        results = []
        for backend in (DeviceBackend(Torch()), OURS):
            dst = Tensor.of(np.zeros((6, quant.codec(type).block_bytes), np.uint8), type)
            backend.compute(Node("CPY", dst, (Tensor.of(rows),), bytes(64)))
            results.append(dst.view().copy())
        assert np.array_equal(*results), type


@pytest.mark.parametrize("type", CODECS)
def test_x_is_multiplied_as_it_is_if_asked(type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ROUND", "0")
    assert_multiplies_x_as_it_is(Torch(), type)


@pytest.mark.parametrize("keeps", ["0", "1"])
def test_weights_that_are_set_again_are_decoded_again(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_KEEP", keeps)
    device = DeviceBackend(Torch())
    memory = device.memory()
    first, second = (tensor(8, 64, type="q8_0", seed=seed) for seed in (0, 1))
    x, dst = tensor(2, 64), Tensor.of(np.zeros((2, 8), np.float32))
    there = [moved(each, memory) for each in (dst, first, x)]
    plan = device.plan(Graph((Node("MUL_MAT", there[0], (there[1], there[2]), bytes(64)),), ((None,) * 2,), ((),)))
    for weights in (first, second):
        memory.write(there[1].address, weights.memory.bytes())
        for _ in range(3):
            plan.run()
        memory.synchronize()
        OURS.compute(Node("MUL_MAT", dst, (weights, x), bytes(64)))
        actual = memory.read(there[0].address, dst.nbytes).view(np.float32).reshape(2, 8)
        np.testing.assert_allclose(actual, dst.view()[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["on", "off"])
@pytest.mark.parametrize("write", [write_tiny_llama, write_tiny_moe, write_tiny_gpt_oss], ids=["llama", "moe", "oss"])
def test_every_node_of_a_model_is_on_it_and_right(
    write: Callable[[Path], Path], attention: Any, device: DeviceBackend, tmp_path: Path
) -> None:
    result = in_one_split(device, write(tmp_path / "tiny.gguf"), attention)
    assert result, result.wrong
    assert result.ending is not None
    assert result.ending.nmse < 1e-5


def test_every_node_of_a_bert_is_right(device: DeviceBackend, tmp_path: Path) -> None:
    result = run_in_step(write_tiny_bert(tmp_path / "bert.gguf"), "abc", DiffOptions(backend=device))
    assert result, result.wrong


@pytest.mark.parametrize("type", ["q8_0", "q4_1"])
def test_logits_are_those_of_decoded_weights_on_ggmls_cpu(
    type: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_ROUND", "0")
    assert nmse_beside_decoded(Torch(), type, tmp_path) < 1e-5


@pytest.mark.parametrize(
    ("name", "says"), [("npu9", "npu9"), ("cuda:99", "TORCH_DEVICE 'cuda:99': "), ("a chip", "TORCH_DEVICE 'a chip': ")]
)
def test_a_device_that_is_not_there_is_one_line(name: str, says: str) -> None:
    done = command("run", "tiny", "--device-file", "torch", TORCH_DEVICE=name)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert says in done.stderr


def test_without_torch_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('No module named torch')\n")
    done = command("run", "tiny", "--device-file", "torch", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "ggml-npu: device 'torch': torch cannot be imported (No module named torch): pip install torch"
    ]


@pytest.mark.slow
def test_its_memory_is_right() -> None:
    done = command("test", "--memory", "--device-file", "torch")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_thousand_steps_leave_no_memory_behind(device: DeviceBackend, tmp_path: Path) -> None:
    import resource

    settings = Settings(device="npu", gpu_layers=999, n_ctx=4096)
    with Session(write_tiny_llama(tmp_path / "tiny.gguf"), settings, npu=Plugin(lib.ggml(), device)) as session:
        sizes = []
        for _ in range(2):
            session.clear()
            for _ in range(1500):
                session.decode([5])
            sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert sizes[1] - sizes[0] < 8 << 10  # KiB
