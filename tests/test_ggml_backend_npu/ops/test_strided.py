"""The compiled mover at the edges of tiles, stages and cache lines: its definition's bytes, and no others touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind, dims
from kit.recipes import Copy, Same
from kit.support import (
    IN_ORDER,
    Bytes,
    Dims,
    Kind,
    Placement,
    Scene,
    assert_equals_cpu,
    assert_same_bytes,
    examples,
    in_pieces,
    kind_for,
    recorded_works,
    seeds,
    values,
)
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Memory, Node, Tensor, default_backend
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.plugin.plugin import Plugin
from quant import blocks, codec, conversions, runs
from quant.kernels import threads
from quant.runs import CACHED

SCALARS = [name for name in quant.type_names() if codec(name).dtype is not None]
CONVERSIONS = [
    *((a, b) for a in ("f32", "f16", "bf16") for b in ("f32", "f16", "bf16") if a != b),
    ("f32", "i32"),
    ("i32", "f32"),
]
EDGES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257]
CANARY = 0xC7


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    axes    its dimensions, those of the smallest strides first
    gaps    elements, or blocks, behind each row, matrix, ... of the memory
    offset  bytes in front of it
    """

    axes: Dims = IN_ORDER
    gaps: tuple[int, int, int] = (0, 0, 0)
    offset: int = 0

    def tensor(self, type: str, ne: Dims) -> Tensor:
        """The tensor, in memory of its own with canaries around it and in its gaps."""
        kind = codec(type)
        units = (ne[0] // kind.block_size, *ne[1:])
        places = [kind.block_bytes]
        for axis, gap in zip(self.axes, self.gaps, strict=False):
            places.append(places[-1] * units[axis] + gap * kind.block_bytes)
        nb = dims(places[self.axes.index(i)] for i in range(4))
        memory = np.full(256 + self.offset + places[3] * units[self.axes[3]], CANARY, np.uint8)
        align = -memory.ctypes.data % 64
        return Tensor("", type, ne, nb, Memory.of(memory), align + 64 + self.offset)


@st.composite
def layouts(draw: st.DrawFn, axes: Dims | None = None) -> Layout:
    first, second, third = (draw(st.sampled_from([0, 0, 1, 5])) for _ in range(3))
    return Layout(axes or dims(draw(st.permutations(IN_ORDER))), (first, second, third), draw(st.integers(0, 63)))


def kind_of(source: str, target: str) -> Kind:
    """As kind_for, with NaNs too: which f16 they become is defined here."""
    return "any" if target == "f16" else kind_for(source, target)


def put(tensor: Tensor, data: NDArray[Any]) -> None:
    """Bytes of its elements or blocks, in order."""
    view = tensor.view()
    view[...] = data.reshape(-1).view(view.dtype).reshape(view.shape)


@pytest.fixture(autouse=True)
def own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compared with the definitions beside them, whatever the ggml of this process makes of q4_0."""
    numerics = default_backend().numerics
    bound = {name: numerics.bound[name] for name in numerics.bound.keys() - {"q4_0"}}
    monkeypatch.setattr(default_backend(), "numerics", replace(numerics, bound=bound))


def assert_defined(
    op: str, dst: Tensor, *src: Tensor, seed: int = 0, streams: bool = False, kernel: Any = None
) -> list[threads.Work]:
    """The compiled kernel, in any pieces, leaves the memory of dst as the definition does. Returns its works."""
    node, before, rng = Node(op, dst, src), dst.memory.bytes().copy(), np.random.default_rng(seed)
    default_backend().ops[op].define(dst, *src)
    expected = dst.memory.bytes().copy()
    with pytest.MonkeyPatch.context() as patch:
        if streams:
            patch.setattr(strided, "CACHED", 0)
        with in_pieces(rng):
            call = bind(node)
            assert isinstance(call, threads.Job)
            for _ in range(2):
                dst.memory.bytes()[:] = before
                call()
                assert_same_bytes(dst.memory.bytes(), expected)
    if kernel is not None:
        assert call.works[-1].block.kernel == kernel.address
    return list(call.works)


def copied(types: tuple[str, str], ne: Dims, src: Layout, dst: Layout, seed: int, **options: Any) -> list[threads.Work]:
    """CPY between two layouts."""
    rng, (source, target) = np.random.default_rng(seed), types
    a, b = src.tensor(source, ne), dst.tensor(target, ne)
    put(a, values(source, prod(ne), rng, kind_of(source, target)))
    return assert_defined("CPY", b, a, seed=seed, **options)


# transpositions


@pytest.mark.some(8)
@pytest.mark.parametrize("types", [(name, name) for name in SCALARS] + CONVERSIONS, ids="->".join)
@examples(80)
@given(
    tile=st.tuples(*[st.sampled_from(EDGES)] * 2),
    more=st.tuples(*[st.integers(1, 3)] * 2),
    order=st.permutations(IN_ORDER),
    src=layouts(),
    dst=layouts(),
    streams=st.booleans(),
    seed=seeds,
)
def test_any_permutation_of_any_size(
    types: tuple[str, str],
    tile: tuple[int, int],
    more: tuple[int, int],
    order: list[int],
    src: Layout,
    dst: Layout,
    streams: bool,
    seed: int,
) -> None:
    ne = dims((*tile, *more)[i] for i in order)
    copied(types, ne, src, dst, seed, streams=streams)


@pytest.mark.parametrize("types", [(name, name) for name in SCALARS] + CONVERSIONS, ids="->".join)
@pytest.mark.parametrize("streams", [False, True])
@examples(30)
@given(
    ne=st.tuples(*[st.sampled_from(EDGES)] * 2),
    gaps=st.tuples(*[st.sampled_from([0, 3])] * 2),
    offsets=st.tuples(*[st.integers(0, 63)] * 2),
    seed=seeds,
)
def test_a_matrix_is_transposed_in_tiles(
    types: tuple[str, str], streams: bool, ne: tuple[int, int], gaps: Any, offsets: Any, seed: int
) -> None:
    src = Layout((1, 0, 2, 3), (gaps[0], 0, 0), offsets[0])
    kernel = strided.transpose if min(ne) > 1 else None
    copied(types, (*ne, 2, 1), src, Layout(IN_ORDER, (gaps[1], 0, 0), offsets[1]), seed, streams=streams, kernel=kernel)


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "f16"), ("i8", "i8"), ("f32", "f16"), ("f16", "f32")])
@pytest.mark.parametrize("streams", [False, True])
@examples(50)
@given(
    unit=st.sampled_from([2, 3, 31, 32, 33, 64, 127, 128, 129, 511, 512, 513, 1024, 1025, 2048, 2049, 4097]),
    heads=st.sampled_from([2, 3, 7, 32, 65]),
    tokens=st.sampled_from([2, 5, 9, 33, 64]),
    n=st.integers(1, 2),
    src=layouts(axes=(0, 2, 1, 3)),
    dst=layouts(axes=IN_ORDER),
    back=st.booleans(),
    seed=seeds,
)
def test_heads_and_tokens_change_places(
    types: tuple[str, str],
    streams: bool,
    unit: int,
    heads: int,
    tokens: int,
    n: int,
    src: Layout,
    dst: Layout,
    back: bool,
    seed: int,
) -> None:
    if back:
        src, dst = dst, src
    kernel = (
        strided.transpose if unit * codec(types[0]).block_bytes <= 2048 and src.gaps[0] == dst.gaps[0] == 0 else None
    )
    if unit * heads * tokens > 1 << 18:
        heads = tokens = 3
    copied(types, (unit, heads, tokens, n), src, dst, seed, streams=streams, kernel=kernel)


@pytest.mark.parametrize("type", SCALARS)
@examples(12)
@given(
    ne=st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES), st.integers(1, 2), st.integers(1, 2)),
    axes=st.permutations(IN_ORDER),
    offset=st.integers(0, 3),
    function=st.sampled_from(["dup", "cont"]),
    cached=st.sampled_from([0, CACHED]),
    seed=seeds,
)
def test_permuted_tensors_are_made_contiguous_as_by_ggmls_cpu(
    backend: Plugin, type: str, ne: Dims, axes: list[int], offset: int, function: str, cached: int, seed: int
) -> None:
    placement = Placement(dims(axes), before=(offset, 0, 0, 0), after=(0, 1, 0, 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "CACHED", cached)
        assert_equals_cpu(backend, Same(function, type, ne, seed, placement))


@pytest.mark.parametrize("types", CONVERSIONS[:6], ids="->".join)
@examples(12)
@given(ne=st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES)), into=st.booleans(), seed=seeds)
@pytest.mark.parametrize("cached", [0, CACHED])
def test_transposed_tensors_are_converted_as_by_ggmls_cpu(
    backend: Plugin, types: tuple[str, str], ne: tuple[int, int], into: bool, cached: int, seed: int
) -> None:
    turned = Placement((1, 0, 2, 3), before=(1, 0, 0, 0), after=(0, 0, 1, 0))
    straight = Placement(before=(3, 0, 0, 0), after=(2, 1, 0, 0))
    src, dst = (straight, turned) if into else (turned, straight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strided, "CACHED", cached)
        assert_equals_cpu(backend, Copy(types, (*ne, 2, 1), None, seed, src, dst))


# past the caches

STREAMED = [
    *(("f32", name) for name in ("f32", "f16", "bf16", "i32", "q8_0", "q4_0")),
    *((name, "f32") for name in ("f16", "bf16", "i32", "q8_0", "q4_0")),
    *(("f16", "q8_0"), ("bf16", "q4_0"), ("f16", "f16"), ("i8", "i8"), ("i64", "i64")),
    *((name, name) for name in ("q8_0", "q4_0", "q6_K")),
]


def row_sizes(type: str, other: str) -> st.SearchStrategy[int]:
    """Elements of a row of 2048 bytes and about, or some stages."""
    block = max(codec(type).block_size, codec(other).block_size)
    at_least = -(-2048 * codec(type).block_size // codec(type).block_bytes // block)
    few = st.sampled_from([0, 1, 2, 3, 7])
    return st.tuples(st.integers(1, 4), few).map(lambda n: block * (n[0] * at_least + n[1]))


@pytest.mark.parametrize("types", STREAMED, ids="->".join)
@examples(40)
@given(data=st.data(), rows=st.integers(1, 4), offsets=st.tuples(*[st.integers(0, 63)] * 2), seed=seeds)
def test_streamed_copies(
    types: tuple[str, str], data: st.DataObject, rows: int, offsets: tuple[int, int], seed: int
) -> None:
    row = data.draw(row_sizes(*types[::-1]))
    gaps = data.draw(st.tuples(st.sampled_from([0, 1]), st.sampled_from([0, 1])))
    if codec(types[1]).is_quantized and types[0] != types[1]:
        gaps = (gaps[0], 0)
    src, dst = (Layout(gaps=(gap, 0, 0), offset=offset) for gap, offset in zip(gaps, offsets, strict=True))
    works = copied(types, (row, rows, 1, 1), src, dst, seed, streams=True, kernel=strided.walk)
    assert streams(works[-1])


def streams(work: threads.Work) -> bool:
    """Whether a walk stores past the caches."""
    return bool(work.parameters[-1])


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "i32", "q8_0", "q4_0"])
@examples(40)
@given(data=st.data(), n_ids=st.integers(1, 9), offsets=st.tuples(*[st.integers(0, 63)] * 2), seed=seeds)
def test_rows_are_gathered_past_the_caches(
    type: str, data: st.DataObject, n_ids: int, offsets: tuple[int, int], seed: int
) -> None:
    target = "i32" if type == "i32" else "f32"
    row, rng = data.draw(row_sizes(target, type)), np.random.default_rng(seed)
    table = Layout(gaps=(data.draw(st.integers(0, 1)), 0, 0), offset=offsets[0]).tensor(type, (row, 5, 2, 1))
    put(table, values(type, row * 10, rng))
    ids = Tensor.of(rng.integers(0, 5, (2, n_ids)).astype(np.int32))
    dst = Layout(gaps=(data.draw(st.integers(0, 1)), 0, 0), offset=offsets[1]).tensor(target, (row, n_ids, 2, 1))
    works = assert_defined("GET_ROWS", dst, table, ids, seed=seed, streams=True)
    assert streams(works[-1])


@pytest.mark.parametrize("types", [(s, d) for s in ("f32", "f16") for d in ("f32", "f16", "bf16", "q8_0", "q4_0")])
@examples(40)
@given(data=st.data(), n_ids=st.integers(1, 9), offsets=st.tuples(*[st.integers(0, 63)] * 2), seed=seeds)
def test_rows_are_scattered_past_the_caches(
    types: tuple[str, str], data: st.DataObject, n_ids: int, offsets: tuple[int, int], seed: int
) -> None:
    source, target = types
    row, rng = data.draw(row_sizes(target, source)), np.random.default_rng(seed)
    src = Layout(gaps=(data.draw(st.integers(0, 1)), 0, 0), offset=offsets[0]).tensor(source, (row, n_ids, 2, 1))
    put(src, values(source, row * n_ids * 2, rng, kind_of(source, target)))
    ids = Tensor.of(rng.integers(0, 10, (2, n_ids)))
    dst = Layout(gaps=(data.draw(st.integers(0, 1)), 0, 0), offset=offsets[1]).tensor(target, (row, 10, 2, 1))
    works = assert_defined("SET_ROWS", dst, src, ids, seed=seed, streams=True)
    assert streams(works[-1])


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
@pytest.mark.parametrize("rounding", quant.ROUNDINGS)
@examples(40)
@given(n=st.integers(1, 400), offsets=st.tuples(*[st.integers(0, 63)] * 2), seed=seeds)
def test_codecs_past_the_caches(name: str, rounding: Any, n: int, offsets: tuple[int, int], seed: int) -> None:
    kind, rng = codec(name), np.random.default_rng(seed)
    assert isinstance(kind, blocks.Compiled)

    def placed(shape: tuple[int, int], dtype: Any, offset: int) -> tuple[Bytes, NDArray[Any]]:
        """Memory, and an array in the middle of it."""
        size = prod(shape) * np.dtype(dtype).itemsize
        memory = np.full(size + 256, CANARY, np.uint8)
        begin = -memory.ctypes.data % 64 + 64 + offset
        return memory, memory[begin : begin + size].view(dtype).reshape(shape)

    x = values("f32", 32 * n, rng, "plain").view(np.float32).reshape(n, 32)
    source = placed((n, 32), np.float32, offsets[0])[1]
    source[...] = x
    memory, target = placed((n, kind.block_bytes), np.uint8, offsets[1])
    expected = memory.copy()
    at = target.ctypes.data - memory.ctypes.data
    expected[at : at + target.nbytes] = kind.define_encode(x, rounding).reshape(-1)
    with pytest.MonkeyPatch.context() as patch, in_pieces(rng):
        patch.setattr(runs, "CACHED", 0)
        blocks._convert(conversions.F32, source, kind.run, target, rounding)
        assert_same_bytes(memory, expected, "encoded")
        floats, back = placed((n, 32), np.float32, offsets[0])
        expected = floats.copy()
        at = back.ctypes.data - floats.ctypes.data
        expected[at : at + back.nbytes] = kind.define_decode(target).reshape(-1).view(np.uint8)
        blocks._convert(kind.run, target, conversions.F32, back)
        assert_same_bytes(floats, expected, "decoded")


# rows by ids in several threads


@pytest.mark.parametrize("cached", [0, CACHED])
@pytest.mark.parametrize("row", [1001, 1002, 1003])
def test_nan_is_the_f16_nan_of_ggmls_cpu_wherever_threads_part_a_row(
    backend: Plugin, row: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strided, "CACHED", cached)
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=3))
    nan = np.random.default_rng(0).integers(0x7F800001, 0x80000000, (600, row), dtype=np.uint32)

    def recipe(scene: Scene) -> int:
        whole = scene.root("f16", (row, 701), np.zeros(row * 701, np.float16))
        cache = scene.view(whole, (row, 700, 1, 1), (2 * row,) * 3, 6)
        ids = scene.root("i64", (600,), np.arange(600) + 50)
        return scene.op("set_rows", cache, scene.root("f32", (row, 600), nan), ids)

    assert_equals_cpu(backend, recipe)


ORDERS: dict[str, Callable[[int, int, np.random.Generator], NDArray[np.int64]]] = {
    "ascending": lambda n, n_rows, rng: np.sort(rng.permutation(n_rows)[:n]),
    "descending": lambda n, n_rows, rng: n_rows - 1 - np.sort(rng.permutation(n_rows)[:n]),
    "permuted": lambda n, n_rows, rng: rng.permutation(n_rows)[:n],
    "the same twice": lambda n, n_rows, rng: np.sort(rng.integers(0, n_rows // 2, n)),
    "anything": lambda n, n_rows, rng: rng.integers(0, n_rows // 4, n),
}
MAY_BE_CUT = {"ascending", "descending", "permuted"}


@pytest.mark.parametrize("order", ORDERS)
@examples(30)
@given(
    n=st.integers(16, 60),
    planes=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    shared=st.booleans(),
    wide=st.booleans(),
    apart=st.integers(1, 3),
    row=st.sampled_from([32, 64]),
    target=st.sampled_from(["f32", "f16", "q8_0"]),
    seed=seeds,
)
def test_rows_are_set_in_pieces(
    order: str, n: int, planes: tuple[int, int], shared: bool, wide: bool, apart: int, row: int, target: str, seed: int
) -> None:
    rng, n_rows = np.random.default_rng(seed), 64
    matrices = 1 if shared else planes[0]
    rows = np.zeros((planes[1], matrices, n * apart), np.int64 if wide else np.int32)
    for i in np.ndindex(rows.shape[:2]):
        rows[i][::apart] = ORDERS[order](n, n_rows, rng)
    src = Tensor.of(rng.standard_normal((planes[1], planes[0], n, row)).astype(np.float32))
    dst = Layout().tensor(target, (row, n_rows, planes[0], planes[1]))
    check, move = assert_defined("SET_ROWS", dst, src, Tensor.of(rows[:, :, ::apart]), seed=seed)
    assert check.block.parts == 1
    assert (move.block.parts > 1) == (order in MAY_BE_CUT)


def test_one_matrix_whose_rows_come_twice_is_enough() -> None:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(50) for _ in range(6)]).reshape(2, 3, 50)
    rows[1, 1, 40] = rows[1, 1, 3]
    src = Tensor.of(rng.standard_normal((2, 3, 50, 8)).astype(np.float32))
    for i in range(5):
        _, move = assert_defined("SET_ROWS", Layout().tensor("f32", (8, 50, 3, 2)), src, Tensor.of(rows), seed=i)
        assert move.block.parts == 1


def test_ids_of_a_graph_are_looked_at_in_every_run() -> None:
    rows, src = np.arange(20), np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    dst = np.zeros((40, 4), np.float32)
    with in_pieces(np.random.default_rng(1)):
        call = bind(Node("SET_ROWS", Tensor.of(dst), (Tensor.of(src), Tensor.of(rows))))
        assert isinstance(call, threads.Job)
        for ids, cut in ((np.arange(20), True), (np.arange(20) // 3, False), (np.arange(20)[::-1], True)):
            rows[:] = ids
            call()
            assert (call.works[1].block.parts > 1) == cut
            expected = dst.copy()
            for i, row in enumerate(ids):
                expected[row] = src[i]
            assert_same_bytes(dst, expected)


@pytest.mark.parametrize("order", ["ascending", "permuted", "anything"])
def test_rows_of_a_very_long_tensor_are_set(order: str) -> None:
    """Which rows were written is not remembered: only ascending ones are known to differ."""
    rng, n_rows = np.random.default_rng(0), (1 << 20) + 3
    rows = ORDERS[order](5000, n_rows, rng)
    rows[-1] = n_rows - 1
    if order == "anything":
        rows[100:200] = rows[300:400]
    src = Tensor.of(rng.standard_normal((5000, 2)).astype(np.float32))
    _, move = assert_defined("SET_ROWS", Layout().tensor("f16", (2, n_rows, 1, 1)), src, Tensor.of(rows))
    assert (move.block.parts > 1) == (order == "ascending")


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_set_by_several_threads(team: str, order: str) -> None:
    rng, n = np.random.default_rng(0), 4000
    rows = ORDERS[order](n, 5000, rng)
    src, dst = rng.standard_normal((n, 128)).astype(np.float32), np.zeros((5000, 128), np.float32)
    expected = dst.copy()
    for i, row in enumerate(rows):
        expected[row] = src[i]
    with recorded_works() as works, threads.allowing(3):
        call = bind(Node("SET_ROWS", Tensor.of(dst), (Tensor.of(src), Tensor.of(rows))))
        for _ in range(5):
            dst[:] = 0
            call()
            assert_same_bytes(dst, expected)
    assert (works[-1].block.parts > 1) == (order in MAY_BE_CUT)
