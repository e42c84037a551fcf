"""Nodes of every op that rounds on its way, and what right and wrong kernels make of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from paper import copy_of, define
from support import values as any_blocks

import quant
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from graph_runner import noise
from graph_runner.rules import type_of
from quant import codec

Rng = np.random.Generator
Types = tuple[str, ...]  # of dst and of the sources
Make = Callable[[Rng, Types], Node]
Exact = NDArray[np.float64]
Fault = Callable[[Node], Exact | Node]  # what a wrong kernel writes, or the node that it computes in place of this one

HEADS, TOKENS = 4, 6


def tensor(type: str, x: NDArray[Any]) -> Tensor:
    """Values as a tensor of a type, rounded; blocks of any bits where no quantiser is there."""
    x = np.asarray(x)
    if codec(type).dtype is not None and type != "bf16":
        return Tensor.of(x.astype(codec(type).dtype))
    if type == "bf16":
        return Tensor.of(x.astype(ml_dtypes.bfloat16))
    kind = codec(type)
    try:
        blocks = quant.quantize(x.astype(np.float32), type)
    except Exception:
        blocks = any_blocks(type, x.size, np.random.default_rng(x.size))
    return Tensor.of(
        np.ascontiguousarray(blocks).reshape(*x.shape[:-1], x.shape[-1] // kind.block_size * kind.block_bytes), type
    )


def normal(rng: Rng, type: str, *shape: int, size: float = 1.0) -> Tensor:
    return tensor(type, size * rng.standard_normal(shape))


def node(op: str, type: str, shape: tuple[int, ...], *src: Tensor | None, params: bytes = b"") -> Node:
    return Node(op, tensor(type, np.zeros((1,) * (4 - len(shape)) + shape)), src, params + bytes(64 - len(params)))


def of_rows(op: str, width: int = 512, params: bytes = b"", size: float = 0.1, dst: int = 0) -> Make:
    """A row of dst, or `dst` elements of it, from each of 5 x 3 rows, of which one is small."""

    def make(rng: Rng, types: Types) -> Node:
        x = size * rng.standard_normal((1, 3, 5, width))
        x[0, 1, 2] /= 8
        return node(op, types[0], (1, 3, 5, dst or width), tensor(types[1], x), params=params)

    return make


def of_elements(op: str, low: float = -6, high: float = 6, params: bytes = b"") -> Make:
    def make(rng: Rng, types: Types) -> Node:
        return node(op, types[0], (1, 3, 5, 64), tensor(types[1], rng.uniform(low, high, (1, 3, 5, 64))), params=params)

    return make


def gated(op: str, alpha: float = 0.0, limit: float = 0.0) -> Make:
    def make(rng: Rng, types: Types) -> Node:
        a, b = (tensor(types[1], rng.uniform(-6, 6, (1, 3, 5, 64))) for _ in range(2))
        return node(op, types[0], (1, 3, 5, 64), a, b, params=struct.pack("2i2f", 0, 0, alpha, limit))

    return make


def sum_of_all(rng: Rng, types: Types) -> Node:
    return node("SUM", types[0], (1, 1, 1, 1), normal(rng, types[1], 1, 3, 5, 64))


def arange(rng: Rng, types: Types) -> Node:
    return node("ARANGE", "f32", (1, 1, 1, 200), params=struct.pack("3f", -3.3, 16.7, 0.1))


def group_norm(rng: Rng, types: Types) -> Node:
    x = 0.1 * rng.standard_normal((2, 8, 5, 16)) + 0.05
    return node("GROUP_NORM", "f32", (2, 8, 5, 16), tensor("f32", x), params=struct.pack("if", 2, 1e-6))


def pool_2d(rng: Rng, types: Types) -> Node:
    params = struct.pack("7i", 1, 3, 2, 2, 1, 1, 0)
    return node("POOL_2D", "f32", (2, 3, 9, 20), normal(rng, types[1], 2, 3, 10, 39), params=params)


def soft_max(rng: Rng, types: Types) -> Node:
    x, mask = normal(rng, "f32", 2, HEADS, TOKENS, 96, size=4), normal(rng, "f16", 1, 1, TOKENS, 96)
    mask.view()[..., ::5] = -np.inf
    params, sinks = struct.pack("2f", 0.6, 8.0), normal(rng, "f32", 1, 1, 1, HEADS)
    return node("SOFT_MAX", "f32", (2, HEADS, TOKENS, 96), x, mask, sinks, params=params)


def rope(op: str, mode: int, positions: list[int], ext: float = 0.0) -> Make:
    def make(rng: Rng, types: Types) -> Node:
        n_dims, width = (32, 64) if mode == 24 else (64, 80)
        sections = (8, 8, 8, 8) if mode == 24 else (12, 10, 8, 2)
        params = struct.pack("5i6f5i", 0, n_dims, mode, 0, 512, 1e4, 1 - ext / 2, ext, 1, 32, 1, *sections, 0)
        at = np.int32(positions)
        at = np.concatenate([at, at[::-1], at // 2, at * 0 + 3]) if mode & 8 else at
        x = normal(rng, types[1], 1, len(positions), HEADS, width)
        factors = None if mode & 8 else tensor("f32", rng.uniform(1, 4, n_dims // 2))
        return node(op, types[0], (1, len(positions), HEADS, width), x, Tensor.of(at), factors, params=params)

    return make


def mul_mat(rng: Rng, types: Types) -> Node:
    weights, x = normal(rng, types[1], 1, 2, 24, 256), normal(rng, types[2], 1, 4, 5, 256)
    return node("MUL_MAT", "f32", (1, 4, 5, 24), weights, x)


def mul_mat_id(rng: Rng, types: Types) -> Node:
    weights, x = normal(rng, types[1], 1, 6, 24, 256), normal(rng, types[2], 1, 5, 1, 256)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(5)]).astype(np.int32)
    return node("MUL_MAT_ID", "f32", (1, 5, 2, 24), weights, x, Tensor.of(ids))


def attention(
    *, cells: int = 50, queries: int = 3, bias: float = 8.0, softcap: float = 5.0, sinks: bool = True
) -> Make:
    def make(rng: Rng, types: Types) -> Node:
        n = max(64, codec(types[2]).block_size, codec(types[3]).block_size)
        q = normal(rng, "f32", 1, 2 * HEADS, queries, n)
        k, v = (normal(rng, type, 1, HEADS, cells, n) for type in types[2:4])
        mask = normal(rng, "f16", 1, 1, queries, cells)
        mask.view()[..., 3::7] = -np.inf
        sink = normal(rng, "f32", 2 * HEADS) if sinks else None
        params = struct.pack("3fi", n**-0.5, bias, softcap, 0)
        return node("FLASH_ATTN_EXT", "f32", (1, queries, 2 * HEADS, n), q, k, v, mask, sink, params=params)

    return make


def ssm_conv(rng: Rng, types: Types) -> Node:
    return node("SSM_CONV", "f32", (1, 2, 9, 70), normal(rng, "f32", 1, 2, 70, 12), normal(rng, "f32", 1, 1, 70, 4))


def ssm_scan(rng: Rng, types: Types) -> Node:
    n_state, dim, n_head, n_tokens = 32, 16, HEADS, TOKENS
    b, c = (normal(rng, "f32", 2, n_tokens, 2, n_state) for _ in range(2))
    x, s = normal(rng, "f32", 2, n_tokens, n_head, dim), normal(rng, "f32", 3, n_head, dim, n_state)
    dt, a = normal(rng, "f32", 1, 2, n_tokens, n_head), tensor("f32", rng.uniform(-1, 0, (1, 1, n_head, 1)))
    params = struct.pack("i", 1)
    size = n_head * dim * 2 * (n_tokens + n_state)
    return node("SSM_SCAN", "f32", (size,), s, x, dt, a, b, c, Tensor.of(np.int32([2, 0])), params=params)


def wkv(op: str, n_sources: int, params: bytes = b"") -> Make:
    def make(rng: Rng, types: Types) -> Node:
        size, sequences = 64, 2
        sources = [tensor("f32", rng.uniform(-1, 1, (1, TOKENS, HEADS, size))) for _ in range(n_sources)]
        if op == "RWKV_WKV6":
            sources[3] = tensor("f32", rng.uniform(-1, 1, (1, 1, HEADS, size)))
        if op == "RWKV_WKV7":
            sources[4] = tensor("f32", 0.2 * sources[4].view())
        decays = {"RWKV_WKV6": 4, "GATED_LINEAR_ATTN": 3, "RWKV_WKV7": 1}[op]
        sources[decays] = tensor("f32", rng.uniform(0.5, 1, (1, TOKENS, HEADS, size)))
        state = normal(rng, "f32", 1, 1, sequences, size * size * HEADS)
        return node(op, "f32", (1, 1, TOKENS + size * sequences, HEADS * size), *sources, state, params=params)

    return make


def delta_net(rng: Rng, types: Types) -> Node:
    size, sequences = 32, 2
    q, k = (normal(rng, "f32", sequences, TOKENS, 2, size, size=size**-0.5) for _ in range(2))
    v, state = normal(rng, "f32", sequences, TOKENS, HEADS, size), normal(rng, "f32", sequences, HEADS, size, size)
    g = tensor("f32", rng.uniform(-1, 0, (sequences, TOKENS, HEADS, 1)))
    beta = tensor("f32", rng.uniform(0, 1, (sequences, TOKENS, HEADS, 1)))
    shape = (1, 1, sequences * (TOKENS + size), HEADS * size)
    return node("GATED_DELTA_NET", "f32", shape, q, k, v, g, beta, state, params=struct.pack("i", 1))


def solve_tri(rng: Rng, types: Types) -> Node:
    a = np.tril(0.2 * rng.standard_normal((1, 3, 24, 24))) + np.eye(24)
    return node("SOLVE_TRI", "f32", (1, 3, 24, 7), tensor("f32", a), normal(rng, "f32", 1, 3, 24, 7))


def lightning_indexer(rng: Rng, types: Types) -> Node:
    n = max(64, codec(types[2]).block_size)
    q, k = normal(rng, "f32", 2, TOKENS, 8, n), normal(rng, types[2], 2, 40, 1, n)
    weights, mask = normal(rng, "f32", 2, 1, TOKENS, 8), tensor("f16", np.zeros((1, 1, TOKENS, 40)))
    mask.view()[..., 3::7] = -np.inf
    return node("LIGHTNING_INDEXER", "f32", (2, 1, TOKENS, 40), q, k, weights, mask)


def hc_comb(rng: Rng, types: Types) -> Node:
    mixes, scale, base = (
        normal(rng, "f32", 1, 1, 9, 24),
        normal(rng, "f32", 1, 1, 1, 3),
        normal(rng, "f32", 1, 1, 1, 24),
    )
    return node("DSV4_HC_COMB", "f32", (1, 9, 4, 4), mixes, scale, base, params=struct.pack("fi", 1e-2, 4))


def hc_pre(rng: Rng, types: Types) -> Node:
    x, gates = normal(rng, "f32", 1, 9, 4, 40), normal(rng, "f32", 1, 9, 4, 40)
    return node("DSV4_HC_PRE", "f32", (1, 1, 9, 40), x, gates, params=struct.pack("fi", 0.7, 1))


def hc_post(rng: Rng, types: Types) -> Node:
    x, residual = normal(rng, "f32", 1, 1, 9, 40), normal(rng, "f32", 1, 9, 4, 40)
    post, comb = normal(rng, "f32", 1, 1, 9, 4), normal(rng, "f32", 1, 9, 4, 4)
    return node("DSV4_HC_POST", "f32", (1, 9, 4, 40), x, residual, post, comb)


_NEAR, _FAR = [0, 1, 7, 40, 300], [3000, 100000, 517]

NODES: dict[str, list[Make]] = {
    **{op: [of_elements(op)] for op in ("SILU", "GELU", "GELU_QUICK", "GELU_ERF", "SIGMOID", "TANH", "EXP", "EXPM1")},
    **{op: [of_elements(op)] for op in ("ELU", "SOFTPLUS", "SIN", "COS", "HARDSIGMOID", "HARDSWISH")},
    "LOG": [of_elements("LOG", 0.01, 9)],
    "XIELU": [of_elements("XIELU", params=struct.pack("i4f", 0, 0.8, 0.9, 0.5, -1e-6))],
    "SCALE": [of_elements("SCALE", params=struct.pack("2f", 1.7, 0.3))],
    **{op: [gated(op)] for op in ("SWIGLU", "GEGLU", "GEGLU_QUICK", "GEGLU_ERF")},
    "SWIGLU_OAI": [gated("SWIGLU_OAI", 1.702, 3.0)],
    "SWIGLU_CLAMP": [gated("SWIGLU_CLAMP", 0.0, 3.0)],
    "RMS_NORM": [of_rows("RMS_NORM", params=struct.pack("f", 1e-6)), of_rows("RMS_NORM", 4096, struct.pack("f", 1e-6))],
    "NORM": [of_rows("NORM", params=struct.pack("f", 1e-6))],
    "L2_NORM": [of_rows("L2_NORM", params=struct.pack("f", 1e-6))],
    "GROUP_NORM": [group_norm],
    "SUM": [sum_of_all],
    "SUM_ROWS": [of_rows("SUM_ROWS", dst=1), of_rows("SUM_ROWS", 4096, dst=1)],
    "MEAN": [of_rows("MEAN", dst=1)],
    "CUMSUM": [of_rows("CUMSUM")],
    "POOL_2D": [pool_2d],
    "ARANGE": [arange],
    "SOFT_MAX": [soft_max],
    **{
        op: [*(rope(op, mode, _NEAR) for mode in (0, 2, 8, 24, 40)), rope(op, 0, _NEAR, 0.7), rope(op, 2, _FAR)]
        for op in ("ROPE", "ROPE_BACK")
    },
    "MUL_MAT": [mul_mat],
    "MUL_MAT_ID": [mul_mat_id],
    "FLASH_ATTN_EXT": [
        attention(),
        attention(cells=600, queries=1, bias=0, softcap=0, sinks=False),
        attention(cells=50, queries=70, softcap=0),
    ],
    "SSM_CONV": [ssm_conv],
    "SSM_SCAN": [ssm_scan],
    "RWKV_WKV6": [wkv("RWKV_WKV6", 5)],
    "RWKV_WKV7": [wkv("RWKV_WKV7", 6)],
    "GATED_LINEAR_ATTN": [wkv("GATED_LINEAR_ATTN", 4, struct.pack("f", 0.3))],
    "GATED_DELTA_NET": [delta_net],
    "SOLVE_TRI": [solve_tri],
    "LIGHTNING_INDEXER": [lightning_indexer],
    "DSV4_HC_COMB": [hc_comb],
    "DSV4_HC_PRE": [hc_pre],
    "DSV4_HC_POST": [hc_post],
}


# what kernels write


def written(of: Node, x: Exact) -> Tensor:
    """Values rounded to dst's type."""
    result = copy_of(of.dst)
    with np.errstate(all="ignore"):
        wide = x if result.type == "f16" else x.astype(np.float32)  # rounded once
        result.view()[...] = wide.astype(result.view().dtype)
    return result


