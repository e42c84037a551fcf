"""Ops that only DeepSeek's models use: LIGHTNING_INDEXER, and hyper-connections, DSV4_HC_{COMB,PRE,POST}."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import undefined
from ggml_backend_npu.ops.movers import DECODED, convert
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import op
from ggml_backend_npu.registry.params import Params, f32, i32
from ggml_backend_npu.registry.probes import TOKENS, Rng, node, normal, turned
from quant import codec

_STREAMS = 4  # of hyper-connections

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class HcComb(Params):
    """op_params of DSV4_HC_COMB: ggml_dsv4_hc_comb."""

    eps: f32
    n_iter: i32


@dataclass(frozen=True)
class HcPre(Params):
    """op_params of DSV4_HC_PRE: ggml_dsv4_hc_pre_impl."""

    scale: f32
    gated: i32


def _misfit(**tensors: tuple[Tensor, tuple[int, ...]]) -> str | None:
    """The first tensor whose size is not the one it should have."""
    for role, (tensor, ne) in tensors.items():
        if tensor.ne != (*ne, 1, 1, 1, 1)[:4]:
            return f"{role} of ne {tensor.ne}, not {ne}"
    return None


def _refuse_indexer(dst: Tensor, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> str | None:
    n_embd, n_head, n_tokens, n_stream = q.ne
    n_kv = k.ne[2]
    for role, tensor in (("dst", dst), ("q", q), ("k", k), ("weights", weights), ("mask", mask)):
        if not tensor.has_contiguous_rows() or tensor.ne[0] % tensor.codec.block_size:
            return f"{role} rows of {tensor.ne[0]} elements, nb0 {tensor.nb[0]}"
    if not mask.ne[3] or n_stream % mask.ne[3]:
        return f"mask of ne {mask.ne} does not repeat to q of ne {q.ne}"
    return _misfit(
        k=(k, (n_embd, 1, n_kv, n_stream)),
        weights=(weights, (n_head, n_tokens, 1, n_stream)),
        mask=(mask, (n_kv, n_tokens, 1, mask.ne[3])),
        dst=(dst, (n_kv, n_tokens, 1, n_stream)),
    )


@op(
    "LIGHTNING_INDEXER",
    types=[("f32", "f32", k, "f32", "f16") for k in ("f32", "f16", "bf16", *DECODED)],
    refuse=_refuse_indexer,
    bound=1e-11,
    products=True,
)
def lightning_indexer(
    dst: Tensor, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, numerics: Numerics = PLAIN
) -> None:
    """dst = sum over heads of weight * max(q k^T, 0), plus the mask: how much each cell matters to each token.

    q (n, heads, tokens, streams), k (n, 1, cells, streams), weights (heads, tokens, 1, streams), mask (cells, tokens,
    1, streams, which repeat), dst (cells, tokens, 1, streams). Equals ggml_compute_forward_lightning_indexer but for
    the order of sums.
    """
    cells = convert(k.view(), k.type, "f32", numerics=numerics).swapaxes(1, 2).swapaxes(2, 3)
    total = np.zeros((q.ne[3], q.ne[2], k.ne[2]), np.float32)
    with np.errstate(all="ignore"):
        for head in range(q.ne[1]):
            products = q.view()[:, :, head] @ cells[:, 0]
            total += np.where(products > 0, products, np.float32(0)) * weights.view()[:, 0, :, head, None]
        added = mask.view()[:, 0].astype(np.float32)
        dst.view()[:, 0] = total + np.tile(added, (q.ne[3] // mask.ne[3], 1, 1))


@lightning_indexer.formula
def _exact_indexer(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Exact:
    queries, keys, by_head, added = (exact.values(x) for x in (q, k, weights, mask))
    total = np.tile(added[:, 0], (len(queries) // len(added), 1, 1))
    for head in range(q.ne[1]):
        products = queries[:, :, head] @ keys[:, :, 0].swapaxes(1, 2)
        total += np.fmax(products, 0) * by_head[:, 0, :, head, None]
    return total[:, None]


@lightning_indexer.undefined
def _undefined_indexer(dst: Tensor, q: Tensor, k: Tensor, *_: object) -> undefined.Flags:
    """max(x, 0) is 0 for a NaN, and the order of a sum decides whether its infinities make one."""
    tokens, cells = undefined.spoilt_rows(q).any(axis=2, keepdims=True), undefined.spoilt_rows(k)
    found: undefined.Flags = (tokens | cells.swapaxes(1, 2))[:, None]
    return found


@lightning_indexer.nodes
def _make_indexer(rng: Rng, types: Types) -> Node:
    n, cells = max(64, codec(types[2]).block_size), 40
    q, k = normal(rng, "f32", 2, TOKENS, 8, n), normal(rng, types[2], 2, cells, 1, n)
    weights, mask = normal(rng, "f32", 2, 1, TOKENS, 8), probes.tensor("f16", np.zeros((1, 1, TOKENS, cells)))
    mask.view()[..., 3::7] = -np.inf
    return node("LIGHTNING_INDEXER", "f32", (2, 1, TOKENS, cells), q, k, weights, mask)


def _refuse_comb(dst: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, params: HcComb) -> str | None:
    n, n_tokens = _STREAMS * (2 + _STREAMS), mixes.ne[1]
    if params.n_iter <= 0:
        return f"{params.n_iter} iterations"
    if scale.ne[0] < 3:
        return f"scale of ne {scale.ne}"
    return _misfit(mixes=(mixes, (n, n_tokens)), base=(base, (n,)), dst=(dst, (_STREAMS, _STREAMS, n_tokens)))


def _normalised(x: Floats, axis: int, eps: np.float32) -> Floats:
    """x divided by its sum along an axis: eps and then the elements, added one after the other."""
    first = np.broadcast_to(eps, np.take(x, [0], axis).shape)
    total: Floats = np.add.accumulate(np.concatenate([first, x], axis), axis).take([-1], axis)
    result: Floats = x * (np.float32(1) / total)
    return result


@op("DSV4_HC_COMB", types=[("f32",) * 4], refuse=_refuse_comb, params=HcComb, bound=1e-11, wide=True)
def dsv4_hc_comb(dst: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, params: HcComb) -> None:
    """dst = softmax(mixes * scale[2] + base) of each row of a token's 4 x 4 matrix, made doubly stochastic.

    mixes (24, tokens) and base (24), of which the last 16 are the matrix; dst (4, 4, tokens). Columns, and then n_iter
    - 1 times rows and columns, are divided by their sums; eps is added to the softmax and to each sum. Equals
    ggml_compute_forward_dsv4_hc_comb but for the last bits of e ** x.
    """
    small = np.float32(params.eps)
    with np.errstate(all="ignore"):
        mix, bias = mixes.view()[0, 0, :, 2 * _STREAMS :], base.view()[0, 0, 0, 2 * _STREAMS :]
        x = mix * scale.view()[0, 0, 0, 2] + bias
        x = x.reshape(-1, _STREAMS, _STREAMS)
        e: Floats = np.exp(x - np.fmax.reduce(x, -1, keepdims=True))
        total: Floats = np.add.accumulate(e, -1)[..., -1:]
        comb = _normalised(e * (np.float32(1) / total) + small, 1, small)
        for _ in range(1, params.n_iter):
            comb = _normalised(_normalised(comb, 2, small), 1, small)
    dst.view()[0] = comb


@dsv4_hc_comb.nodes
def _make_comb(rng: Rng, types: Types) -> Node:
    mixes, scale, base = (normal(rng, "f32", 1, 1, n, width) for n, width in ((9, 24), (1, 3), (1, 24)))
    return node("DSV4_HC_COMB", "f32", (1, 9, 4, 4), mixes, scale, base, params=HcComb(1e-2, 4))


def _refuse_pre(dst: Tensor, x: Tensor, weights: Tensor, params: HcPre) -> str | None:
    n_embd, n_streams, n_tokens, _ = x.ne
    ne = (n_embd, n_streams, n_tokens) if params.gated else (n_streams, n_tokens)
    return _misfit(x=(x, x.ne[:3]), weights=(weights, ne), dst=(dst, (n_embd, n_tokens)))


@op(
    "DSV4_HC_PRE",
    types=[("f32",) * 3],
    refuse=_refuse_pre,
    params=HcPre,
    bound=1e-12,
    built_by={"ggml_dsv4_hc_pre": "ctt", "ggml_dsv4_hc_pre_gated": "cttf"},
)
def dsv4_hc_pre(dst: Tensor, x: Tensor, weights: Tensor, params: HcPre) -> None:
    """dst = scale * (the sum of x * weight over a token's streams), added one stream after the other.

    x (n, streams, tokens), dst (n, tokens); weights (streams, tokens), or gates of x's size, whose sigmoids are the
    weights. Equals ggml_compute_forward_dsv4_hc_pre; with gates, but for the last bits of e ** x.
    """
    with np.errstate(all="ignore"):
        gates = weights.view()[0]
        by_stream = np.float32(1) / (np.float32(1) + np.exp(-gates)) if params.gated else gates[0, :, :, None]
        total = np.zeros((x.ne[2], x.ne[0]), np.float32)
        for stream in range(x.ne[1]):
            total += x.view()[0, :, stream] * by_stream[:, stream]
        dst.view()[0, 0] = np.float32(params.scale) * total


def _weighted(x: Tensor, weights: Tensor, params: HcPre) -> Exact:
    """x * weight, (tokens, streams, n)"""
    streams, gates = exact.values(x)[0], exact.values(weights)[0]
    products: Exact = streams * (exact.sigmoid(gates) if params.gated else gates[0, :, :, None])
    return products


@dsv4_hc_pre.formula
def _exact_pre(x: Tensor, weights: Tensor, params: HcPre) -> Exact:
    total: Exact = params.scale * _weighted(x, weights, params).sum(axis=1)
    return total[None, None]


@dsv4_hc_pre.on_the_way
def _on_the_way(x: Tensor, weights: Tensor, params: HcPre) -> Exact:
    """The finite terms of one sign, before they are scaled."""
    terms = _weighted(x, weights, params)
    total: Exact = np.where(np.isfinite(terms), np.abs(terms), 0).sum(axis=1)
    return total[None, None]


def _make_pre(n: int = 40, streams: int = 4, *, gated: bool = True) -> Make:
    """Rows of n elements, with gates or with one weight per stream."""

    def make(rng: Rng, types: Types) -> Node:
        x = normal(rng, "f32", 1, 9, streams, n)
        weights = normal(rng, "f32", 1, 9, streams, n) if gated else normal(rng, "f32", 1, 1, 9, streams)
        return node("DSV4_HC_PRE", "f32", (1, 1, 9, n), x, weights, params=HcPre(0.7, gated))

    return make


def _of_streams(make: Callable[[int, int], Make]) -> tuple[Make, ...]:
    plain = [make(n, streams) for streams in range(1, 10) for n in (1, 3, 8, 17, 40)]
    return *plain, *(turned(each, *places) for each in plain for places in ((0,), (1,), (0, 1, 2, 3)))


dsv4_hc_pre.nodes(_make_pre())
dsv4_hc_pre.probes(
    lambda: [
        Probe("with gates", _of_streams(_make_pre)),
        Probe("with weights", _of_streams(partial(_make_pre, gated=False))),
    ]
)


def _refuse_post(dst: Tensor, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> str | None:
    n_embd, n_tokens = x.ne[:2]
    n_streams = residual.ne[1]
    if comb is not None and comb.type != "f32":
        return f"comb of type {comb.type}"
    if comb is not None and (reason := _misfit(comb=(comb, (n_streams, n_streams, n_tokens)))):
        return reason
    return _misfit(
        x=(x, (n_embd, n_tokens)),
        residual=(residual, (n_embd, n_streams, n_tokens)),
        post=(post, (n_streams, n_tokens)),
        dst=(dst, (n_embd, n_streams, n_tokens)),
    )


@op("DSV4_HC_POST", types=[("f32",) * 4], refuse=_refuse_post, bound=1e-12, wide=True, products=True)
def dsv4_hc_post(dst: Tensor, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> None:
    """dst = x * post + the token's residual streams, mixed by comb if there is one.

    x (n, tokens), residual and dst (n, streams, tokens), post (streams, tokens), comb (to, from, tokens). Equals
    ggml_compute_forward_dsv4_hc_post.
    """
    streams, to = residual.view()[0], x.view()[0, 0, :, None]
    with np.errstate(all="ignore"):
        if comb is None:
            total = to * post.view()[0, 0, :, :, None] + streams
        else:
            total = to * post.view()[0, 0, :, :, None]
            for stream in range(residual.ne[1]):
                total += streams[:, stream, None] * comb.view()[0, :, stream, :, None]
        dst.view()[0] = total


def _make_post(n: int = 40, streams: int = 4) -> Make:
    """Rows of n elements."""

    def make(rng: Rng, types: Types) -> Node:
        x, residual = normal(rng, "f32", 1, 1, 9, n), normal(rng, "f32", 1, 9, streams, n)
        post, comb = normal(rng, "f32", 1, 1, 9, streams), normal(rng, "f32", 1, 9, streams, streams)
        return node("DSV4_HC_POST", "f32", (1, 9, streams, n), x, residual, post, comb)

    return make


dsv4_hc_post.nodes(_make_post())
dsv4_hc_post.probes(lambda: [Probe("", _of_streams(_make_post))])
