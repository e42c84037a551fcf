"""What a diagnosis says of sums of which a part is left out, and of rows that are read from a wrapped offset."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from kit.diagnoses import floats, found, multiplied
from kit.nodes import src as given
from kit.paper import Paper, define

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops.attention import FlashAttn

HEADS, KV_HEADS, WIDTH = 4, 2, 32
CELLS, QUERIES = 96, 5


def attention(paper: Paper, cells: int = CELLS, queries: int = QUERIES, type: str = "f16") -> Node:
    """Each query sees its own and all earlier cells."""
    q = floats(paper, (WIDTH, queries, HEADS))
    k, v = (floats(paper, (WIDTH, cells, KV_HEADS), type=type) for _ in range(2))
    mask = floats(paper, (cells, queries), type="f16")
    last = np.arange(cells) > cells - queries + np.arange(queries)[:, None]
    mask.view()[...] = np.where(last, -np.inf, 0.0)
    params = FlashAttn(WIDTH**-0.5, 0.0, 0.0, prec=0, n_kv_max=0)
    return Node("FLASH_ATTN_EXT", paper.fresh("f32", (WIDTH, HEADS, queries)), (q, k, v, mask, None), params.packed)


def lost(begin: int, end: int, heads: slice = slice(None)) -> Callable[[Node], None]:
    """Attention that loses cells in some heads."""

    def kernel(node: Node) -> None:
        define(node)
        right, mask = node.dst.view().copy(), given(node, 3)
        seen = mask.view().copy()
        seen[..., begin:end] = -np.inf
        define(replace(node, src=(*node.src[:3], Tensor.of(seen, "f16"), None)))
        wrong = node.dst.view()[:, :, heads].copy()
        node.dst.view()[...] = right
        node.dst.view()[:, :, heads] = wrong

    return kernel


@pytest.mark.some(2)
@pytest.mark.daily(3)
@pytest.mark.parametrize("type", ["f16", "q8_0"])
@pytest.mark.parametrize(("begin", "end"), [(16, 32), (0, 8), (64, CELLS - QUERIES), (13, 37)])
def test_cells_that_attention_leaves_out(begin: int, end: int, type: str) -> None:
    node = attention(Paper(begin), type=type)
    text = f"FLASH_ATTN_EXT leaves out cells {begin} to {end - 1} of src1 and src2, which gives these values"
    assert found(node, lost(begin, end)) == text


def test_cells_that_attention_leaves_out_among_many_queries() -> None:
    text = "FLASH_ATTN_EXT leaves out cells 32 to 63 of src1 and src2, which gives these values"
    assert found(attention(Paper(), queries=70), lost(32, 64)) == text


def test_cells_that_some_heads_leave_out() -> None:
    said = str(found(attention(Paper()), lost(24, 40, slice(1, 3))))
    assert said.startswith("FLASH_ATTN_EXT leaves out cells 24 to 39 of src1 and src2, in rows 1 to 2 of each matrix")


@pytest.mark.parametrize(("begin", "end"), [(32, 64), (112, 128), (5, 9)])
def test_elements_that_a_product_leaves_out(begin: int, end: int) -> None:
    paper = Paper()
    a, b = floats(paper, (128, 12, 2)), floats(paper, (128, 5, 4))
    node = Node("MUL_MAT", paper.fresh("f32", (12, 5, 4)), (a, b), struct.pack("2i", 0, 0))

    def kernel(node: Node) -> None:
        part = given(node, 1).view().copy()
        part[..., begin:end] = 0
        multiplied(replace(node, src=(node.src[0], Tensor.of(part))))

    text = f"MUL_MAT leaves out elements {begin} to {end - 1} of each row of src0 and src1, which gives these values"
    assert found(node, kernel, multiplied) == text


def test_elements_that_a_softmax_leaves_out() -> None:
    paper = Paper()
    node = paper.op("soft_max", floats(paper, (64, 6, 3)), params=struct.pack("2f", 1.0, 0.0))

    def kernel(node: Node) -> None:
        part = given(node, 0).view().copy()
        part[..., 32:48] = -np.inf
        define(replace(node, src=(Tensor.of(part),)))

    text = "SOFT_MAX leaves out elements 32 to 47 of each row of src0, which gives these values"
    assert found(node, kernel) == text


@pytest.mark.slow
@pytest.mark.daily(2)
@pytest.mark.parametrize("seed", range(2))
def test_other_faults_are_no_lost_parts(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def noisy(node: Node) -> None:
        define(node)
        node.dst.view()[...] *= 1 + 0.3 * rng.standard_normal(node.dst.view().shape)

    def exchanged(node: Node) -> None:
        order = rng.permutation(CELLS)
        v = given(node, 2)
        define(replace(node, src=(*node.src[:2], Tensor.of(v.view()[:, :, order].copy(), "f16"), *node.src[3:])))

    for kernel in (noisy, exchanged):
        assert "leaves out" not in str(found(attention(Paper(seed)), kernel))


@pytest.mark.parametrize("bits", [12, 13])
def test_offsets_of_rows_in_too_few_bits(bits: int) -> None:
    node = attention(Paper(), queries=70)
    mask = given(node, 3)
    offsets = np.arange(mask.ne[1]) * mask.nb[1]

    def kernel(node: Node) -> None:
        rows = [mask.memory.bytes()[at : at + mask.nb[1]] for at in offsets % (1 << bits)]
        wrapped = Tensor.of(np.stack(rows).view(np.float16).reshape(1, 1, *mask.ne[1::-1]), "f16")
        define(replace(node, src=(*node.src[:3], wrapped, None)))

    first = offsets[offsets >= 1 << bits][0]
    assert found(node, kernel) == (
        f"FLASH_ATTN_EXT keeps the offset of a row of src3 (the mask) in {bits} bits: it reads byte "
        f"{first % (1 << bits)} in place of byte {first}, and so on, which gives exactly these bytes"
    )