def computed(of: Node, how: Callable[[Node], None]) -> Tensor:
    result = copy_of(of.dst)
    how(replace(of, dst=result))
    return result


def compiled(of: Node) -> None:
    OWN[of.op].bind(of)()


def exact(of: Node) -> Exact:
    found = noise.exact(of)
    assert found is not None, of.op
    return found


def in_type(of: Node, type: Any) -> Exact:
    """The formula in another arithmetic."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        values, decoded = noise.values, noise._decoded
        patch.setattr(noise, "values", lambda x: values(x).astype(type))
        patch.setattr(noise, "_decoded", lambda x, view: decoded(x, view).astype(type))
        return exact(of).astype(np.float64)


def in_halves(of: Node) -> Tensor:
    """The formula in float16."""
    if of.op not in noise._DEFINED:
        return written(of, in_type(of, np.float16))
    halves = [x if x is None or x.type == "i32" else tensor("f16", noise.values(x)) for x in of.src]
    result = replace(of, dst=tensor("f16", np.zeros(of.dst.ne[::-1])), src=tuple(halves))
    define(result)
    return written(of, noise.values(result.dst))


def in_order(of: Node) -> Iterator[tuple[str, Exact]]:
    """Sums in float32, one product after the other."""
    floats = [noise.values(x).astype(np.float32) for x in of.src]
    x = floats[0].reshape(1, 1, 1, -1) if of.op == "SUM" else floats[0]
    if of.op == "MUL_MAT":
        x = floats[1][..., None, :] * x.repeat(floats[1].shape[1] // x.shape[1], axis=1)[:, :, None]
    if of.op == "MEAN":
        x = x / np.float32(x.shape[-1])
    for name, terms in (("one after the other in float32", x), ("from the end", x[..., ::-1])):
        total = np.add.accumulate(terms, axis=-1)[..., -1]
        yield name, (total if of.op == "MUL_MAT" else total[..., None]).astype(np.float64)


def right(of: Node) -> Iterator[tuple[str, Tensor]]:
    yield "the exact value", written(of, exact(of))
    yield "the definition", computed(of, define)
    yield "the kernel", computed(of, compiled)
    if of.op not in noise._DEFINED:
        yield "the formula in float32", written(of, in_type(of, np.float32))
    if of.op in ("SUM", "SUM_ROWS", "MEAN", "MUL_MAT"):
        yield from ((name, written(of, x)) for name, x in in_order(of))


FEWER = {"f32": np.float16, "f16": ml_dtypes.bfloat16, "bf16": ml_dtypes.float8_e4m3fn}


def fewer_bits(x: Exact, type: str) -> Exact:
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(FEWER[type]).astype(np.float64)


def rounded_sources(of: Node) -> Node:
    """The node with sources of fewer bits; of a quantised one, and of a sum of which no other bits are left, itself."""

    def less(x: Tensor | None) -> Tensor | None:
        fine = x is None or x.type not in FEWER or of.op == "SUM"
        return x if fine else tensor(x.type, fewer_bits(noise.values(x), x.type))

    return replace(of, src=tuple(less(x) for x in of.src))


def param(place: int, value: float | int, format: str = "f") -> Fault:
    def fault(of: Node) -> Node:
        changed = bytearray(of.params)
        struct.pack_into(format, changed, place, value)
        return replace(of, params=bytes(changed))

    return fault


def times(place: int, factor: float) -> Fault:
    def fault(of: Node) -> Node:
        (value,) = struct.unpack_from("f", of.params, place)
        changed = bytearray(of.params)
        struct.pack_into("f", changed, place, value * factor)
        return replace(of, params=bytes(changed))

    return fault


def without_last(place: int, axis: int = -1) -> Fault:
    """The last element along an axis of a source counts as zero."""

    def fault(of: Node) -> Node:
        x = noise.values(of.src[place]).copy()
        np.moveaxis(x, axis, -1)[..., -1] = 0
        return with_source(of, place, tensor("f32", x))

    return fault


def with_source(of: Node, place: int, x: Tensor | None) -> Node:
    return replace(of, src=(*of.src[:place], x, *of.src[place + 1 :]))


def norm_without_last(of: Node) -> Exact:
    x, y = noise.values(of.src[0]), exact(of)
    squares = np.square(x).sum(axis=-1, keepdims=True)
    return y * np.sqrt(squares / (squares - np.square(x[..., -1:])))


def swapped(first: int, second: int) -> Fault:
    def fault(of: Node) -> Node:
        sources = list(of.src)
        sources[first], sources[second] = sources[second], sources[first]
        return replace(of, src=tuple(sources))

    return fault


def as_op(op: str) -> Fault:
    return lambda of: replace(of, op=op)


def ids_off_by_one(of: Node) -> Node:
    n = of.src[0].ne[2]
    return with_source(of, 2, Tensor.of((of.src[2].view() + 1) % n))


def last_cell_left_out(of: Node) -> Node:
    mask = copy_of(of.src[3])
    mask.view()[..., -1] = -np.inf
    return with_source(of, 3, mask)


def heads_in_turn(of: Node) -> Node:
    """Each head of q with the next one of k and v."""
    rolled = [tensor("f32", np.roll(noise.values(x), 1, axis=1)) for x in of.src[1:3]]
    return replace(of, src=(of.src[0], *rolled, *of.src[3:]))


FAULTS: dict[str, dict[str, Fault]] = {
    "RMS_NORM": {"no eps": param(0, 0), "the last element left out": norm_without_last},
    "NORM": {"no eps": param(0, 0), "the mean left in": as_op("RMS_NORM")},
    "L2_NORM": {"as RMS_NORM": as_op("RMS_NORM"), "the last element left out": norm_without_last},
    "GROUP_NORM": {"no eps": param(4, 0), "one group": param(0, 1, "i")},
    "SUM": {"the last element left out": without_last(0)},
    "SUM_ROWS": {"the last element left out": without_last(0), "MEAN": as_op("MEAN")},
    "MEAN": {"the last element left out": without_last(0)},
    "CUMSUM": {"the last element left out": without_last(0)},
    "POOL_2D": {"the maximum": param(0, 0, "i")},
    "ARANGE": {"another step": times(8, 1 + 1e-5)},
    "SCALE": {"no bias": param(4, 0), "another scale": times(0, 1.02)},
    "GELU": {"by erf": as_op("GELU_ERF"), "quick": as_op("GELU_QUICK")},
    "GELU_ERF": {"by tanh": as_op("GELU"), "quick": as_op("GELU_QUICK")},
    "GELU_QUICK": {"by tanh": as_op("GELU"), "SILU": as_op("SILU")},
    "SILU": {"SIGMOID": as_op("SIGMOID"), "GELU_QUICK": as_op("GELU_QUICK")},
    "XIELU": {f"parameter {i}": times(4 + 4 * i, 1.001) for i in range(3)},
    "GEGLU": {"by erf": as_op("GEGLU_ERF"), "swapped": swapped(0, 1)},
    "GEGLU_ERF": {"by tanh": as_op("GEGLU"), "swapped": swapped(0, 1)},
    "GEGLU_QUICK": {"by tanh": as_op("GEGLU"), "swapped": swapped(0, 1)},
    "SWIGLU": {"swapped": swapped(0, 1)},
    "SWIGLU_OAI": {"swapped": swapped(0, 1), "alpha": times(8, 1.001), "limit": times(12, 1.01)},
    "SWIGLU_CLAMP": {"swapped": swapped(0, 1), "limit": times(12, 1.01)},
    "SOFT_MAX": {
        "another scale": times(0, 1.0001),
        "no mask": lambda of: with_source(of, 1, None),
        "no sinks": lambda of: with_source(of, 2, None),
        "no slopes": param(4, 0),
    },
    "MUL_MAT": {
        "the last element left out": without_last(1),
        "another column": lambda of: with_source(of, 1, tensor("f32", np.roll(noise.values(of.src[1]), 1, axis=2))),
    },
    "MUL_MAT_ID": {"the last element left out": without_last(1), "ids off by one": ids_off_by_one},
    "FLASH_ATTN_EXT": {
        "another scale": times(0, 1.01),
        "no mask": lambda of: with_source(of, 3, None),
        "a cell left out": last_cell_left_out,
        "heads mixed up": heads_in_turn,
    },
    **{
        op: {
            "another base": times(20, 1 + 1e-4),
            "another scale": times(24, 1.001),
            "positions off by one": lambda of: with_source(of, 1, Tensor.of(of.src[1].view() + 1)),
        }
        for op in ("ROPE", "ROPE_BACK")
    },
    "SSM_CONV": {"the last weight left out": without_last(1)},
    "SSM_SCAN": {
        "the last element of B left out": without_last(4),
        "no B": lambda of: with_source(of, 4, tensor("f32", 0 * of.src[4].view())),
    },
    "RWKV_WKV6": {"k and v swapped": swapped(0, 1), "the last element left out": without_last(2)},
    "RWKV_WKV7": {"k and v swapped": swapped(2, 3), "the last element left out": without_last(0)},
    "GATED_LINEAR_ATTN": {"k and v swapped": swapped(0, 1), "another scale": times(0, 1 + 1e-4)},
    "GATED_DELTA_NET": {"the last element left out": without_last(0), "q and k swapped": swapped(0, 1)},
    "SOLVE_TRI": {
        "the last column left out": lambda of: with_source(
            of, 0, tensor("f32", of.src[0].view() * (1 - np.eye(24, k=-1)))
        )
    },
    "LIGHTNING_INDEXER": {
        "the last head left out": without_last(2),
        "no mask": lambda of: with_source(of, 3, tensor("f16", 0 * np.nan_to_num(of.src[3].view(), neginf=0))),
    },
    "DSV4_HC_COMB": {"one round less": param(4, 3, "i"), "no eps": param(0, 0)},
    "DSV4_HC_PRE": {"another scale": times(0, 1 + 1e-5), "a stream left out": without_last(0, 2)},
    "DSV4_HC_POST": {
        "comb transposed": lambda of: with_source(of, 3, tensor("f32", of.src[3].view().swapaxes(2, 3))),
        "no post": lambda of: with_source(of, 2, tensor("f32", 0 * of.src[2].view())),
    },
}


def wrong(of: Node) -> Iterator[tuple[str, Tensor]]:
    truth = exact(of)
    if type_of(of) != "f16" or of.op != "FLASH_ATTN_EXT":  # of which the CPU's own sums are half floats
        yield "its result in fewer bits", written(of, fewer_bits(truth, of.dst.type))
        fewer = rounded_sources(of)
        if fewer.src != of.src:
            yield "its sources in fewer bits", written(of, exact(fewer))
    off = truth.copy()
    flat = off.reshape(-1)
    at = int(np.argmax(np.where(np.isfinite(flat), np.abs(flat), 0)))
    flat[at] *= 1.02
    yield "one element off", written(of, off)
    for name, fault in FAULTS.get(of.op, {}).items():
        found = fault(of)
        yield name, written(of, exact(found) if isinstance(found, Node) else found)
