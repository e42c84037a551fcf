"""Large results: their memory is used again when nobody has any of it, and little else is needed to make them."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor
from quant.kernels import memory, threads

MIB = 1 << 20
SHAPE = (512, 1024)  # of float32: 2 MiB


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, NDArray[np.uint8]]]:
    """What is kept, nothing at first."""
    kept: dict[int, NDArray[np.uint8]] = {}
    monkeypatch.setattr(memory, "_free", kept)
    yield kept
    gc.collect()


def at(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "a slice": lambda x: x[7:9],
    "one element": lambda x: x[-1:, -1:],
    "a view of a view": lambda x: x[3:].T[5:].view(np.uint32),
    "reshaped": lambda x: x.reshape(-1),
    "raveled": lambda x: x.ravel(),
    "as an array": np.asarray,
    "as a buffer": memoryview,
    "from a buffer": lambda x: np.frombuffer(memoryview(x), np.uint8),
    "of other bytes": lambda x: x.view(np.uint8)[::2],
    "with other strides": lambda x: np.lib.stride_tricks.as_strided(x, (3,), (64,)),
    "broadcast": lambda x: np.broadcast_to(x[:1], SHAPE),
    "in a list": lambda x: [x[0]],
    "an iterator": iter,
    "in a tensor": lambda x: Tensor.of(x[1:]),
}


@pytest.mark.some(3)
@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_not_given_out_while_a_view_of_it_lives(free: dict[int, Any], name: str) -> None:
    result = memory.empty(SHAPE, np.float32)
    address = at(result)
    view = VIEWS[name](result)
    del result
    gc.collect()
    others = [memory.empty(SHAPE, np.float32) for _ in range(3)]
    assert not free
    assert all(abs(at(other) - address) >= 2 * MIB for other in others)
    del view
    gc.collect()
    assert [*free] == [address]
    assert at(memory.empty(SHAPE, np.float32)) == address


def test_memory_is_not_given_out_while_another_thread_has_it(free: dict[int, Any]) -> None:
    known, done = Event(), Event()

    def hold(view: list[Any]) -> float:
        held = view.pop()
        known.set()
        done.wait()
        return float(held.sum())

    with ThreadPoolExecutor(1) as other:
        result = memory.empty(SHAPE, np.float32)
        result[:] = 1
        address, view = at(result), [result[5]]
        holding = other.submit(hold, view)
        known.wait()
        del result
        more = memory.empty(SHAPE, np.float32)
        more[:] = 2
        done.set()
        assert holding.result() == 1024
    assert at(more) != address
    gc.collect()
    assert at(memory.empty(SHAPE, np.float32)) == address


def test_results_of_codecs_do_not_change_while_they_are_held() -> None:
    x = np.random.default_rng(0).standard_normal((4, 8192, 128)).astype(np.float32)
    rows = [quant.quantize(part, "q8_0")[100] for part in x]
    back = [quant.dequantize(quant.quantize(part, "q8_0"), "q8_0")[50:60, 3] for part in x]
    for part, row, column in zip(x, rows, back, strict=True):
        assert (quant.quantize(part[100], "q8_0") == row).all()
        np.testing.assert_allclose(column, part[50:60, 3], atol=0.05)


def test_a_result_is_like_any_array(free: dict[int, Any]) -> None:
    for dtype in (np.uint8, np.float32):
        for _ in range(2):
            result = memory.empty((2, 1024, 1024), dtype)
            assert (result.shape, result.dtype) == ((2, 1024, 1024), np.dtype(dtype))
            assert result.flags.c_contiguous
            assert result.flags.writeable
            assert result.flags.aligned
            result[:] = 3
            del result
    assert memory.empty((0, 5), np.float32).shape == (0, 5)
    assert len(free) == 2


def test_small_results_are_not_kept(free: dict[int, Any]) -> None:
    del (result := [memory.empty((MIB // 4 - 1,), np.float32)])[:]
    assert not result
    assert not free


def test_what_is_much_too_large_is_not_used_for_a_smaller_result(free: dict[int, Any]) -> None:
    del (result := [memory.empty((5 * MIB,), np.uint8)])[:]
    assert not result
    small, (address,) = memory.empty((2 * MIB,), np.uint8), free
    assert abs(at(small) - address) >= 2 * MIB
    assert at(memory.empty((3 * MIB,), np.uint8)) == address


@given(sizes=st.lists(st.integers(1 * MIB, 5 * MIB), max_size=30), order=st.randoms(use_true_random=False))
def test_no_more_is_kept_than_may_be(sizes: list[int], order: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        kept: dict[int, NDArray[np.uint8]] = {}
        patch.setattr(memory, "_free", kept)
        patch.setattr(memory, "KEPT", 4 * MIB)
        held: list[NDArray[Any]] = []
        for size in sizes:
            held.append(memory.empty((size,), np.uint8))
            if order.random() < 0.6:
                held.pop(order.randrange(len(held)))
            assert sum(each.nbytes for each in kept.values()) <= 4 * MIB
            spans = sorted((at(each), each.nbytes) for each in [*held, *kept.values()])
            assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        held.clear()
        assert sum(each.nbytes for each in kept.values()) <= 4 * MIB


def test_the_longest_free_goes_first(free: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 4 * MIB)
    held = [memory.empty((2 * MIB,), np.uint8) for _ in range(3)]
    addresses = [at(each) for each in held]
    while held:
        held.pop(0)
    assert [*free] == addresses[1:]


def test_many_threads_make_results_at_once(free: dict[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 6 * MIB)
    interval = sys.getswitchinterval()

    def work(number: int) -> None:
        rng, held = np.random.default_rng(number), []
        for turn in range(150):
            result = memory.empty((int(rng.integers(MIB, 3 * MIB)),), np.uint8)
            result[::4096] = tag = (number * 37 + turn) % 251
            held.append((result[: 1 << 20 : 4096], tag))
            if len(held) > 2:
                view, tag = held.pop(int(rng.integers(0, 3)))
                assert (view == tag).all()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(work, number) for number in range(6)]:
                done.result()
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    assert sum(each.nbytes for each in free.values()) <= 6 * MIB


# how much memory


@pytest.mark.parametrize(
    ("op", "dst", "sources"),
    [
        ("CPY", np.zeros((2048, 2048), np.float16), [np.ones((2048, 2048), np.float32)]),
        ("CONT", np.zeros((2048, 2048), np.float32), [np.ones((2048, 2048), np.float32).T]),
        ("GET_ROWS", np.zeros((4096, 1024), np.float32), [np.ones((99, 1024), np.float32), np.arange(4096) % 99]),
        ("SET_ROWS", np.zeros((4096, 1024), np.float32), [np.ones((4000, 1024), np.float16), np.arange(4000)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mover_makes_no_large_temporary(op: str, dst: NDArray[Any], sources: list[NDArray[Any]]) -> None:
    tensors = [Tensor.of(each.astype(np.int32) if each.dtype == np.int64 else each) for each in sources]
    bind(Node(op, Tensor.of(dst), tuple(tensors)))()
    with threads.allowing(2):
        tracemalloc.start()
        try:
            bind(Node(op, Tensor.of(dst), tuple(tensors)))()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < MIB


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
def test_a_codec_makes_only_its_result(type: str) -> None:
    x = np.ones((4096, 2048), np.float32)
    blocks = quant.quantize(x, type)
    for call, size in ((partial(quant.quantize, x), blocks.nbytes), (partial(quant.dequantize, blocks), x.nbytes)):
        call(type)  # compiled, if it was not
        memory._free.clear()
        tracemalloc.start()
        try:
            result = call(type)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert result.nbytes == size
        assert peak < size + MIB


RESIDENT = """
import sys
from pathlib import Path
import numpy as np
import quant
import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder

