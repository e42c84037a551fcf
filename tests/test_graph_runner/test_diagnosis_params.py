"""What a diagnosis says of kernels that leave out a source or a parameter, or swap operands."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.diagnoses import altered, floats, found, ints, multiplied, rope, soft_max
from kit.nodes import src
from kit.paper import Paper, define
from kit.support import Placement

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn


def plain_soft_max(node: Node, mask: bool = True, sinks: bool = True, scale: float | None = None) -> None:
    """softmax in float64, with or without its sources."""
    factor, bias = struct.unpack("2f", node.params)
    x, m, s = (src(node, place) for place in range(3))
    y = x.view().astype(np.float64) * (factor if scale is None else scale)
    if mask:
        heads = np.arange(1, x.ne[2] + 1)
        slope = 2.0 ** (-bias / x.ne[2] * heads) if bias else np.ones(x.ne[2])
        y = y + m.view() * slope[:, None, None]
    e = np.exp(y)
    total = e.sum(-1, keepdims=True)
    if sinks:
        total = total + np.exp(s.view().astype(np.float64)).reshape(1, -1, 1, 1)
    node.dst.view()[...] = e / total


@pytest.mark.parametrize("ne", [(12, 5, 4, 2), (33, 3, 1, 1), (7, 1, 8, 3)])
@pytest.mark.parametrize("bias", [0.0, 8.0])
def test_a_softmax_without_its_mask_sinks_or_scale(ne: tuple[int, ...], bias: float) -> None:
    node = soft_max(Paper(), ne, bias=bias)
    assert found(node, plain_soft_max) is None
    text = str(found(node, lambda node: plain_soft_max(node, mask=False)))
    assert text.startswith("SOFT_MAX leaves out src1 (the mask), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, sinks=False)))
    assert text.startswith("SOFT_MAX leaves out src2 (the sinks), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, mask=False, sinks=False)))
    assert text.startswith("SOFT_MAX leaves out src1 (the mask) and src2 (the sinks), which gives")
    text = str(found(node, lambda node: plain_soft_max(node, scale=1.0)))
    assert text.startswith("SOFT_MAX ignores the scale 0.25: with 1 in its place it gives")


def test_a_softmax_that_reads_its_mask_wrongly() -> None:
    paper = Paper()
    mask = floats(paper, (12, 5, 2, 2), Placement(after=(4, 3, 0, 0)))
    node = paper.op("soft_max", floats(paper, (12, 5, 4, 2)), mask, params=struct.pack("2f", 0.5, 0))
    row, matrix, cube = mask.nb[1:]
    text = f"SOFT_MAX ignores nb[1] of src1 (the mask): with 48 in place of {row} it gives exactly these bytes"
    assert found(node, altered(1, nb=(4, 48, matrix, cube))) == text
    text = (
        f"SOFT_MAX ignores nb[2] of src1 (the mask): with {5 * row} in place of {matrix} it gives exactly these bytes"
    )
    assert found(node, altered(1, nb=(4, row, 5 * row, cube))) == text
    heads = Tensor.of(np.repeat(mask.view(), 2, 1))
    text = "SOFT_MAX repeats src1 (the mask) element by element along dimension 2, not as a whole"
    kernel = found(node, lambda node: define(replace(node, src=(src(node), heads))))
    assert kernel == f"{text}, which gives exactly these bytes"


PARAMS = [
    ("scale", "2f", (0.5, 3.0), (1.0, 3.0), "SCALE ignores the scale 0.5"),
    ("scale", "2f", (0.5, 3.0), (0.5, 0.0), "SCALE ignores the bias 3"),
    ("clamp", "2f", (-0.5, 0.25), (-np.inf, 0.25), "CLAMP ignores the minimum -0.5"),
    ("clamp", "2f", (-0.5, 0.25), (-0.5, np.inf), "CLAMP ignores the maximum 0.25"),
    ("argsort", "i", (1,), (0,), "ARGSORT takes order 0 in place of 1"),
]


@pytest.mark.parametrize(("function", "format", "right", "wrong", "text"), PARAMS)
def test_a_parameter_that_is_ignored(function: str, format: str, right: Any, wrong: Any, text: str) -> None:
    paper = Paper()
    node = paper.op(function, floats(paper, (9, 5, 2)), params=struct.pack(format, *right))
    other = struct.pack(format, *wrong)
    assert str(found(node, lambda node: define(replace(node, params=other)))).startswith(text)


def test_a_rope_that_is_wrong() -> None:
    paper = Paper()
    node = rope(paper)
    x, positions, factors = (src(node, place) for place in range(3))
    factors.view()[...] = np.abs(factors.view()) + 1

    def other(**changes: Any) -> str:
        params = rope(Paper(), **changes).params
        return str(found(node, lambda node: define(replace(node, params=params))))

    assert other(mode=2).startswith("ROPE takes mode (0 normal, 2 neox) 2 in place of 0")
    assert other(base=10000.0).startswith("ROPE ignores the frequency base 5000: with 10000 in its place")
    assert other(scale=1.0).startswith("ROPE ignores the frequency scale 0.5")
    without = found(node, lambda node: define(replace(node, src=(x, positions, None))))
    assert str(without).startswith("ROPE leaves out src2 (the frequency factors)")
    moved = ints(paper, positions.view() + 1)
    text = found(node, lambda node: define(replace(node, src=(x, moved, factors))))
    assert str(text).startswith("ROPE takes position + 1 for each of src1 (the positions)")


def test_operands() -> None:
    paper = Paper()
    node = paper.op("sub", floats(paper, (6, 4)), floats(paper, (6, 4)))
    a, b = src(node), src(node, 1)
    assert str(found(node, lambda node: define(replace(node, src=(b, a))))).startswith("SUB swaps src0 and src1")
    node = paper.op("add", *node.src)
    assert "ADD gives src0 as it is: src1 has no effect" in str(
        found(node, lambda node: OWN["CPY"].define(node.dst, a))
    )


def test_an_eps_that_is_ignored() -> None:
    paper = Paper()
    node = paper.op("rms_norm", floats(paper, (16, 5)), params=struct.pack("f", 0.125))

    def kernel(node: Node) -> None:
        x = src(node).view()
        node.dst.view()[...] = x / np.sqrt(np.square(x).mean(-1, keepdims=True))

    assert str(found(node, kernel, multiplied)).startswith(
        "RMS_NORM ignores the eps 0.125: with 0 in its place it gives"
    )


def test_groups_of_heads_that_are_padded_to_a_power_of_two() -> None:
    paper = Paper()
    q, (k, v) = floats(paper, (32, 3, 6)), (floats(paper, (32, 20, 2), type="f16") for _ in range(2))
    params = FlashAttn(0.2, 0.0, 0.0, 0, 0).packed
    node = Node("FLASH_ATTN_EXT", paper.fresh("f32", (32, 6, 3, 1)), (q, k, v), params)
    heads = [0, 0, 0, 0, 1, 1]  # of 3 padded to 4
    k, v = (Tensor.of(np.ascontiguousarray(each.view()[:, heads]), "f16") for each in (k, v))
    text = "FLASH_ATTN_EXT has head h of src0 meet head h // 4 of src1 and src2, a power of two, not h // 3"
    assert str(found(node, lambda node: define(replace(node, src=(q, k, v))))).startswith(text)


def test_groups_of_heads_that_repeat_as_a_whole() -> None:
    paper = Paper()
    n_state, dim, n_head, n_group, n_tokens = 8, 4, 4, 2, 3
    s, x = floats(paper, (n_state, dim, n_head)), floats(paper, (dim, n_head, n_tokens))
    dt, a = floats(paper, (n_head, n_tokens)), floats(paper, (1, n_head))
    b, c = (floats(paper, (n_state, n_group, n_tokens)) for _ in range(2))
    dst = paper.fresh("f32", (x.n_elements + s.n_elements, 1, 1, 1))
    node = Node("SSM_SCAN", dst, (s, x, dt, a, b, c, ints(paper, [0])), struct.pack("i", 1))
    wide = (Tensor.of(np.ascontiguousarray(each.view()[:, :, [0, 1, 0, 1]])) for each in (b, c))
    text = "SSM_SCAN has head h take group h % 2 of src4 and src5, not h // 2"
    assert str(found(node, lambda node: define(replace(node, src=(s, x, dt, a, *wide, node.src[6]))))).startswith(text)


def test_a_rope_that_copies_the_rest_as_it_lies() -> None:
    paper = Paper()
    node = rope(paper)
    x = floats(paper, (24, 3, 5), Placement(after=(8, 0, 0, 0)))
    node = replace(node, src=(x, *node.src[1:]))

    def kernel(node: Node) -> None:
        define(node)
        flat = x.memory.bytes()[x.offset : x.offset + 4 * x.n_elements].view(np.float32)
        node.dst.view()[..., 16:] = flat.reshape(x.ne[::-1])[..., 16:]

    text = "ROPE copies what it does not rotate of src0, elements 16 and on, as if there were no gaps"
    assert str(found(node, kernel)).startswith(text)


def test_an_argsort_of_a_power_of_two() -> None:
    paper = Paper()
    node = paper.op("argsort", floats(paper, (9, 5)), params=struct.pack("i", 1))

    def kernel(node: Node) -> None:
        order = np.argsort(-src(node).view()[..., :8], kind="stable")
        node.dst.view()[...] = np.concatenate([order, np.full_like(order[..., :1], 8)], axis=-1)

    assert str(found(node, kernel)).startswith("ARGSORT sorts the first 8 elements of each row, a power of two")
