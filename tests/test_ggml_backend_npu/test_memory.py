"""The device's own memory: any bytes set and got as blocks whatever the layout, its limit, models that live in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.models import Models

import quant
from ggml_backend_npu.ir import Memory
from ggml_backend_npu.ir.memory import DeviceMemory

CONFIGURATIONS = {
    "host, accel": ("host", "accel"),
    "device, accel": ("device", "accel"),
    "device, gpu": ("device", "gpu"),
}


def device_memory(limit: int = 1 << 20) -> DeviceMemory:
    return DeviceMemory(limit, lambda: None)


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
@given(seed=st.integers(0, 1 << 16), n_blocks=st.integers(1, 40), cuts=st.lists(st.integers(0, 1400), max_size=6))
def test_any_bytes_of_a_packed_tensor_are_set_and_got_as_its_blocks(
    type: str, seed: int, n_blocks: int, cuts: list[int]
) -> None:
    memory = device_memory()
    buffer = memory.allocate(4096)
    assert buffer is not None
    size = n_blocks * quant.codec(type).block_bytes
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    memory.place(type, buffer.address, size, pack=True)
    bounds = sorted({0, size, *(cut for cut in cuts if cut < size)})
    for begin, end in list(pairwise(bounds))[::-1]:
        memory.write(buffer.address + begin, data[begin:end])
    for begin, end in pairwise(bounds):
        assert np.array_equal(memory.read(buffer.address + begin, end - begin), data[begin:end])
    stored = buffer.bytes()[:size]
    quants, scales = quant.to_device(data.reshape(n_blocks, -1), type)
    assert stored.tobytes() == quants.tobytes() + scales.tobytes(), "all quants, then all scales"


def test_a_fill_is_seen_as_bytes_of_the_blocks() -> None:
    memory = device_memory()
    buffer = memory.allocate(1024)
    assert buffer is not None
    memory.place("q4_0", buffer.address + 64, 36, pack=True)
    memory.fill(buffer, 0)
    assert not memory.read(buffer.address, 64).any()
    assert not memory.read(buffer.address + 64, 36).any()


def test_what_a_tensor_held_stays_when_it_is_packed() -> None:
    memory = device_memory()
    buffer = memory.allocate(1024)
    assert buffer is not None
    buffer.bytes()[:340] = np.arange(340) % 251
    memory.place("q8_0", buffer.address, 340, pack=True)
    assert np.array_equal(memory.read(buffer.address, 340), np.arange(340) % 251)


def test_a_tensor_that_comes_to_lie_on_a_packed_one_ends_it() -> None:
    moved: list[int] = []
    memory = DeviceMemory(1 << 20, lambda: moved.append(1))
    buffer = memory.allocate(1024)
    assert buffer is not None
    memory.place("q8_0", buffer.address, 340, pack=True)
    memory.place("q8_0", buffer.address, 340, pack=True)
    assert len(moved) == 1, "the same tensor again is no news"
    memory.place("f32", buffer.address + 320, 64, pack=True)
    assert memory.packed(buffer.address) is None
    assert len(moved) == 2


def test_the_limit_holds_and_what_is_released_is_free_again() -> None:
    memory = device_memory(1000)
    first = memory.allocate(600)
    assert first is not None
    assert first.address % 64 == 0
    assert memory.free == 400
    assert memory.allocate(401) is None
    memory.release(first)
    assert isinstance(memory.allocate(1000), Memory)


# models


def ggml_npu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("ggml-npu")
    return subprocess.run([command, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_model_writes_the_same_text_wherever_its_tensors_lie() -> None:
    texts = {}
    for name, (memory, device_type) in CONFIGURATIONS.items():
        options = ["--memory", memory, "--device-type", device_type, "--flash-attn", "on"]
        result = ggml_npu("run", "demo", "-n", "32", *options)
        assert result.returncode == 0, result.stderr
        texts[name] = result.stdout
    assert len(set(texts.values())) == 1, texts


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    options = ["--memory", "device", "--device-type", "gpu", "--memory-limit", "100K", "--flash-attn", "on"]
    result = ggml_npu("run", "tiny", *options)
    assert result.returncode == 2
    assert "failed to allocate NPU buffer" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout


STATE = """
import json, sys
from graph_runner.base.models import model_file
from graph_runner.run.session import Session, Settings
device, flash_attention, cache_type = sys.argv[1:]
settings = Settings(
    device=device, flash_attention=flash_attention, cache_type_k=cache_type, cache_type_v=cache_type, gpu_layers=99
)
with model_file("demo") as file, Session(file, settings) as session:
    session.decode(session.tokenize("A context that is saved, restored and shifted"))
    saved = session.save()
    session.decode(session.tokenize(" is"))
    before = session.logits()
    session.restore(saved)
    session.decode(session.tokenize(" is"))
    restored = bool((session.logits() == before).all())
    session.forget(3, 5)
    session.decode(session.tokenize(" a"))
    print(json.dumps({"restored": restored, "logits": session.logits().tolist(), "npu": session.npu_nodes}))
