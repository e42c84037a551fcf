"""Nodes over copies between fences: what overlaps still does; damage that a kernel does is found, or a signal."""

from __future__ import annotations

import gc
import signal
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import assert_same_bytes, seeds
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml import fenced as fences
from ggml_backend_npu.ggml.fenced import ALIGNMENT, MARGIN, fenced, is_damaged
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.ops import OWN
from graph_runner.judging import copies
from graph_runner.judging.copies import Copied, Kept, Layout, continues_dst, restored, span
from quant import quantize

Bytes = NDArray[np.uint8]


def any_bytes(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


# memory between fences


@given(seed=seeds, size=st.integers(0, 20000), beyond=st.integers(0, ALIGNMENT - 1))
def test_fenced_memory_holds_the_bytes_aligned_as_they_were(seed: int, size: int, beyond: int) -> None:
    data = any_bytes(seed, size)
    memory, offset = fenced(Memory.of(data), beyond)
    assert (memory.address + offset) % ALIGNMENT == beyond
    assert_same_bytes(memory.bytes()[offset : offset + size], data)
    assert MARGIN <= memory.size - offset - size < MARGIN + ALIGNMENT
    assert offset >= MARGIN
    assert not is_damaged(memory, offset, size)
    memory.bytes()[offset : offset + size] ^= 0xFF
    assert not is_damaged(memory, offset, size)


@given(seed=seeds, size=st.integers(0, 9000), after=st.booleans(), data=st.data())
def test_a_byte_beside_fenced_memory_is_found(seed: int, size: int, after: bool, data: st.DataObject) -> None:
    memory, offset = fenced(Memory.of(any_bytes(seed, size)), 48)
    at = data.draw(st.integers(offset + size, memory.size - 1) if after else st.integers(0, offset - 1))
    memory.bytes()[at] ^= data.draw(st.integers(1, 255))
    assert is_damaged(memory, offset, size)


TOUCHES = """
import sys
import numpy as np
from ggml_backend_npu.ggml.fenced import fenced
from ggml_backend_npu.ir import Memory

size, place, writes = (int(argument) for argument in sys.argv[1:])
memory, offset = fenced(Memory.of(np.zeros(size, np.uint8)))
byte = Memory(memory.address + (memory.size + place if place >= 0 else place), 1).bytes()
memory.bytes()[0] = memory.bytes()[-1] = 1
print("within", flush=True)
if writes:
    byte[0] = 1
print(byte[0])
"""


@pytest.mark.some(3)
@pytest.mark.parametrize("writes", [0, 1], ids=["reads", "writes"])
@pytest.mark.parametrize("place", [0, -1, 16 * 1024, (16 << 20) - 1, -(16 << 20)])
def test_who_touches_a_fence_gets_a_signal(place: int, writes: int) -> None:
    command = [sys.executable, "-c", TOUCHES, "5000", str(place), str(writes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "within\n"), done.stderr


def test_fenced_memory_is_used_again_when_nobody_has_any_of_it() -> None:
    size = 37 * 4096 + 5
    memory, offset = fenced(Memory.of(any_bytes(0, size)))
    address, view = memory.address, memory.bytes()[offset : offset + 9]
    del memory
    gc.collect()
    assert fenced(Memory.of(any_bytes(1, size)))[0].address != address
    assert_same_bytes(view, any_bytes(0, size)[:9])
    del view
    gc.collect()
    again, offset = fenced(Memory.of(any_bytes(2, size)))
    assert again.address == address
    assert not is_damaged(again, offset, size)


def test_no_more_fenced_memory_is_kept_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences, "_free", defaultdict(list))
    monkeypatch.setattr(fences._Room, "n_free", 0)
    monkeypatch.setattr(fences, "_KEPT", 1 << 20)
    held = [fenced(Memory.of(any_bytes(0, 300_000))) for _ in range(9)]
    held.clear()
    gc.collect()
    assert 0 < sum(size * len(rooms) for size, rooms in fences._free.items()) <= 1 << 20


# copies of a node


def floats(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


def add_in_place() -> Node:
    """a += b, where b lies in the same memory after a."""
    memory = Memory.of(floats(4, 16))
    a = Tensor("a", "f32", (16, 2, 1, 1), (4, 64, 128, 128), memory, 0)
    b = Tensor("b", "f32", (16, 2, 1, 1), (4, 64, 128, 128), memory, 128)
    return Node("ADD", replace(a, name="dst"), (a, b))


def get_rows(gap: int = 0) -> Node:
    """Three rows, `gap` floats apart."""
    table, ids = Tensor.of(floats(8, 16), name="table"), Tensor.of(np.array([3, 0, 5], np.int32), name="ids")
    room = Memory.of(floats(3, 16 + gap))
    dst = Tensor("rows", "f32", (16, 3, 1, 1), (4, 4 * (16 + gap), 4 * 3 * (16 + gap), 4 * 3 * (16 + gap)), room)
    return Node("GET_ROWS", dst, (table, ids))


def set_rows(type: str = "f32") -> Node:
    """Two rows of a cache of eight, which is a source, too."""
    x = floats(8, 64)
    cache = Tensor.of(x if type == "f32" else quantize(x, type).reshape(8, -1), type, "cache")
    src, ids = Tensor.of(floats(2, 64), name="src"), Tensor.of(np.array([6, 1], np.int64), name="ids")
    return Node("SET_ROWS", cache, (src, ids, cache))


def define(node: Node) -> None:
    OWN[node.op].bind(node)()


NODES = {"in place": add_in_place, "of its own": get_rows, "with gaps": lambda: get_rows(3), "a cache": set_rows}


def apart(tensors: list[Tensor]) -> list[int | None]:
    """How far those that overlap are apart."""
    return [a.address - b.address if a.overlaps(b) else None for a in tensors for b in tensors]


@pytest.mark.parametrize("make", NODES.values(), ids=NODES)
def test_copies_hold_the_same_and_overlap_as_the_tensors_do(make: Callable[[], Node]) -> None:
    node = make()
    again = Copied.of(node).node
    old, new = ([each.dst, *(source for source in each.src if source)] for each in (node, again))
    for a, b in zip(old, new, strict=True):
        assert (a.name, a.type, a.ne, a.nb, a.address % ALIGNMENT) == (
            b.name,
            b.type,
            b.ne,
            b.nb,
            b.address % ALIGNMENT,
        )
        assert_same_bytes(span(a), span(b))
        assert not any(a.overlaps(tensor) for tensor in new)
    apart = [
        [a.address - b.address if a.overlaps(b) else None for a in tensors for b in tensors] for tensors in (old, new)
    ]
    assert apart[0] == apart[1]
    before = [span(tensor) for tensor in old]
    define(again)
    for held, tensor in zip(before, old, strict=True):
        assert_same_bytes(held, span(tensor))
    define(node)
    assert_same_bytes(span(again.dst), span(node.dst))


def test_an_output_begins_as_nan_but_for_its_gaps() -> None:
    node = get_rows(3)
    blank = Copied.of(node, blanks=True)
    assert np.isnan(blank.node.dst.view()).all()
    rows = span(blank.node.dst)[: 2 * 76].reshape(2, 76)
    assert (rows[:, :64] == 0xFF).all()
    assert_same_bytes(rows[:, 64:], span(node.dst)[: 2 * 76].reshape(2, 76)[:, 64:])
    assert_same_bytes(span(blank.before), span(blank.node.dst))
    define(blank.node)
    assert (span(blank.before)[:64] == 0xFF).all()
    assert blank.changed() == []
    assert not blank.outside()


def test_a_copy_onto_a_tensor_begins_blank_though_that_is_a_source() -> None:
    x, dst = Tensor.of(floats(2, 32)), Tensor.of(np.zeros((2, 32), np.float16))
    node = Node("CPY", dst, (x, dst))
    assert not continues_dst(node)
    copied = Copied.of(node, blanks=True)
    assert np.isnan(copied.node.dst.view()).all()


@pytest.mark.parametrize("make", [add_in_place, set_rows, lambda: set_rows("q8_0")], ids=["in place", "f32", "q8_0"])
def test_what_a_node_goes_on_from_stays(make: Callable[[], Node]) -> None:
    node = make()
    assert continues_dst(node)
    copied = Copied.of(node, blanks=True)
    assert_same_bytes(span(copied.node.dst), span(node.dst))
    define(copied.node)
    assert_same_bytes(span(copied.before), span(node.dst))


def test_a_source_that_is_changed_is_named_by_its_index() -> None:
    copied = Copied.of(get_rows())
    assert copied.changed() == []
    assert copied.node.src[1] is not None
    copied.node.src[1].view()[0, 0, 0, 1] += 1
    assert copied.changed() == [1]


def test_a_source_in_whose_place_the_output_lies_may_change() -> None:
    copied = Copied.of(add_in_place())
    define(copied.node)
    assert copied.changed() == []
    assert copied.node.src[1] is not None
    assert not copied.outside()
    copied.node.src[1].view()[0, 0, 1, 3] = 0
    assert copied.outside(), "b lies in the memory that a is a view of"


@pytest.mark.parametrize("place", [-1, 0, MARGIN - 1, -MARGIN])
def test_bytes_written_around_any_copy_are_outside(place: int) -> None:
    for role in range(3):
        copied = Copied.of(get_rows())
        tensor = [copied.node.dst, *copied.node.src][role]
        assert tensor is not None
        assert not copied.outside()
        Memory(tensor.end + place if place >= 0 else tensor.address + place, 1).bytes()[:] ^= 1
        assert copied.outside()


def test_what_a_source_holds_beyond_the_output_that_lies_in_it_is_outside() -> None:
    memory = Memory.of(floats(8, 16))
    whole = Tensor("whole", "f32", (16, 8, 1, 1), (4, 64, 512, 512), memory)
    dst = Tensor("dst", "f32", (16, 2, 1, 1), (4, 64, 128, 128), memory, 192)
    for place, found in ((-1, True), (0, False), (127, False), (128, True)):
        copied = Copied.of(Node("ADD", dst, (dst, whole)))
        Memory(copied.node.dst.address + place, 1).bytes()[:] ^= 1
        assert copied.outside() == found, place


@pytest.mark.parametrize("type", ["q8_0", "q4_0"])
def test_copies_in_the_device_s_layout(type: str) -> None:
    node = set_rows(type)
    copied = Copied.of(node, lambda tensor: tensor.name == "cache", blanks=True)
    assert copied.node.dst.packed is not None
    assert copied.node.src[0] is not None
    assert copied.node.src[0].packed is None
    assert_same_bytes(span(copied.node.dst), span(node.dst))
    before = span(node.dst)
    define(copied.node)
    assert_same_bytes(span(copied.before), before)
    define(node)
    assert_same_bytes(span(copied.node.dst), span(node.dst))
    assert copied.changed() == []
    assert not copied.outside()


def test_only_blocks_of_a_type_that_has_one_lie_in_the_device_s_layout() -> None:
    for node in (get_rows(), set_rows(), set_rows("q8_0")):
        made = Copied.of(node, lambda tensor: True).node
        packed = [tensor.type for tensor in (made.dst, *made.src) if tensor is not None and tensor.packed is not None]
        assert set(packed) <= {"q8_0"}
        assert bool(packed) == (node.dst.type == "q8_0")


@pytest.mark.parametrize("packed", [False, True], ids=["blocks", "device layout"])
def test_a_node_is_restored_as_it_was_before_it_ran(packed: bool) -> None:
    like = set_rows("q8_0")
    if packed:
        storage = like.dst.memory.bytes()
        cache = replace(like.dst, packed=Packed.of("q8_0", like.dst.address, storage))
        like = replace(like, dst=cache, src=(*like.src[:2], cache))
    held = Copied.of(like).node
    define(like)
    again = restored(like, held)
    assert (again.dst.packed is not None) == packed
    assert again.src[2] is not None
    assert again.src[2].address == again.dst.address
    for a, b in zip((again.dst, *again.src), (held.dst, *held.src), strict=True):
        assert a is not None
        assert b is not None
        assert_same_bytes(span(a), span(b))
    define(again)
    assert_same_bytes(span(again.dst), span(like.dst))


def test_tensors_of_no_elements_stay_as_they_are() -> None:
    empty = Tensor.of(np.zeros((0, 8), np.float32), name="empty")
    copied = Copied.of(Node("SCALE", empty, (empty,), struct.pack("2f", 2, 0)))
    assert copied.node.dst is empty
    assert copied.node.src == (empty,)
    assert not copied.outside()


# a node that comes again


def tensors_of(node: Node) -> list[Tensor]:
    return [tensor for tensor in (node.dst, *node.src) if tensor is not None]


@pytest.mark.parametrize("make", NODES.values(), ids=NODES)
def test_copies_that_are_kept_are_as_new_ones(make: Callable[[], Node]) -> None:
    node = make()
    layout = Layout(node, blanks=True)
    for seed in range(4):
        if node.op != "GET_ROWS":
            node.dst.memory.bytes()[:] = any_bytes(seed, node.dst.memory.size) % 60
        again, new = layout.copied(), Copied.of(node, blanks=True)
        for time in range(2):
            if time:
                again.reset()
                new.reset()
            assert_same_bytes(span(again.node.dst), span(new.node.dst))
            define(again.node)
            define(new.node)
            for a, b in zip(tensors_of(again.node), tensors_of(new.node), strict=True):
                assert_same_bytes(span(a), span(b))
            assert_same_bytes(span(again.before), span(new.before))
            assert again.changed() == new.changed() == []
            assert not again.outside()


@pytest.mark.parametrize(("small", "first"), [(0, 1), (1 << 16, 0)])
def test_copies_lie_where_they_did(small: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_SMALL", small)
    layout = Layout(get_rows(), blanks=True)
    seen = [layout.copied() for _ in range(4)]
    assert [seen.index(each) for each in seen] == [min(each, first) for each in range(4)]
    layout.forget()
    assert layout.copied() is not seen[-1]


def test_nodes_share_the_copies_of_weights_until_one_damages_them() -> None:
    kept, node = Kept(), get_rows()
    table = node.src[0]
    assert table is not None
    layouts = [Layout(node, blanks=True, weights={id(table)}, kept=kept) for _ in range(2)]

    def tables() -> list[Tensor]:
        sources = [layout.copied().node.src[0] for layout in layouts]
        return [source for source in sources if source is not None]

    a, b = tables()
    assert a.address == b.address
    a.memory.bytes()[0] ^= 1
    assert layouts[0].copied().changed() == [0]
    layouts[0].forget()
    a, b = tables()
    assert a.address == b.address
    assert_same_bytes(span(a), span(table))


def test_what_is_kept_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_MOST_KEPT", 100)
    kept, layout = Kept(), Layout(get_rows(), blanks=True)
    assert [kept.takes(60), kept.takes(60), kept.takes(40), kept.takes(1)] == [True, False, True, False]
    kept.gives(40)
    assert kept.takes(1)
    assert layout.copied() is not layout.copied() is not layout.copied()