MIB = 1 << 20
total = int(sys.argv[1]) * MIB
npu = ggml_backend_npu.register()

def resident(what):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024

def more(call):
    "How many bytes the process had at most while it called, beyond what it had before."
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    result = call()
    return result, resident("VmHWM") - before

def check(what, used, needed):
    print(what, used // MIB, needed // MIB, file=sys.stderr)
    assert used <= needed + 64 * MIB, (what, used // MIB, needed // MIB)

x = np.ones((total // 4096, 1024), np.float32)
for type in ("q8_0", "q4_0"):
    quant.dequantize(quant.quantize(x[:64], type), type)
    blocks, used = more(lambda: quant.quantize(x, type))
    check(f"quantize {type}", used, blocks.nbytes)
    back, used = more(lambda: quant.dequantize(blocks, type))
    check(f"dequantize {type}", used, back.nbytes)
    assert abs(back[-1] - 1).max() < 0.01
    del blocks, back

def computed(name, function, source):
    with Builder(npu.ggml, "NPU") as build:
        root = build.tensor(source, (1024, total // 4096))
        node = function(build, root)
        graph = build.graph_of(node)
        build.set(root, quant.quantize(x, source))
        status, used = more(lambda: build.run(graph))
        assert status == 0, npu.statistics.error
        check(name, used, build.nbytes(node))

n_rows = total // 4096
computed("CPY f32->f16", lambda b, root: b.op("cpy", root, b.tensor("f16", (1024, n_rows))), "f32")
computed("CPY f32->q8_0", lambda b, root: b.op("cpy", root, b.tensor("q8_0", (1024, n_rows))), "f32")
computed("CPY q4_0->f32", lambda b, root: b.op("cpy", root, b.tensor("f32", (1024, n_rows))), "q4_0")
computed("CONT transposed", lambda b, root: b.op("cont", b.permute(root, (1, 0, 2, 3))), "f32")
"""


def resident(mebibytes: int) -> None:
    command = [sys.executable, "-c", RESIDENT, str(mebibytes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_large_tensor_needs_little_more_than_its_result() -> None:
    resident(256)


@pytest.mark.daily(3)
@pytest.mark.slow
def test_a_tensor_of_a_gibibyte_needs_little_more_than_its_result() -> None:
    resident(1024)


@pytest.mark.slow
def test_a_result_that_lives_to_the_end_says_nothing() -> None:
    code = "import numpy, quant; x = quant.quantize(numpy.ones((4096, 1024), 'f'), 'q8_0'); y = [x[1:]]; y.append(y)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    notes = [line for line in result.stderr.splitlines() if not line.startswith("ggml-npu: compiling")]
    assert (result.returncode, notes) == (0, [])