"""


SEQUENCES = """
import json, sys
from llama_cpp import llama_cpp
import ggml_backend_npu
from graph_runner.base.models import demo_file
if sys.argv[1] == "npu":
    ggml_backend_npu.register()
quiet = llama_cpp.llama_log_callback(lambda *_: None)
llama_cpp.llama_log_set(quiet, None)
params = llama_cpp.llama_model_default_params()
params.use_extra_bufts, params.n_gpu_layers = False, 99 if sys.argv[1] == "npu" else 0
model = llama_cpp.llama_model_load_from_file(str(demo_file()).encode(), params)
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.kv_unified, params.flash_attn_type = 512, 2, sys.argv[2] == "unified", 1
context = llama_cpp.llama_init_from_model(model, params)

def decode(tokens, first, sequence):
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
        batch.seq_id[i][0], batch.logits[i] = sequence, i == len(tokens) - 1
    batch.n_tokens = len(tokens)
    assert llama_cpp.llama_decode(context, batch) == 0
    return llama_cpp.llama_get_logits_ith(context, -1)[:49152]

decode([504, 3575, 282, 4649, 314], 0, 0)
llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(context), 0, 1, -1, -1)
print(json.dumps(decode([253], 5, 1)))
"""


def told(script: str, *arguments: str, memory: str, device_type: str) -> Any:
    """What a script prints as JSON, in a process of its own."""
    environment = {**os.environ, "GGML_NPU_MEMORY": memory, "GGML_NPU_DEVICE_TYPE": device_type}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


LENGTHS = """
import json, sys
from pathlib import Path
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Session, Settings
file, gpu_layers, logits = Path(sys.argv[1]), int(sys.argv[2]), {}
for cache_type in "q8_0", "q4_0":
    settings = Settings("npu", 256, cache_type, cache_type, "on", threads=1, gpu_layers=gpu_layers)
    with Session(file, settings) as session:
        for n in 1, 3, 8, 20, 26, 40:
            session.clear()
            for tokens in [60 + i * 7 % 80 for i in range(n)], [99]:
                session.decode(tokens)
                logits[f"{cache_type}, {n} tokens and {len(tokens)}"] = session.logits().tolist()
    left = list(session.left_to_the_cpu)
options = DiffOptions(steps=2, settings=settings)
nodes = [node for n in (2, 4, 10) for node in diff(file, "two by two"[:n], options).nodes]
errors = {f"{i} {node.name}": node.cumulative.error for i, node in enumerate(nodes) if node.cumulative is not None}
print(json.dumps({"logits": logits, "left": left, "errors": errors}))
"""


@pytest.mark.slow
def test_quantised_caches_of_the_host_come_to_the_device_whatever_lies_there(
    model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a device of type accel they are copied for each graph, to addresses that other results of it have in turns:
    whose, depends on how many tokens there are."""
    monkeypatch.setenv("GGML_NPU_OPS", "all")
    monkeypatch.setenv("GGML_NPU_MATMUL", "exact")
    host, accel, gpu = [
        told(LENGTHS, str(model("llama")), "99" if type == "gpu" else "0", memory=memory, device_type=type)
        for memory, type in CONFIGURATIONS.values()
    ]
    assert "SET_ROWS" in accel["left"], "its caches lie on the host"
    for found in (accel, gpu):
        assert found["logits"] == host["logits"]
        assert found["errors"] == host["errors"], "each node is off the CPU's by as much, most by nothing"
    assert sum(error == 0 for error in host["errors"].values()) > 300


@pytest.mark.slow
@pytest.mark.parametrize(("flash_attention", "cache_type"), [("off", "f16"), ("on", "f16"), ("on", "q8_0")])
def test_state_is_saved_restored_and_shifted_on_the_device(flash_attention: str, cache_type: str) -> None:
    cpu = told(STATE, "cpu", flash_attention, cache_type, memory="host", device_type="accel")
    for memory, device_type in CONFIGURATIONS.values():
        npu = told(STATE, "npu", flash_attention, cache_type, memory=memory, device_type=device_type)
        assert npu["restored"]
        assert npu["logits"] == cpu["logits"]
    assert npu["npu"]["SET_ROWS"], "the caches of a device of type gpu lie on it"
    assert "ROPE" in npu["npu"] or cache_type != "f16"


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["unified", "a stream each"])
def test_a_sequence_is_copied_on_the_device(cache: str) -> None:
    cpu = told(SEQUENCES, "cpu", cache, memory="host", device_type="accel")
    for memory, device_type in CONFIGURATIONS.values():
        assert told(SEQUENCES, "npu", cache, memory=memory, device_type=device_type) == cpu
