"""What DeepSeek's models alone use: LIGHTNING_INDEXER, and hyper-connections, DSV4_HC_{COMB,PRE,POST}."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.ops.movers import DECODED, convert, raw
from ggml_backend_npu.params import Params, f32, i32
from ggml_backend_npu.registry import op

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
    """The first tensor that has another size than it should."""
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
    optional=True,
)
def lightning_indexer(
    dst: Tensor, q: Tensor, k: Tensor, weights: Tensor, mask: Tensor, numerics: Numerics = PLAIN
) -> None:
    """dst = sum over heads of weight * max(q k^T, 0), plus the mask: how much each cell matters to each token.

    q (n, heads, tokens, streams), k (n, 1, cells, streams), weights (heads, tokens, 1, streams), mask (cells, tokens,
    1, streams, which repeat), dst (cells, tokens, 1, streams). Equals ggml_compute_forward_lightning_indexer but for
    the order of sums.
    """
    cells = convert(raw(k), k.type, "f32", numerics=numerics).swapaxes(1, 2).swapaxes(2, 3)
    total = np.zeros((q.ne[3], q.ne[2], k.ne[2]), np.float32)
    with np.errstate(all="ignore"):
        for head in range(q.ne[1]):
            products = q.view()[:, :, head] @ cells[:, 0]
            total += np.where(products > 0, products, np.float32(0)) * weights.view()[:, 0, :, head, None]
        added = mask.view()[:, 0].astype(np.float32)
        dst.view()[:, 0] = total + np.tile(added, (q.ne[3] // mask.ne[3], 1, 1))


def _refuse_comb(dst: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, params: HcComb) -> str | None:
    n, n_tokens = _STREAMS * (2 + _STREAMS), mixes.ne[1]
    if params.n_iter <= 0:
        return f"{params.n_iter} iterations"
    if scale.ne[0] < 3:
        return f"scale of ne {scale.ne}"
    return _misfit(mixes=(mixes, (n, n_tokens)), base=(base, (n,)), dst=(dst, (_STREAMS, _STREAMS, n_tokens)))


def _normalised(x: Floats, axis: int, eps: np.float32) -> Floats:
    """x divided by its sum along an axis, eps and the elements one after the other."""
    first = np.broadcast_to(eps, np.take(x, [0], axis).shape)
    total: Floats = np.add.accumulate(np.concatenate([first, x], axis), axis).take([-1], axis)
    result: Floats = x * (np.float32(1) / total)
    return result


@op("DSV4_HC_COMB", types=[("f32",) * 4], refuse=_refuse_comb, optional=True, params=HcComb)
def dsv4_hc_comb(dst: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, params: HcComb) -> None:
    """dst = softmax(mixes * scale[2] + base) of each row of a token's 4 x 4 matrix, made doubly stochastic.

    mixes (24, tokens) and base (24), of which the last 16 are the matrix; dst (4, 4, tokens). Columns, and then
    n_iter - 1 times rows and columns, are divided by their sums; eps is added to the softmax and to each sum. Equals
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


def _refuse_pre(dst: Tensor, x: Tensor, weights: Tensor, params: HcPre) -> str | None:
    n_embd, n_streams, n_tokens, _ = x.ne
    ne = (n_embd, n_streams, n_tokens) if params.gated else (n_streams, n_tokens)
    return _misfit(x=(x, x.ne[:3]), weights=(weights, ne), dst=(dst, (n_embd, n_tokens)))


@op("DSV4_HC_PRE", types=[("f32",) * 3], refuse=_refuse_pre, optional=True, params=HcPre)
def dsv4_hc_pre(dst: Tensor, x: Tensor, weights: Tensor, params: HcPre) -> None:
    """dst = scale * (the sum over a token's streams of x * weight), one after the other.

    x (n, streams, tokens), dst (n, tokens); weights (streams, tokens), or gates of x's size, of which the weights are
    the sigmoids. Equals ggml_compute_forward_dsv4_hc_pre, with gates but for the last bits of e ** x.
    """
    with np.errstate(all="ignore"):
        gates = weights.view()[0]
        by_stream = np.float32(1) / (np.float32(1) + np.exp(-gates)) if params.gated else gates[0, :, :, None]
        total = np.zeros((x.ne[2], x.ne[0]), np.float32)
        for stream in range(x.ne[1]):
            total += x.view()[0, :, stream] * by_stream[:, stream]
        dst.view()[0, 0] = np.float32(params.scale) * total


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


@op("DSV4_HC_POST", types=[("f32",) * 4], refuse=_refuse_post, optional=True)
def dsv4_hc_post(dst: Tensor, x: Tensor, residual: Tensor, post: Tensor, comb: Tensor | None) -> None:
    """dst = x * post, and to it added the token's residual streams, mixed by comb where there is one.

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
