"""Random nodes: a diagnosis says nothing of right ones, and looks at any wrong one without an error."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.diagnoses import BINARY, floats, found, rope, said, soft_max
from kit.nodes import dims
from kit.paper import Paper, define, results
from kit.recipes import Copy, GetRows, Same, SetRows
from kit.support import Placement, examples, seeds

from ggml_backend_npu import Node
from ggml_backend_npu.ops import OWN
from graph_runner.judging import noise
from graph_runner.judging.compare import compare
from graph_runner.judging.rules import Rules

MOVERS = ["get_rows", "set_rows", "cpy", "cont", "dup", "repeat", "concat"]
KINDS = [*MOVERS, *BINARY, "scale", "clamp", "soft_max", "sum_rows", "argsort", "rope"]


def random_node(seed: int) -> Node:
    rng = np.random.default_rng(seed)
    paper = Paper(seed)
    kind = str(rng.choice(KINDS))
    n = int(rng.integers(1, 5))

    def place(rows: bool = False) -> Placement:
        axes = dims((0, *rng.permutation([1, 2, 3])) if rows else rng.permutation(4))
        before, after = (dims(rng.integers(0, 2, 4)) for _ in range(2))
        steps = dims((1, *rng.integers(1, 3, 3)))
        return Placement(axes, steps, before, after)

    type = str(rng.choice(["f32", "f16", "q8_0", "q4_0"]))
    ne = dims(rng.integers(1, 5, 4))
    rows_of = (32 * ne[0], *ne[1:])
    if kind == "get_rows":
        return GetRows(type, rows_of, n, seed, place(True), place())(paper)
    if kind == "set_rows":
        return SetRows((type, "f32", "i64"), rows_of, min(n, ne[1]), seed, (1, 1), place(True), place(True), place())(
            paper
        )
    if kind == "cpy":
        dst = Placement() if type.startswith("q") else place()
        return Copy(("f32", type), rows_of, None, seed, place(True), dst)(paper)
    if kind in ("cont", "dup"):
        return Same(kind, "f16", ne, seed, place())(paper)
    if kind == "repeat":
        times = [int(i) for i in rng.integers(1, 3, 4)]
        whole = tuple(x * y for x, y in zip(ne, times, strict=True))
        return Node("REPEAT", paper.fresh("f32", whole), (floats(paper, ne, place()),))
    if kind == "concat":
        dim = int(rng.integers(4))
        first, second = floats(paper, ne, place()), floats(paper, (*ne[:dim], n, *ne[dim + 1 :]), place())
        joined = paper.fresh("f32", (*ne[:dim], ne[dim] + n, *ne[dim + 1 :]))
        return Node("CONCAT", joined, (first, second), struct.pack("i", dim))
    if kind == "argsort":
        return paper.op(kind, floats(paper, ne), params=struct.pack("i", int(rng.integers(2))))
    if kind in BINARY:
        repeats = tuple(int(i) for i in rng.integers(1, 3, 4))
        a = tuple(x * y for x, y in zip(ne, repeats, strict=True))
        return paper.op(kind, floats(paper, a, place(True)), floats(paper, ne, place()))
    if kind == "soft_max":
        return soft_max(paper, ne, bias=float(rng.choice([0, 8])))
    if kind == "rope":
        return rope(paper, mode=int(rng.choice([0, 2])))
    params = struct.pack("2f", *np.sort(rng.standard_normal(2)))
    return paper.op(kind, floats(paper, ne), params=params)


random_nodes = seeds.map(random_node)


@pytest.mark.slow
@pytest.mark.daily(2)
@examples(250)
@given(seed=st.integers(0, 1 << 30))
def test_right_nodes_raise_no_alarm(seed: int) -> None:
    def compiled(node: Node) -> None:
        OWN[node.op].bind(node)()

    for i in range(10):
        node = random_node(seed + i)
        assert found(node, define) is None
        assert found(node, compiled) is None


EXACTLY_KNOWN = [
    "RMS_NORM",
    "NORM",
    "L2_NORM",
    "MUL_MAT",
    "SILU",
    "SIGMOID",
    "TANH",
    "EXP",
    "SOFTPLUS",
    "GELU",
    "SWIGLU",
]


def random_node_of_ggml(seed: int) -> Node:
    """Of an op of which this project knows what it is without rounding."""
    rng = np.random.default_rng(seed)
    paper = Paper(seed)
    op = str(rng.choice(EXACTLY_KNOWN))
    ne = (32 * int(rng.integers(1, 4)), *(int(i) for i in rng.integers(1, 4, 3)))
    x = floats(paper, ne)
    if op == "MUL_MAT":
        weights = floats(paper, (ne[0], int(rng.integers(1, 9))), type=str(rng.choice(["f32", "f16", "q8_0"])))
        return Node(op, paper.fresh("f32", (weights.ne[1], *ne[1:])), (weights, x))
    sources = (x, floats(paper, ne)) if op == "SWIGLU" else (x,)
    params = struct.pack("2i", 0, 0) if op == "SWIGLU" else struct.pack("f", 1e-5)
    return Node(op, paper.fresh("f32", ne), sources, params)


def alarm(node: Node, kernel: Callable[[Node], None], right: Callable[[Node], None] = define) -> bool:
    """Whether a diff calls a node wrong: its result is not within the tolerance, or a mistake explains equal bytes."""
    made = results(node, kernel, right)
    comparison = compare(made.expected, made.actual, made.outside)
    allowed = bool(comparison) or Rules().allows(node, made.expected, made.actual, comparison)
    explained = (bool(comparison) or node.op in OWN) and said(node, made) is not None
    return explained or not allowed


@pytest.mark.daily(3)
@pytest.mark.slow
def test_ten_thousand_right_nodes_raise_no_alarm() -> None:
    """Each by two kernels: definition and compiled; of ops that are known exactly: that, and rounded to a neighbour."""

    def compiled(node: Node) -> None:
        OWN[node.op].bind(node)()

    def exact(node: Node) -> None:
        node.dst.view()[...] = noise.exact(node)

    def rounded(node: Node) -> None:
        exact(node)
        node.dst.view()[...] = np.nextafter(node.dst.view(), np.float32(rng.choice([-np.inf, np.inf])))

    rng = np.random.default_rng(0)
    counts = Counter[str]()
    for seed in range(8000):
        node = random_node(seed)
        assert not alarm(node, define), seed
        assert not alarm(node, compiled), seed
        counts[node.op] += 1
    for seed in range(2000):
        node = random_node_of_ggml(seed)
        assert not alarm(node, exact, exact), seed
        assert not alarm(node, rounded, exact), seed
        counts[node.op] += 1
    assert counts.total() == 10_000
    assert set(counts) == {*map(str.upper, KINDS), *EXACTLY_KNOWN}


@examples(150)
@given(node=random_nodes, seed=seeds)
def test_any_wrong_result_is_looked_at_without_an_error(node: Node, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def kernel(node: Node) -> None:
        if rng.integers(2):
            define(node)
        view = node.dst.view()
        where = tuple(slice(int(rng.integers(n)), None) for n in view.shape)
        garbage = rng.integers(0, 256, (*view[where].shape, view.itemsize), dtype=np.uint8)
        view[where] = garbage.view(view.dtype)[..., 0]
        if rng.integers(4) == 0:
            node.dst.memory.bytes()[int(rng.integers(node.dst.memory.size))] = int(rng.integers(256))

    text = found(node, kernel)
    assert text is None or text.startswith(node.op)


@examples(60)
@given(node=random_nodes)
def test_a_node_whose_sources_end_is_looked_at_without_reading_further(node: Node) -> None:
    """Sources alone, without their roots; parameters that are missing."""
    sources = tuple(
        None if source is None else replace(source, memory=replace(source.memory, size=source.offset + source.nbytes))
        for source in node.src
    )
    made = results(node, lambda node: node.dst.view().fill(3) if node.dst.view().dtype != np.uint8 else None)
    for other in (replace(node, src=sources), replace(node, params=b""), replace(node, src=())):
        text = said(other, made)
        assert text is None or text.startswith(node.op)
