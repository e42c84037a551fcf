"""Small nodes of every op that rounds on its way: what a promise is measured on, and rules are tested with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.ops.attention import FlashAttn
from ggml_backend_npu.ops.convolution import Conv2d, Conv3d, Im2col
from ggml_backend_npu.ops.deepseek import HcComb, HcPre
from ggml_backend_npu.ops.elementwise import Arange, Scale
from ggml_backend_npu.ops.glu import Glu
from ggml_backend_npu.ops.norms import GroupNorm, Norm
from ggml_backend_npu.ops.pooling import Pool1d, Pool2d
from ggml_backend_npu.ops.recurrent import LinearAttn, Snapshots
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.ops.transposed import Col2im1d, Transpose1d, Transpose2d
from ggml_backend_npu.ops.unary import Xielu
from ggml_backend_npu.ops.upscale import Upscale
from ggml_backend_npu.ops.vision import AddRelPos, Timestep
from ggml_backend_npu.params import PARAMS_BYTES, Params
from quant import Codec, codec

Rng = np.random.Generator
Types = tuple[str, ...]  # of dst and of the sources
Make = Callable[[Rng, Types], Node]

HEADS, TOKENS = 4, 6
_LARGE = 100.0


def tensor(type: str, x: NDArray[Any]) -> Tensor:
    """Values as a tensor of a type, rounded; where there is no quantiser, blocks of any bits that are numbers."""
    x = np.asarray(x)
    kind = codec(type)
    if type == "bf16":
        return Tensor.of(x.astype(ml_dtypes.bfloat16))
    if kind.dtype is not None:
        return Tensor.of(x.astype(kind.dtype))
    try:
        blocks = quant.quantize(x.astype(np.float32), type)
    except Exception:
        blocks = _any_blocks(kind, x.size // kind.block_size)
    return Tensor.of(
        np.ascontiguousarray(blocks).reshape(*x.shape[:-1], x.shape[-1] // kind.block_size * kind.block_bytes), type
    )


def _any_blocks(kind: Codec, n: int) -> NDArray[np.uint8]:
    blocks = np.random.default_rng(n).integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        blocks[~(np.abs(codecs.bound().codec(kind.name).decode(blocks)) < _LARGE).all(axis=1)] = 0
    return blocks


def normal(rng: Rng, type: str, *shape: int, size: float = 1.0) -> Tensor:
    """Normally distributed values as a tensor of a type, of a shape (ne3, ..., ne0)."""
    return tensor(type, size * rng.standard_normal(shape))


def node(op: str, type: str, shape: tuple[int, ...], *src: Tensor | None, params: Params | None = None) -> Node:
    """A node over its sources, dst of a type and shape, zero."""
    dst = tensor(type, np.zeros((1,) * (4 - len(shape)) + shape))
    return Node(op, dst, src, bytes(PARAMS_BYTES) if params is None else params.packed)


def of_rows(op: str, width: int = 512, params: Params | None = None, size: float = 0.1, dst: int = 0) -> Make:
    """A row of dst, or `dst` elements of it, from each of 5 x 3 rows, of which one is small."""

    def make(rng: Rng, types: Types) -> Node:
        x = size * rng.standard_normal((1, 3, 5, width))
        x[0, 1, 2] /= 8
        return node(op, types[0], (1, 3, 5, dst or width), tensor(types[1], x), params=params)

    return make


def of_elements(op: str, low: float = -6, high: float = 6, params: Params | None = None, width: int = 64) -> Make:
    """A function of UNARY, of values from low to high in rows of some width."""

    def make(rng: Rng, types: Types) -> Node:
        shape = 1, 3, 5, width
        return node(op, types[0], shape, tensor(types[1], rng.uniform(low, high, shape)), params=params)

    return make


def of_halves(op: str) -> Make:
    """A function of UNARY, of every half float between -10 and 10."""

    def make(rng: Rng, types: Types) -> Node:
        every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        x = np.where(np.abs(every) < 10, every, 0).reshape(1, 1, 64, 1024)
        return node(op, types[0], x.shape, tensor(types[1], x))

    return make


def gated(op: str, alpha: float = 0.0, limit: float = 0.0, width: int = 64) -> Make:
    """A function of GLU, of two sources."""

    def make(rng: Rng, types: Types) -> Node:
        a, b = (tensor(types[1], rng.uniform(-6, 6, (1, 3, 5, width))) for _ in range(2))
        return node(op, types[0], (1, 3, 5, width), a, b, params=Glu(0, 0, alpha, limit))

    return make


def sum_of_all(rng: Rng, types: Types) -> Node:
    """SUM."""
    return node("SUM", types[0], (1, 1, 1, 1), normal(rng, types[1], 1, 3, 5, 64))


def arange(rng: Rng, types: Types) -> Node:
    """ARANGE."""
    return node("ARANGE", "f32", (1, 1, 1, 200), params=Arange(-3.3, 16.7, 0.1))


def group_norm(rng: Rng, types: Types) -> Node:
    """GROUP_NORM."""
    x = 0.1 * rng.standard_normal((2, 8, 5, 16)) + 0.05
    return node("GROUP_NORM", "f32", (2, 8, 5, 16), tensor("f32", x), params=GroupNorm(2, 1e-6))


def pool_2d(rng: Rng, types: Types) -> Node:
    """POOL_2D."""
    params = Pool2d(op=1, k0=3, k1=2, s0=2, s1=1, p0=1, p1=0)
    return node("POOL_2D", "f32", (2, 3, 9, 20), normal(rng, types[1], 2, 3, 10, 39), params=params)


def pool_1d(rng: Rng, types: Types) -> Node:
    """POOL_1D."""
    params = Pool1d(op=1, k0=4, s0=2, p0=1)
    return node("POOL_1D", "f32", (2, 3, 9, 19), normal(rng, types[1], 2, 3, 9, 39), params=params)


def pool_2d_back(rng: Rng, types: Types) -> Node:
    """POOL_2D_BACK."""
    params, x = Pool2d(op=1, k0=3, k1=2, s0=2, s1=1, p0=1, p1=0), normal(rng, "f32", 2, 3, 10, 39)
    return node("POOL_2D_BACK", "f32", (2, 3, 10, 39), normal(rng, "f32", 2, 3, 9, 20), x, params=params)


def conv_2d(channels: int = 5, kernels: int = 6) -> Make:
    """CONV_2D of rows of 6 elements of each channel."""

    def make(rng: Rng, types: Types) -> Node:
        x, kernel = normal(rng, "f32", 2, channels, 9, 20), normal(rng, types[1], kernels, channels, 3, 2)
        params = Conv2d(s0=2, s1=1, p0=1, p1=0, d0=1, d1=2)
        return node("CONV_2D", "f32", (2, kernels, 5, 11), kernel, x, params=params)

    return make


def conv_3d(channels: int = 5, kernels: int = 6) -> Make:
    """CONV_3D of rows of 12 elements of each channel."""

    def make(rng: Rng, types: Types) -> Node:
        x, kernel = normal(rng, "f32", 2 * channels, 5, 6, 7), normal(rng, types[1], channels * kernels, 2, 3, 2)
        params = Conv3d(1, 2, 1, 1, 1, 0, 1, 1, 2, channels, 2, kernels)
        return node("CONV_3D", "f32", (2 * kernels, 3, 3, 8), kernel, x, params=params)

    return make


def conv_2d_dw(size: int = 3, channels: int = 6, *, together: bool = False) -> Make:
    """CONV_2D_DW; together: the channels of a pixel."""

    def make(rng: Rng, types: Types) -> Node:
        x, kernel = normal(rng, "f32", 2, channels, 9, 20), normal(rng, types[1], channels, 1, size, size)
        width = (20 + 2 - size) // 2 + 1
        of = node("CONV_2D_DW", "f32", (2, channels, 10 - size, width), kernel, x, params=Conv2d(2, 1, 1, 0, 1, 1))
        if not together:
            return of
        (kernel, x), dst = (_by_pixels(each) for each in (kernel, x)), _by_pixels(of.dst)
        planes = replace(kernel, ne=(size, size, 1, channels), nb=(*kernel.nb[:2], kernel.nb[0], kernel.nb[2]))
        return replace(of, dst=dst, src=(planes, x))

    return make


def _by_pixels(x: Tensor) -> Tensor:
    """A tensor with its dimension 2 first in memory; the kernel of CONV_2D_DW with its dimension 3 there."""
    if x.ne[2] == 1:
        x = replace(x, ne=(x.ne[0], x.ne[1], x.ne[3], 1), nb=(x.nb[0], x.nb[1], x.nb[3], x.nb[3] * x.ne[3]))
    other = Tensor.of(np.ascontiguousarray(np.moveaxis(x.view(), 1, 3)), x.type)
    (_, _, _, ne3), (nb0, nb1, nb2, nb3) = other.ne, other.nb
    return replace(other, ne=(*x.ne[:3], ne3), nb=(nb1, nb2, nb0, nb3))


def conv_transpose_1d(channels: int = 5) -> Make:
    """CONV_TRANSPOSE_1D of so many channels."""

    def make(rng: Rng, types: Types) -> Node:
        x, kernel = normal(rng, "f32", 1, 1, channels, 20), normal(rng, types[1], 1, channels, 4, 3)
        return node("CONV_TRANSPOSE_1D", "f32", (4, 41), kernel, x, params=Transpose1d(2, 0, 1))

    return make


def conv_transpose_2d(channels: int = 5) -> Make:
    """CONV_TRANSPOSE_2D of so many channels."""

    def make(rng: Rng, types: Types) -> Node:
        x, kernel = normal(rng, "f32", 2, channels, 6, 7), normal(rng, types[1], channels, 4, 3, 3)
        return node("CONV_TRANSPOSE_2D", "f32", (2, 4, 13, 15), kernel, x, params=Transpose2d(2))

    return make


def col2im_1d(rng: Rng, types: Types) -> Node:
    """COL2IM_1D."""
    return node("COL2IM_1D", types[0], (3, 40), normal(rng, types[1], 1, 1, 20, 12), params=Col2im1d(2, 3, 1))


def im2col_back(rng: Rng, types: Types) -> Node:
    """IM2COL_BACK."""
    gradient, kernel = normal(rng, "f32", 2, 9, 10, 36), normal(rng, types[2], 1, 4, 3, 3)
    return node("IM2COL_BACK", "f32", (2, 4, 9, 20), gradient, kernel, params=Im2col(2, 1, 1, 1, 1, 1, 1))


def upscale(mode: int, width: int = 33, height: int = 19) -> Make:
    """UPSCALE, to a width and height."""

    def make(rng: Rng, types: Types) -> Node:
        return node("UPSCALE", "f32", (2, 3, height, width), normal(rng, "f32", 2, 3, 10, 14), params=Upscale(mode))

    return make


def timestep_embedding(dim: int = 40) -> Make:
    """TIMESTEP_EMBEDDING in so many elements."""

    def make(rng: Rng, types: Types) -> Node:
        timesteps = tensor("f32", rng.uniform(0, 1000, (1, 1, 1, 9)))
        return node("TIMESTEP_EMBEDDING", "f32", (9, dim), timesteps, params=Timestep(dim, 10000))

    return make


def add_rel_pos(rng: Rng, types: Types) -> Node:
    """ADD_REL_POS."""
    x, (pw, ph) = normal(rng, "f32", 1, 2, 15, 36), (normal(rng, "f32", 2, 3, 5, 6) for _ in range(2))
    return node("ADD_REL_POS", "f32", (2, 15, 36), x, pw, ph, params=AddRelPos(0))


def soft_max(rng: Rng, types: Types, max_bias: float = 8.0) -> Node:
    """SOFT_MAX with a mask, sinks and ALiBi; the slopes of 8 are powers of two."""
    x, mask = normal(rng, "f32", 2, HEADS, TOKENS, 96, size=4), normal(rng, "f16", 1, 1, TOKENS, 96)
    mask.view()[..., ::5] = -np.inf
    params, sinks = SoftMax(0.6, max_bias), normal(rng, "f32", 1, 1, 1, HEADS)
    return node("SOFT_MAX", "f32", (2, HEADS, TOKENS, 96), x, mask, sinks, params=params)


def rope(op: str, mode: int, positions: list[int], ext: float = 0.0) -> Make:
    """ROPE or ROPE_BACK in a mode, at these positions; ext: the extrapolation factor."""

    def make(rng: Rng, types: Types) -> Node:
        n_dims, width = (32, 64) if mode == 24 else (64, 80)
        sections = (8, 8, 8, 8) if mode == 24 else (12, 10, 8, 2)
        params = Rope(0, n_dims, mode, 0, 512, 1e4, 1 - ext / 2, ext, 1, 32, 1, *sections, 0)
        at = np.array(positions, np.int32)
        at = np.concatenate([at, at[::-1], at // 2, at * 0 + 3]) if mode & 8 else at
        x = normal(rng, types[1], 1, len(positions), HEADS, width)
        factors = None if mode & 8 else tensor("f32", rng.uniform(1, 4, n_dims // 2))
        return node(op, types[0], (1, len(positions), HEADS, width), x, Tensor.of(at), factors, params=params)

    return make


def mul_mat(k: int = 256, columns: int = 5) -> Make:
    """MUL_MAT of rows of k elements, its weights shared by two matrices of columns each."""

    def make(rng: Rng, types: Types) -> Node:
        weights, x = normal(rng, types[1], 1, 2, 24, k), normal(rng, types[2], 1, 4, columns, k)
        return node("MUL_MAT", "f32", (1, 4, columns, 24), weights, x)

    return make


def mul_mat_id(rng: Rng, types: Types) -> Node:
    """MUL_MAT_ID of 6 experts, 2 for each of 5 tokens."""
    weights, x = normal(rng, types[1], 1, 6, 24, 256), normal(rng, types[2], 1, 5, 1, 256)
    ids = np.stack([rng.permutation(6)[:2] for _ in range(5)]).astype(np.int32)
    return node("MUL_MAT_ID", "f32", (1, 5, 2, 24), weights, x, Tensor.of(ids))


def attention(
    *, cells: int = 50, queries: int = 3, bias: float = 8.0, softcap: float = 5.0, sinks: bool = True,
    widths: tuple[int, int] | None = None,
) -> Make:  # fmt: skip
    """FLASH_ATTN_EXT of grouped heads. widths: of a row of k and of v."""

    def make(rng: Rng, types: Types) -> Node:
        least = max(64, codec(types[2]).block_size, codec(types[3]).block_size)
        n, n_v = widths or (least, least)
        q = normal(rng, "f32", 1, 2 * HEADS, queries, n)
        k, v = normal(rng, types[2], 1, HEADS, cells, n), normal(rng, types[3], 1, HEADS, cells, n_v)
        mask = normal(rng, "f16", 1, 1, queries, cells)
        mask.view()[..., 3::7] = -np.inf
        sink = normal(rng, "f32", 2 * HEADS) if sinks else None
        params = FlashAttn(n**-0.5, bias, softcap, prec=0, n_kv_max=0)
        return node("FLASH_ATTN_EXT", "f32", (1, queries, 2 * HEADS, n_v), q, k, v, mask, sink, params=params)

    return make


def ssm_conv(width: int = 4) -> Make:
    """SSM_CONV of so many elements of a row."""

    def make(rng: Rng, types: Types) -> Node:
        x, weights = normal(rng, "f32", 1, 2, 70, width + 8), normal(rng, "f32", 1, 1, 70, width)
        return node("SSM_CONV", "f32", (1, 2, 9, 70), x, weights)

    return make


def ssm_scan(n_state: int = 32, dim: int = 16) -> Make:
    """SSM_SCAN. dim 1: a decay for every element of a state."""

    def make(rng: Rng, types: Types) -> Node:
        n_head, n_tokens = HEADS, TOKENS
        b, c = (normal(rng, "f32", 2, n_tokens, 2, n_state) for _ in range(2))
        x, s = normal(rng, "f32", 2, n_tokens, n_head, dim), normal(rng, "f32", 3, n_head, dim, n_state)
        decays = rng.uniform(-1, 0, (1, 1, n_head, n_state if dim == 1 else 1))
        dt, a = normal(rng, "f32", 1, 2, n_tokens, n_head), tensor("f32", decays)
        params = Snapshots(1)
        size = n_head * dim * 2 * (n_tokens + n_state)
        return node("SSM_SCAN", "f32", (size,), s, x, dt, a, b, c, Tensor.of(np.array([2, 0], np.int32)), params=params)

    return make


def wkv(op: str, n_sources: int, params: Params | None = None, size: int = 64) -> Make:
    """RWKV_WKV6, RWKV_WKV7 or GATED_LINEAR_ATTN of heads of a size, of so many sources before the state."""

    def make(rng: Rng, types: Types) -> Node:
        sequences = 2
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


def delta_net(size: int = 32, gates: bool = False) -> Make:
    """GATED_DELTA_NET of heads of a size. gates: one for each element of a row."""

    def make(rng: Rng, types: Types) -> Node:
        sequences = 2
        q, k = (normal(rng, "f32", sequences, TOKENS, 2, size, size=size**-0.5) for _ in range(2))
        v, state = normal(rng, "f32", sequences, TOKENS, HEADS, size), normal(rng, "f32", sequences, HEADS, size, size)
        g = tensor("f32", rng.uniform(-1, 0, (sequences, TOKENS, HEADS, size if gates else 1)))
        beta = tensor("f32", rng.uniform(0, 1, (sequences, TOKENS, HEADS, 1)))
        shape = (1, 1, sequences * (TOKENS + size), HEADS * size)
        return node("GATED_DELTA_NET", "f32", shape, q, k, v, g, beta, state, params=Snapshots(1))

    return make


def solve_tri(rng: Rng, types: Types) -> Node:
    """SOLVE_TRI."""
    a = np.tril(0.2 * rng.standard_normal((1, 3, 24, 24))) + np.eye(24)
    return node("SOLVE_TRI", "f32", (1, 3, 24, 7), tensor("f32", a), normal(rng, "f32", 1, 3, 24, 7))


def lightning_indexer(rng: Rng, types: Types) -> Node:
    """LIGHTNING_INDEXER."""
    n = max(64, codec(types[2]).block_size)
    q, k = normal(rng, "f32", 2, TOKENS, 8, n), normal(rng, types[2], 2, 40, 1, n)
    weights, mask = normal(rng, "f32", 2, 1, TOKENS, 8), tensor("f16", np.zeros((1, 1, TOKENS, 40)))
    mask.view()[..., 3::7] = -np.inf
    return node("LIGHTNING_INDEXER", "f32", (2, 1, TOKENS, 40), q, k, weights, mask)


def hc_comb(rng: Rng, types: Types) -> Node:
    """DSV4_HC_COMB."""
    mixes, scale, base = (
        normal(rng, "f32", 1, 1, 9, 24),
        normal(rng, "f32", 1, 1, 1, 3),
        normal(rng, "f32", 1, 1, 1, 24),
    )
    return node("DSV4_HC_COMB", "f32", (1, 9, 4, 4), mixes, scale, base, params=HcComb(1e-2, 4))


def turned(make: Make, *places: int) -> Make:
    """The same node, with dimensions 0 and 1 of some of its sources exchanged in memory."""

    def made(rng: Rng, types: Types) -> Node:
        of = make(rng, types)
        return replace(of, src=tuple(_turned(x) if x and place in places else x for place, x in enumerate(of.src)))

    return made


def _turned(x: Tensor) -> Tensor:
    other = Tensor.of(np.ascontiguousarray(np.swapaxes(x.view(), -1, -2)), x.type)
    (ne0, ne1, ne2, ne3), (nb0, nb1, nb2, nb3) = other.ne, other.nb
    return replace(other, ne=(ne1, ne0, ne2, ne3), nb=(nb1, nb0, nb2, nb3))


def hc_pre(n: int = 40, streams: int = 4, *, gated: bool = True) -> Make:
    """DSV4_HC_PRE of rows of n elements, with gates or with a weight for each stream."""

    def make(rng: Rng, types: Types) -> Node:
        x = normal(rng, "f32", 1, 9, streams, n)
        weights = normal(rng, "f32", 1, 9, streams, n) if gated else normal(rng, "f32", 1, 1, 9, streams)
        return node("DSV4_HC_PRE", "f32", (1, 1, 9, n), x, weights, params=HcPre(0.7, gated))

    return make


def hc_post(n: int = 40, streams: int = 4) -> Make:
    """DSV4_HC_POST of rows of n elements."""

    def make(rng: Rng, types: Types) -> Node:
        x, residual = normal(rng, "f32", 1, 1, 9, n), normal(rng, "f32", 1, 9, streams, n)
        post, comb = normal(rng, "f32", 1, 1, 9, streams), normal(rng, "f32", 1, 9, streams, streams)
        return node("DSV4_HC_POST", "f32", (1, 9, streams, n), x, residual, post, comb)

    return make


_NEAR, _FAR = [0, 1, 7, 40, 300], [3000, 100000, 517]

NODES: dict[str, list[Make]] = {
    **{op: [of_elements(op)] for op in ("SILU", "GELU", "GELU_QUICK", "GELU_ERF", "SIGMOID", "TANH", "EXP", "EXPM1")},
    **{op: [of_elements(op)] for op in ("ELU", "SOFTPLUS", "SIN", "COS", "HARDSIGMOID", "HARDSWISH")},
    "LOG": [of_elements("LOG", 0.01, 9)],
    "XIELU": [of_elements("XIELU", params=Xielu(0, 0.8, 0.9, 0.5, -1e-6))],
    "SCALE": [of_elements("SCALE", params=Scale(1.7, 0.3))],
    **{op: [gated(op)] for op in ("SWIGLU", "GEGLU", "GEGLU_QUICK", "GEGLU_ERF")},
    "SWIGLU_OAI": [gated("SWIGLU_OAI", 1.702, 3.0)],
    "SWIGLU_CLAMP": [gated("SWIGLU_CLAMP", 0.0, 3.0)],
    "RMS_NORM": [of_rows("RMS_NORM", params=Norm(1e-6)), of_rows("RMS_NORM", 4096, Norm(1e-6))],
    "NORM": [of_rows("NORM", params=Norm(1e-6))],
    "L2_NORM": [of_rows("L2_NORM", params=Norm(1e-6))],
    "GROUP_NORM": [group_norm],
    "SUM": [sum_of_all],
    "SUM_ROWS": [of_rows("SUM_ROWS", dst=1), of_rows("SUM_ROWS", 4096, dst=1)],
    "MEAN": [of_rows("MEAN", dst=1)],
    "CUMSUM": [of_rows("CUMSUM")],
    "POOL_2D": [pool_2d],
    "POOL_1D": [pool_1d],
    "POOL_2D_BACK": [pool_2d_back],
    "CONV_2D": [conv_2d(), conv_2d(16, 8)],
    "CONV_3D": [conv_3d(), conv_3d(16, 8)],
    "CONV_2D_DW": [conv_2d_dw(), conv_2d_dw(channels=37, together=True)],
    "CONV_TRANSPOSE_1D": [conv_transpose_1d()],
    "CONV_TRANSPOSE_2D": [conv_transpose_2d()],
    "COL2IM_1D": [col2im_1d],
    "IM2COL_BACK": [im2col_back],
    "UPSCALE": [upscale(mode) for mode in (1, 2, 1 | 256, 2 | 256)] + [upscale(1 | 512, 7, 4)],
    "TIMESTEP_EMBEDDING": [timestep_embedding()],
    "ADD_REL_POS": [add_rel_pos],
    "ARANGE": [arange],
    "SOFT_MAX": [soft_max],
    **{
        op: [*(rope(op, mode, _NEAR) for mode in (0, 2, 8, 24, 40)), rope(op, 0, _NEAR, 0.7), rope(op, 2, _FAR)]
        for op in ("ROPE", "ROPE_BACK")
    },
    "MUL_MAT": [mul_mat()],
    "MUL_MAT_ID": [mul_mat_id],
    "FLASH_ATTN_EXT": [
        attention(),
        attention(cells=600, queries=1, bias=0, softcap=0, sinks=False),
        attention(cells=50, queries=70, softcap=0),
    ],
    "SSM_CONV": [ssm_conv()],
    "SSM_SCAN": [ssm_scan()],
    "RWKV_WKV6": [wkv("RWKV_WKV6", 5)],
    "RWKV_WKV7": [wkv("RWKV_WKV7", 6)],
    "GATED_LINEAR_ATTN": [wkv("GATED_LINEAR_ATTN", 4, LinearAttn(0.3))],
    "GATED_DELTA_NET": [delta_net()],
    "SOLVE_TRI": [solve_tri],
    "LIGHTNING_INDEXER": [lightning_indexer],
    "DSV4_HC_COMB": [hc_comb],
    "DSV4_HC_PRE": [hc_pre()],
    "DSV4_HC_POST": [hc_post()],
}
