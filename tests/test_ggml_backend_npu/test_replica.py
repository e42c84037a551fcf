"""A node of the IR computed on a device of ggml's: the same bytes as in the run it comes from, and no abort."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.models import WRITERS, Models
from kit.support import assert_same_bytes
from numpy.typing import NDArray

from ggml_backend_npu import KernelError, Memory, Node, Tensor, default_backend, op
from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.plugin import replica
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.replica import Replica
from graph_runner.judging.copies import Copied, span
from graph_runner.run.session import Session, Settings

FLASH_OFF = Settings(flash_attention="off", threads=1)


def tensor(values: NDArray[Any], name: str = "t", **given: Any) -> Tensor:
    return replace(Tensor.of(values, name=name), **given)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(3).standard_normal(shape).astype(np.float32)


def get_rows(n_rows: int = 8) -> Node:
    table, ids = tensor(floats(n_rows, 16)), tensor(np.array([3, 0, 5], np.int32), "ids")
    return Node("GET_ROWS", tensor(np.zeros((3, 16), np.float32), "rows"), (table, ids))


class Again:
    """Observer that computes every node again, from a copy of what it reads, on some devices."""

    def __init__(self, *devices: Replica) -> None:
        self.devices = devices
        self.computed: Counter[str] = Counter()
        self.in_place = self.empty = 0
        self.node: Node | None = None

    def before(self, address: int) -> bool:
        ggml = lib.ggml()
        self.node = None
        if convert.computes(convert.op_name(ggml, address)):
            self.node = convert.node(ggml, address)
            self.copies = [Copied.of(self.node).node for _ in self.devices]
        return True

    def after(self, _: int) -> None:
        node = self.node
        if node is None:
            return
        if node.dst.n_elements == 0:
            self.empty += 1
        self.in_place += any(source is not None and source.overlaps(node.dst) for source in node.src)
        for device, copy in zip(self.devices, self.copies, strict=True):
            if device.refusal(copy) is None:
                device.compute(copy)
                if device.name == "CPU" or node.op not in ("ROPE", "SOFT_MAX"):
                    assert_same_bytes(span(copy.dst), span(node.dst), f"{device.name}: {node}")
                self.computed[f"{device.name} {node.op}"] += 1
            else:
                assert device.name != "CPU"


@pytest.mark.some(2)
@pytest.mark.parametrize("name", WRITERS)
def test_every_node_of_a_model_gives_the_same_bytes_again(backend: Plugin, model: Models, name: str) -> None:
    settings = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", threads=1)
    with Replica(backend.ggml, "CPU", threads=1) as cpu, Replica(backend.ggml, "NPU") as npu:
        seen = Again(cpu, npu)
        for chosen in (FLASH_OFF, settings) if name not in ("rwkv7", "mamba") else (FLASH_OFF,):
            with Session(model(name), chosen, observer=seen) as session:
                session.decode(session.tokenize("The capital of France is"))
                session.decode([5])
    assert seen.in_place > 0
    assert seen.computed["CPU MUL_MAT"] > 0
    assert seen.computed["CPU GET_ROWS"] == seen.computed["NPU GET_ROWS"] > 0
    if name == "rwkv7":
        assert seen.empty > 0


def test_functions_of_unary_and_glu_get_their_number(backend: Plugin) -> None:
    x = floats(4, 32)
    with Replica(backend.ggml, "CPU") as cpu:
        for name, expected in {"NEG": -x, "RELU": np.maximum(x, 0), "ABS": np.abs(x)}.items():
            node = Node(name, tensor(np.zeros_like(x)), (tensor(x),))  # params are of no ggml at all
            cpu.compute(node)
            assert_same_bytes(node.dst.view(), expected.reshape(1, 1, 4, 32), name)
    assert set(backend.ggml.op_numbers) == backend.ggml.op_names
    for name, (number, function) in backend.ggml.op_numbers.items():
        assert backend.ggml.op_name(number, function or 0) == name


def test_what_overlaps_overlaps_on_the_device(backend: Plugin) -> None:
    whole = floats(5, 8)
    memory = Memory.of(whole)
    rows = Tensor("a", "f32", (8, 4, 1, 1), (4, 32, 128, 128), replace(memory, writable=False))
    same = replace(rows, name="dst", memory=memory)
    with Replica(backend.ggml, "CPU") as cpu:
        cpu.compute(Node("NEG", same, (rows,)))
    assert_same_bytes(whole, np.concatenate([-floats(5, 8)[:4], floats(5, 8)[4:]]))


def test_two_roles_of_one_tensor_and_an_empty_one(backend: Plugin) -> None:
    x, empty = tensor(floats(2, 8)), tensor(np.zeros((0, 8), np.float32))
    with Replica(backend.ggml, "CPU") as cpu:
        added = Node("ADD", tensor(np.zeros((2, 8), np.float32)), (x, x))
        cpu.compute(added)
        assert_same_bytes(added.dst.view(), (floats(2, 8) * 2).reshape(1, 1, 2, 8))
        joined = Node("CONCAT", tensor(np.zeros((2, 8), np.float32)), (x, empty), (1).to_bytes(4, "little"))
        cpu.compute(joined)
        assert_same_bytes(joined.dst.view(), floats(2, 8).reshape(1, 1, 2, 8))
        cpu.compute(Node("NEG", empty, (empty,)))


def test_memory_that_begins_anywhere(backend: Plugin) -> None:
    room = np.zeros(4096, np.uint8)
    for begin in (4, 36, 60, 100):
        source, result = room[begin : begin + 256].view(np.float32), np.zeros(64, np.float32)
        source[:] = floats(64)
        replica.compute(backend.ggml, "CPU", Node("NEG", tensor(result), (tensor(source),)))
        assert_same_bytes(result, -floats(64))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an op that ggml has not": ({"op": "FROBNICATE"}, "has no such op"),
    "a view": ({"op": "VIEW"}, "computes nothing"),
    "an op that calls a function by its address": ({"op": "MAP_CUSTOM1"}, "calls a function of the program"),
    "no source": ({"src": ()}, "needs 2 sources"),
    "one source left out": ({"src": (get_rows().src[0], None)}, "needs 2 sources"),
    "eleven sources": ({"src": get_rows().src[:1] * 11}, "11 sources"),
    "too many parameters": ({"params": bytes(65)}, "65 bytes of parameters"),
}
WRONG_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown type": ({"type": "q9_9"}, "has type q9_9"),
    "rows below zero": ({"ne": (16, -3, 1, 1)}, "has ne [16, -3, 1, 1]"),
    "more elements than there are numbers": ({"ne": (1 << 31, 1 << 31, 1, 1)}, "has ne"),
    "more rows than memory": ({"ne": (16, 4, 1, 1)}, "ends at byte 256 of a memory of 192"),
    "strides beyond memory": ({"nb": (4, 96, 192, 192)}, "ends at byte 256 of a memory of 192"),
    "a stride below zero": ({"nb": (4, -64, 192, 192)}, "nb [4, -64, 192, 192]"),
    "an offset beyond memory": ({"offset": 4}, "ends at byte 196 of a memory of 192"),
    "an offset below zero": ({"offset": -4}, "offset -4"),
    "no whole blocks": ({"type": "q8_0"}, "no whole q8_0 blocks"),
}


@pytest.mark.parametrize(("change", "words"), WRONG.values(), ids=WRONG)
def test_a_node_on_which_ggml_would_end_the_process_is_refused(
    backend: Plugin, change: dict[str, Any], words: str
) -> None:
    assert_refused(backend, replace(get_rows(), **change), words)


@pytest.mark.parametrize(("change", "words"), WRONG_TENSORS.values(), ids=WRONG_TENSORS)
@pytest.mark.parametrize("role", ["output", "source 0"])
def test_so_is_one_whose_tensors_do_not_hold_together(
    backend: Plugin, role: str, change: dict[str, Any], words: str
) -> None:
    node = get_rows(3)
    tensor = node.dst if role == "output" else node.src[0]
    assert tensor is not None
    bad = replace(tensor, **change)
    node = replace(node, dst=bad) if role == "output" else replace(node, src=(bad, *node.src[1:]))
    assert_refused(backend, node, f"{role} ")
    assert_refused(backend, node, words)


def assert_refused(backend: Plugin, node: Node, words: str) -> None:
    with Replica(backend.ggml, "CPU") as cpu:
        assert words in str(cpu.refusal(node))
        with pytest.raises(KernelError) as error:
            cpu.compute(node)
    assert "device CPU does not take it" in str(error.value)
    assert "\n" not in str(error.value)


def test_memory_that_may_not_be_written_is_not(backend: Plugin) -> None:
    node = get_rows()
    dst = replace(node.dst, memory=replace(node.dst.memory, writable=False))
    assert_refused(backend, replace(node, dst=dst), "its output's memory may not be written")


def test_an_unknown_device_is_named_with_those_that_there_are(backend: Plugin) -> None:
    for name in ("CUDA7", "", "CPU0", "C\0PU"):
        with pytest.raises(KernelError, match=r"no device .*; ggml has: CPU NPU"):
            Replica(backend.ggml, name)


def test_what_the_npu_refuses_or_fails_at_is_one_error(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(default_backend().ops, "_ops", dict(default_backend().ops._ops))

    with Replica(backend.ggml, "npu") as npu:
        with pytest.raises(KernelError, match=r"^SQR node 't': device NPU does not take it: not supported$"):
            npu.compute(Node("SQR", tensor(floats(4)), (tensor(floats(4)),)))

        @op("GET_ROWS")
        def fails(dst: Tensor, src: Tensor, ids: Tensor) -> None:
            raise ValueError("no\nrows")

        with pytest.raises(
            KernelError, match=r"^GET_ROWS node 'rows': ValueError: no rows \(test_replica.py line \d+\)$"
        ):
            npu.compute(get_rows())
    backend.forget_plans()
    assert capfd.readouterr().err == ""


DEVICE_MEMORY = """
import numpy as np, ggml_backend_npu
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.plugin.replica import Replica
from quant import quantize
ggml = ggml_backend_npu.register().ggml
x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
ids = Tensor.of(np.array([1, 5], np.int64))
results = []
for device in ("CPU", "NPU"):
    cache = np.ascontiguousarray(quantize(x, "q8_0").reshape(6, -1))
    dst = Tensor.of(cache, "q8_0", "cache")
    with Replica(ggml, device) as replica:
        replica.compute(Node("SET_ROWS", dst, (Tensor.of(-x[:2].copy()), ids, dst)))
        rows = Tensor.of(np.zeros((2, 64), np.float32))
        replica.compute(Node("GET_ROWS", rows, (dst, Tensor.of(np.array([1, 5], np.int32)))))
    results.append(cache.tobytes() + rows.view().tobytes())
assert results[0] == results[1]
memory = ggml_backend_npu.register().memory
assert memory.free == memory.limit
print("same")
"""


KEPT = """
import numpy as np, ggml_backend_npu
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ir.buffer import TO_DEVICE
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry.entry import KernelError
plugin = ggml_backend_npu.register()
bytes_sent = plugin.memory.transfers.bytes
def weights(n):
    return Tensor.of(np.arange(n * 64, dtype=np.float32).reshape(n, 64), name="w")
def rows(of):
    dst, ids = Tensor.of(np.zeros((2, 64), np.float32)), Tensor.of(np.array([1, 5], np.int32))
    before = bytes_sent[TO_DEVICE]
    device.compute(Node("GET_ROWS", dst, (of, ids)))
    assert (dst.view()[0, 0] == of.view()[0, 0, (1, 5)]).all()
    return bytes_sent[TO_DEVICE] - before
with Replica(plugin.ggml, "CPU") as host:
    assert not host.keeps(weights(8))
with Replica(plugin.ggml, "NPU") as device:
    kept, plain, large = weights(8), weights(8), weights(60_000)
    assert device.keeps(kept) and device.keeps(large)
    others = rows(plain) - plain.nbytes
    print(*((rows(kept) - others) // kept.nbytes for _ in range(3)))
    device.forget()
    print((rows(kept) - others) // kept.nbytes, device.keeps(kept))
    print(*((rows(kept) - others) // kept.nbytes for _ in range(2)))
    device.keeps(kept := weights(30_000))
    print(*((rows(kept) - others) // kept.nbytes for _ in range(2)))
    print(*((rows(large) - others) // large.nbytes for _ in range(2)))
    rows(weights(80_000))
    device.keeps(kept)
    print(*((rows(kept) - others) // kept.nbytes for _ in range(2)))
    try:
        rows(weights(120_000))
    except KernelError as error:
        print(error)
assert plugin.memory.free == plugin.memory.limit
"""


@pytest.mark.slow
def test_what_a_device_keeps_is_sent_once_as_long_as_as_much_stays_free() -> None:
    """If a node then has no room, it keeps nothing any more."""
    done = subprocess.run(
        [sys.executable, "-c", KEPT],
        env={**os.environ, "GGML_NPU_MEMORY": "device", "GGML_NPU_DEVICE_TYPE": "gpu", "GGML_NPU_MEMORY_LIMIT": "24M"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *sent, last = done.stdout.splitlines()
    assert sent == ["1 0 0", "1 True", "1 0", "1 0", "1 1", "1 1"]
    assert last == "device NPU has no memory for 30720000 bytes"


@pytest.mark.slow
def test_a_device_with_memory_of_its_own_gets_copies() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEVICE_MEMORY],
        env={**os.environ, "GGML_NPU_MEMORY": "device", "GGML_NPU_DEVICE_TYPE": "gpu"},
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr


@pytest.mark.slow
@pytest.mark.daily(2)
def test_computing_again_and_again_takes_no_memory(backend: Plugin) -> None:
    node = get_rows()

    def compute(times: int) -> int:
        for _ in range(times):
            replica.compute(backend.ggml, "CPU", node)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = compute(200)
    assert compute(2000) - before < 4096  # KiB; one context has more than 2 KiB


def test_a_device_is_told_how_many_threads(backend: Plugin) -> None:
    """ggml-blas has four if nobody says a number: more than there are processors, they wait for each other."""
    with Replica(backend.ggml, "NPU", threads=1) as device:
        assert backend.contexts[device._backend].repeats.n_threads == 1
