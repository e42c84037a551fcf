"""What a node is without rounding: its value in float64; how large the numbers are that are rounded on the way to
it; and how much further off than the reference a result is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import erf, inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn
from ggml_backend_npu.ops.deepseek import HcPre
from ggml_backend_npu.ops.elementwise import Arange, Clamp, Scale
from ggml_backend_npu.ops.glu import Glu
from ggml_backend_npu.ops.movers import raw
from ggml_backend_npu.ops.norms import GroupNorm, Norm
from ggml_backend_npu.ops.pooling import Pool2d
from ggml_backend_npu.ops.rope import Rope
from ggml_backend_npu.ops.softmax import SoftMax, slopes
from ggml_backend_npu.ops.unary import Xielu
from ggml_backend_npu.ops.vision import Timestep
from ggml_backend_npu.params import Params, f32
from ggml_backend_npu.registry import KernelError

Exact = NDArray[np.float64]
Sources = tuple[Tensor | None, ...]
Formula = Callable[[Sources, Any], Exact | None]  # of the op's record, or the bytes of its op_params

_CHUNK = 1 << 21  # values decoded at a time
_STEP = 2.0**-20  # by which a source's numbers are moved
_PROBES = 2


def values(tensor: Tensor) -> Exact:
    """A tensor's values, (ne3, ne2, ne1, ne0), whatever its type."""
    return _decoded(tensor, raw(tensor.unpacked()))


def exact(node: Node) -> Exact | None:
    """What the node computes, from its sources in float64, (ne3, ne2, ne1, ne0); None for an op that is not known here.

    The sources are taken as they are, rounded or quantised. The result is not rounded to dst's type. A node that is not
    as ggml makes them gives None too.
    """
    if node.op in _DEFINED:
        return _evaluated(node, lambda src, _: _defined(node, src))
    return _evaluated(node, _FUNCTIONS.get(node.op))


def size(node: Node, truth: Exact) -> Exact:
    """How large the numbers are that are rounded on the way to each element of truth, which is `exact` of the node.

    Where the terms of a sum cancel, or a function is steep, a rounding on the way is large beside the element: as large
    as the element moves where every number of the sources moves by as much as a rounding, this way or that, in parts of
    that movement. For some ops the terms themselves, which a movement of the sources does not show.
    """
    signs = np.random.default_rng(0)
    squares = np.zeros_like(truth)
    with np.errstate(all="ignore"):
        for _ in range(_PROBES):
            moved = exact(replace(node, src=tuple(_moved(node, i, signs) for i in range(len(node.src)))))
            if moved is not None:
                squares += np.nan_to_num(np.square((moved - truth) / _STEP), nan=0, posinf=0, neginf=0)
    found: Exact = np.sqrt(squares / _PROBES)
    terms = _products(node) if node.op in (*_CONVOLUTIONS, "UPSCALE") else _evaluated(node, _TERMS.get(node.op))
    return found if terms is None else np.fmax(found, terms)


def _products(node: Node) -> Exact | None:
    """Of sums of products, of which each source holds one factor: how large they are together, as independent ones."""
    squares = (x if x is None else Tensor.of(np.square(values(x)), "f64", x.name) for x in node.src)
    found = exact(replace(node, src=tuple(squares)))
    return None if found is None else np.sqrt(np.fmax(found, 0))


def _moved(node: Node, place: int, signs: np.random.Generator) -> Tensor | None:
    """A source with numbers that are larger or smaller by `_STEP` of themselves, as float64.

    Weights stay as they are, since the other source's movement shows all products; so do integers, but for positions.
    """
    source = node.src[place]
    of_weights = place == 0 and node.op in ("MUL_MAT", "MUL_MAT_ID")
    of_integers = source is not None and source.type in ("i8", "i16", "i32", "i64") and node.op not in _ROPES
    if source is None or of_weights or of_integers:
        return source
    x = values(source)
    return Tensor.of(x * (1 + _STEP * signs.choice([-1.0, 1.0], x.shape)), "f64", source.name)


def _evaluated(node: Node, formula: Formula | None) -> Exact | None:
    if formula is None or (node.src and node.src[0] is None):
        return None
    try:
        with np.errstate(all="ignore"):
            result = formula(node.src, _params(node))
    except (ValueError, IndexError, AttributeError, ArithmeticError, KernelError):
        return None
    return None if result is None or result.shape != node.dst.ne[::-1] else result


def _params(node: Node) -> Params | bytes:
    record = LeakyRelu if node.op == "LEAKY_RELU" else OWN[node.op].params if node.op in OWN else None
    return node.params if record is None else record.of(node.params)


def _defined(node: Node, src: Sources) -> Exact:
    """By the backend's definition of the op, which takes float64 as it takes float32."""
    own = OWN[node.op]
    dst = Tensor.of(np.empty(node.dst.ne[::-1]), "f64")
    wide = [x if x is None or x.type == "i32" else Tensor.of(values(x), "f64") for x in src]
    own.define(dst, *(*wide, *(None,) * own.n_src)[: own.n_src], **own.keywords(node, codecs.bound()))
    return dst.view()


def noise_multiple(node: Node, expected: Tensor, actual: Tensor) -> float | None:
    """The error of actual, as a multiple of the error that expected has: 1 is as good as the reference.

    Both are root mean squares of the differences from `exact`, over the elements where that and expected are finite.
    inf where expected has no error or actual is not finite there; 1 where neither has one; None without an exact value.
    """
    truth = exact(node)
    return None if truth is None else multiple(truth, values(expected), values(actual))


def multiple(truth: Exact, expected: Exact, actual: Exact) -> float | None:
    """The root mean square of actual - truth over that of expected - truth, as `noise_multiple` says."""
    known = np.isfinite(truth) & np.isfinite(expected)
    if not known.any():
        return None
    floor, error = (_rms(result[known] - truth[known]) for result in (expected, actual))
    if not isfinite(error):
        return inf
    if floor == 0:
        return 1.0 if error == 0 else inf
    return error / floor


def _rms(error: Exact) -> float:
    with np.errstate(all="ignore"):
        largest = float(np.abs(error).max(initial=0.0))
        if largest == 0 or not isfinite(largest):
            return largest if largest == 0 else inf
        return largest * float(np.sqrt(np.square(error / largest).mean()))


def _decoded(tensor: Tensor, view: NDArray[np.generic]) -> Exact:
    """Values of a part of `raw(tensor)`."""
    kind = codecs.bound().codec(tensor.type)
    if kind.dtype is not None and tensor.type != "bf16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return view.astype(np.float64)
    lead = view.shape[:-2] if kind.is_quantized else view.shape[:-1]
    blocks = np.ascontiguousarray(view).view(np.uint8).reshape(-1, kind.block_bytes)
    n = view.shape[-2] * kind.block_size if kind.is_quantized else view.shape[-1]
    return kind.decode(blocks).astype(np.float64).reshape(*lead, n)


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a source is left out")
    return tensor


def _repeated(x: Exact, shape: tuple[int, ...]) -> Exact:
    """x again and again in each dimension."""
    return np.tile(x, [n // m for n, m in zip(shape, x.shape, strict=True)])


def _binary(function: np.ufunc) -> Formula:
    def compute(src: Sources, params: object) -> Exact | None:
        a, b = values(_present(src[0])), values(_present(src[1]))
        result: Exact = function(a, _repeated(b, a.shape))
        return result

    return compute


def _unary(function: Callable[[Exact], Exact]) -> Formula:
    def compute(src: Sources, params: object) -> Exact | None:
        return function(values(_present(src[0])))

    return compute


def _scale(src: Sources, params: Scale) -> Exact | None:
    return values(_present(src[0])) * params.scale + params.bias


def _clamp(src: Sources, params: Clamp) -> Exact | None:
    return np.clip(values(_present(src[0])), params.min, params.max)


@dataclass(frozen=True)
class LeakyRelu(Params):
    """op_params of LEAKY_RELU, which is no op of the backend: ggml_leaky_relu."""

    negative_slope: f32


def _leaky_relu(src: Sources, params: LeakyRelu) -> Exact | None:
    x = values(_present(src[0]))
    return np.where(x > 0, x, x * params.negative_slope)


def _sum_rows(src: Sources, params: object) -> Exact | None:
    total: Exact = values(_present(src[0])).sum(axis=-1, keepdims=True)
    return total


def _mean(src: Sources, params: object) -> Exact | None:
    mean: Exact = values(_present(src[0])).mean(axis=-1, keepdims=True)
    return mean


def _sum(src: Sources, params: object) -> Exact | None:
    total: Exact = values(_present(src[0])).sum(keepdims=True)
    return total


def _cumsum(src: Sources, params: object) -> Exact | None:
    total: Exact = np.cumsum(values(_present(src[0])), axis=-1)
    return total


def _pool_2d(src: Sources, params: Pool2d) -> Exact | None:
    w, x = params, values(_present(src[0]))
    padded = np.pad(x, ((0, 0), (0, 0), (w.p1, w.k1), (w.p0, w.k0)), constant_values=0 if w.op else -inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (w.k1, w.k0), axis=(2, 3))
    n1, n0 = (x.shape[2] + 2 * w.p1 - w.k1) // w.s1 + 1, (x.shape[3] + 2 * w.p0 - w.k0) // w.s0 + 1
    windows = windows[:, :, : n1 * w.s1 : w.s1, : n0 * w.s0 : w.s0]
    pooled: Exact = windows.mean(axis=(4, 5)) if w.op else windows.max(axis=(4, 5))
    return pooled


def _timestep_embedding(src: Sources, params: Timestep) -> Exact | None:
    half = params.dim // 2
    timesteps = values(_present(src[0]))[..., 0, :, None]
    angles = timesteps * params.max_period ** -(np.arange(half) / half)
    return np.concatenate(
        [np.cos(angles), np.sin(angles), np.zeros((1, 1, len(angles[0, 0]), params.dim % 2))], axis=-1
    )


def _add_id(src: Sources, params: object) -> Exact | None:
    a, b, ids = values(_present(src[0])), values(_present(src[1])), _present(src[2]).view()
    total: Exact = a + b[0, 0, ids[0, 0]]
    return total


def _rms_norm(src: Sources, params: Norm) -> Exact | None:
    x = values(_present(src[0]))
    y: Exact = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + params.eps)
    return y


def _norm(src: Sources, params: Norm) -> Exact | None:
    x = values(_present(src[0]))
    centred = x - x.mean(axis=-1, keepdims=True)
    y: Exact = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + params.eps)
    return y


def _l2_norm(src: Sources, params: Norm) -> Exact | None:
    x = values(_present(src[0]))
    y: Exact = x / np.maximum(np.sqrt(np.square(x).sum(axis=-1, keepdims=True)), params.eps)
    return y


def _group_norm(src: Sources, params: GroupNorm) -> Exact | None:
    x = values(_present(src[0])).copy()
    step = -(-x.shape[1] // params.n_groups)
    for begin in range(0, x.shape[1], step):
        group = x[:, begin : begin + step]
        group -= group.mean(axis=(1, 2, 3), keepdims=True)
        group /= np.sqrt(np.square(group).mean(axis=(1, 2, 3), keepdims=True) + params.eps)
    return x


def _soft_max(src: Sources, params: SoftMax) -> Exact | None:
    scores = values(_present(src[0])) * params.scale
    mask, sinks = (*src[1:], None, None)[:2]
    if mask is not None:
        added = values(mask)[:, :, : scores.shape[2]]
        added = _repeated(added, (*scores.shape[:2], *added.shape[2:]))
        slope = slopes(scores.shape[1], params.max_bias)
        scores = scores + (added if slope is None else added * slope.astype(np.float64)[:, None, None])
    maximum = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else values(sinks).reshape(1, -1, 1, 1)
    if sink is not None:
        maximum = np.maximum(maximum, sink)
    e = np.exp(scores - maximum)
    total = e.sum(axis=-1, keepdims=True)
    y: Exact = e / (total if sink is None else total + np.exp(sink - maximum))
    return y


def _attention(src: Sources, params: FlashAttn) -> Exact | None:
    """softmax(q k^T) v of a head after the other. A cell that the mask excludes may hold anything."""
    softcap = params.logit_softcap
    q, k, v = (values(_present(x)) for x in src[:3])
    mask, sinks = (*(None if x is None else values(x) for x in src[3:5]), None, None)[:2]
    n_sequences, n_head, n_queries, _ = q.shape
    slope = slopes(n_head, params.max_bias)
    result = np.empty((n_sequences, n_queries, n_head, v.shape[3]))
    for i3, i2 in np.ndindex(n_sequences, n_head):
        keys, gains = (x[i3 * len(x) // n_sequences, i2 * x.shape[1] // n_head] for x in (k, v))
        scores = q[i3, i2] @ keys.T * params.scale
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None:
            added = mask[i3 % len(mask), i2 % mask.shape[1], :n_queries, : len(keys)]
            scores += added if slope is None else added * float(slope[i2])
            scores[np.isneginf(added)] = -inf
        sink = -inf if sinks is None else sinks.reshape(-1)[i2]
        maximum = np.maximum(scores.max(axis=-1, keepdims=True, initial=-inf), sink)
        maximum[np.isneginf(maximum)] = 0
        weights = np.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - maximum)
        weights /= np.where(total == 0, 1, total)
        kept = (weights != 0).any(axis=0)
        result[i3, :, i2] = weights[:, kept] @ gains[kept]
    return result


def _lightning_indexer(src: Sources, params: object) -> Exact | None:
    q, k, weights, mask = (values(_present(x)) for x in src[:4])
    total = np.tile(mask[:, 0], (len(q) // len(mask), 1, 1))
    for head in range(q.shape[2]):
        products = q[:, :, head] @ k[:, :, 0].swapaxes(1, 2)
        total += np.maximum(products, 0) * weights[:, 0, :, head, None]
    return total[:, None]


def _hc_pre(src: Sources, params: HcPre) -> Exact | None:
    x, weights = values(_present(src[0]))[0], values(_present(src[1]))[0]
    by_stream = _sigmoid(weights) if params.gated else weights[0, :, :, None]
    total: Exact = params.scale * (x * by_stream).sum(axis=1)
    return total[None, None]


def _turns(n_pairs: int, mode: int, sections: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """For each pair, which of a token's positions turns it, and how many times slower than the first pair of those."""
    axes, powers, begin = [0] * n_pairs, [*range(n_pairs)], [0] * 4
    if mode & 8:
        of_sector = np.repeat(range(4), sections).tolist()
        starts = np.cumsum([0, *sections[:3]]).tolist()
        for pair in range(n_pairs):
            sector = pair % len(of_sector)
            axis = of_sector[sector]
            if mode == 40:
                axis = sector % 3 if sector < 3 * sections[sector % 3] else 3
            elif mode == 24 and sector in starts:
                begin[starts.index(sector)] = pair
            axes[pair], powers[pair] = axis, pair - begin[axis]
    return axes, powers


def _rope(src: Sources, params: Rope, sign: int = 1) -> Exact | None:
    p, n_dims, mode, offset = params, params.n_dims, params.mode, params.n_offs
    if mode not in (0, 2, 8, 24, 40):
        return None
    x = values(_present(src[0]))
    n = n_dims if mode == 24 else n_dims // 2
    axes, powers = _turns(n, mode, p.sections)
    positions = values(_present(src[1])).reshape(4 if mode & 8 else 1, -1)
    theta = positions[axes].T * p.freq_base ** (-2.0 * np.array(powers) / n_dims)
    if len(src) > 2 and src[2] is not None:
        theta = theta / values(src[2]).reshape(-1)[:n]
    angle, attn = theta * p.freq_scale, p.attn_factor
    if p.ext_factor:
        low, high = (
            n_dims * np.log(p.n_ctx_orig / (n * 2 * np.pi)) / (2 * np.log(p.freq_base))
            for n in (p.beta_fast, p.beta_slow)
        )
        low, high = max(0.0, np.floor(low)), min(n_dims - 1.0, np.ceil(high))
        ramp = p.ext_factor * (1 - np.clip((np.arange(theta.shape[1]) - low) / max(0.001, high - low), 0, 1))
        angle = angle * (1 - ramp) + theta * ramp
        attn *= 1 + 0.1 * np.log(1 / p.freq_scale)
    cos, sin = (attn * turn[:, None] for turn in (np.cos(angle), sign * np.sin(angle)))
    first, second = (
        (slice(offset + i, offset + 2 * n, 2) if mode == 0 else slice(offset + i * n, offset + (i + 1) * n))
        for i in (0, 1)
    )
    rotated = x.copy()
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def _rope_back(src: Sources, params: Rope) -> Exact | None:
    return _rope(src, params, -1)


def _mul_mat(src: Sources, params: object) -> Exact | None:
    """dst[i3, i2, i1, i0] = src0[i3 / r3, i2 / r2, i0] . src1[i3, i2, i1], whatever src1 is quantised to there."""
    weights, b = _present(src[0]).unpacked(), values(_present(src[1]))
    n3, n2, n1, k = b.shape
    if weights.ne[0] != k or n2 % weights.ne[2] or n3 % weights.ne[3]:
        return None
    table, m = raw(weights), weights.ne[1]
    result = np.empty((n3, n2, n1, m))
    step = max(1, _CHUNK // max(1, k))
    for w3, w2 in np.ndindex(weights.ne[3], weights.ne[2]):
        i3, i2 = (
            slice(w * (n // of), (w + 1) * (n // of)) for w, n, of in ((w3, n3, weights.ne[3]), (w2, n2, weights.ne[2]))
        )
        for begin in range(0, m, step):
            rows = _decoded(weights, table[w3, w2, begin : begin + step])
            result[i3, i2, :, begin : begin + step] = b[i3, i2] @ rows.T
    return result


def _mul_mat_id(src: Sources, params: object) -> Exact | None:
    """dst[0, token, slot] = the rows of src0's matrix ids[token, slot] . src1[token, slot % its slots]."""
    weights, b, ids = _present(src[0]).unpacked(), values(_present(src[1])), _present(src[2]).view()[0, 0]
    table, (n_tokens, n_slots) = raw(weights), ids.shape
    result = np.empty((1, n_tokens, n_slots, weights.ne[1]))
    for expert in np.unique(ids):
        rows = _decoded(weights, table[0, int(expert)])
        tokens, slots = np.nonzero(ids == expert)
        result[0, tokens, slots] = b[0, tokens, slots % b.shape[2]] @ rows.T
    return result


def _sigmoid(x: Exact) -> Exact:
    return 1 / (1 + np.exp(-x))


def _silu(x: Exact) -> Exact:
    return x * _sigmoid(x)


def _gelu(x: Exact) -> Exact:
    y: Exact = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    return y


def _gelu_quick(x: Exact) -> Exact:
    return x * _sigmoid(1.702 * x)


def _gelu_erf(x: Exact) -> Exact:
    y: Exact = 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / np.sqrt(2)))
    return y


def _relu(x: Exact) -> Exact:
    return np.maximum(x, 0)


def _hard_sigmoid(x: Exact) -> Exact:
    return np.clip((x + 3) / 6, 0, 1)


def _halves(src: Sources, params: Glu) -> tuple[Exact, Exact]:
    """What a gated unit activates, and what it multiplies that with."""
    x = values(_present(src[0]))
    if len(src) > 1 and src[1] is not None:
        return x, values(src[1])
    n = x.shape[-1] // 2
    first, second = x[..., :n], x[..., n:]
    return (second, first) if params.swapped else (first, second)


def _gated(function: Callable[[Exact], Exact]) -> Formula:
    def compute(src: Sources, params: Glu) -> Exact | None:
        x, gate = _halves(src, params)
        return function(x) * gate

    return compute


def _swiglu_oai(src: Sources, params: Glu) -> Exact | None:
    x, gate = _halves(src, params)
    alpha, limit = params.alpha, params.limit
    x = np.minimum(x, limit)
    return x * _sigmoid(alpha * x) * (np.clip(gate, -limit, limit) + 1)


def _swiglu_clamp(src: Sources, params: Glu) -> Exact | None:
    x, gate = _halves(src, params)
    return _silu(np.minimum(x, params.limit)) * np.clip(gate, -params.limit, params.limit)


def _xielu(src: Sources, params: Xielu) -> Exact | None:
    x = values(_present(src[0]))
    below = (np.expm1(np.minimum(x, params.eps)) - x) * params.alpha_n
    return np.where(x > 0, params.alpha_p * x * x, below) + params.beta * x


def _arange(src: Sources, params: Arange) -> Exact | None:
    start, stop, step = params.start, params.stop, params.step
    places = np.arange(np.ceil(np.float32(stop - start) / np.float32(step)), dtype=np.float64)
    return (start + step * places).reshape(1, 1, 1, -1)


# terms: sums of numbers, and functions that end with a difference


def _partial_sums(x: Exact) -> Exact:
    """Of each row up to each element: the terms and the sums on the way, as root mean squares; whatever the order."""
    places = np.arange(1, x.shape[-1] + 1)
    on_the_way: Exact = np.sqrt(np.cumsum(np.square(np.cumsum(x, axis=-1)), axis=-1) / places)
    terms: Exact = np.sqrt(np.cumsum(np.square(x), axis=-1))
    return np.maximum(on_the_way, terms)


def _cumsum_terms(src: Sources, params: object) -> Exact | None:
    return _partial_sums(values(_present(src[0])))


def _row_terms(src: Sources, params: object) -> Exact | None:
    return _partial_sums(values(_present(src[0])))[..., -1:]


def _mean_terms(src: Sources, params: object) -> Exact | None:
    x = values(_present(src[0]))
    return _partial_sums(x / x.shape[-1])[..., -1:]


def _sum_terms(src: Sources, params: object) -> Exact | None:
    return _partial_sums(values(_present(src[0])).reshape(1, 1, 1, -1))[..., -1:]


def _arange_terms(src: Sources, params: Arange) -> Exact | None:
    result = _arange(src, params)
    return None if result is None else np.abs(result - params.start) + abs(params.start)


def _xielu_terms(src: Sources, params: Xielu) -> Exact | None:
    x = np.abs(values(_present(src[0])))
    return np.maximum(abs(params.alpha_n) * x, abs(params.beta) * x)


def _gated_terms(src: Sources, params: Glu) -> Exact | None:
    x, gate = _halves(src, params)
    return _half(x) * np.abs(gate)


def _half(x: Exact) -> Exact:
    return np.abs(x) / 2


_ELEMENT: dict[str, Callable[[Exact], Exact]] = {
    "SQR": np.square,
    "SQRT": np.sqrt,
    "LOG": np.log,
    "SIN": np.sin,
    "COS": np.cos,
    "ABS": np.abs,
    "NEG": np.negative,
    "SGN": np.sign,
    "STEP": lambda x: np.where(x > 0, 1.0, 0.0),
    "EXP": np.exp,
    "EXPM1": np.expm1,
    "TANH": np.tanh,
    "ELU": lambda x: np.where(x > 0, x, np.expm1(x)),
    "RELU": _relu,
    "SIGMOID": _sigmoid,
    "SILU": _silu,
    "GELU": _gelu,
    "GELU_QUICK": _gelu_quick,
    "GELU_ERF": _gelu_erf,
    "HARDSIGMOID": _hard_sigmoid,
    "HARDSWISH": lambda x: x * _hard_sigmoid(x),
    "SOFTPLUS": lambda x: np.where(x > 20, x, np.log1p(np.exp(x))),
}
_GATED: dict[str, Callable[[Exact], Exact]] = {
    "SWIGLU": _silu,
    "GEGLU": _gelu,
    "REGLU": _relu,
    "GEGLU_ERF": _gelu_erf,
    "GEGLU_QUICK": _gelu_quick,
}
_BINARY = {"ADD": np.add, "SUB": np.subtract, "MUL": np.multiply, "DIV": np.divide}

_FUNCTIONS: dict[str, Formula] = {
    **{name: _binary(function) for name, function in _BINARY.items()},
    **{name: _unary(function) for name, function in _ELEMENT.items()},
    **{name: _gated(function) for name, function in _GATED.items()},
    "SWIGLU_OAI": _swiglu_oai,
    "SWIGLU_CLAMP": _swiglu_clamp,
    "XIELU": _xielu,
    "SCALE": _scale,
    "CLAMP": _clamp,
    "LEAKY_RELU": _leaky_relu,
    "ARANGE": _arange,
    "ADD_ID": _add_id,
    "SUM_ROWS": _sum_rows,
    "SUM": _sum,
    "MEAN": _mean,
    "CUMSUM": _cumsum,
    "POOL_2D": _pool_2d,
    "TIMESTEP_EMBEDDING": _timestep_embedding,
    "RMS_NORM": _rms_norm,
    "NORM": _norm,
    "L2_NORM": _l2_norm,
    "GROUP_NORM": _group_norm,
    "SOFT_MAX": _soft_max,
    "FLASH_ATTN_EXT": _attention,
    "ROPE": _rope,
    "ROPE_BACK": _rope_back,
    "MUL_MAT": _mul_mat,
    "MUL_MAT_ID": _mul_mat_id,
    "LIGHTNING_INDEXER": _lightning_indexer,
    "DSV4_HC_PRE": _hc_pre,
}

_ROPES = ("ROPE", "ROPE_BACK")

_CONVOLUTIONS = ("CONV_2D", "CONV_3D", "CONV_2D_DW", "CONV_TRANSPOSE_1D", "CONV_TRANSPOSE_2D")

# ops whose definitions compute in the type of their sources
_DEFINED = (
    *("SSM_CONV", "SSM_SCAN", "RWKV_WKV6", "RWKV_WKV7", "GATED_LINEAR_ATTN", "GATED_DELTA_NET"),
    *("SOLVE_TRI", "DSV4_HC_COMB", "DSV4_HC_POST", "COL2IM_1D", "IM2COL_BACK", "POOL_1D", "POOL_2D_BACK", "UPSCALE"),
    *("ADD_REL_POS", *_CONVOLUTIONS),
)

_TERMS: dict[str, Formula] = {
    "SUM_ROWS": _row_terms,
    "SUM": _sum_terms,
    "MEAN": _mean_terms,
    "CUMSUM": _cumsum_terms,
    "ARANGE": _arange_terms,
    "GELU": _unary(_half),
    "GELU_ERF": _unary(_half),
    "GEGLU": _gated_terms,
    "GEGLU_ERF": _gated_terms,
    "EXPM1": _unary(lambda x: np.ones_like(x)),
    "ELU": _unary(lambda x: np.where(x > 0, np.abs(x), 1.0)),
    "SOFTPLUS": _unary(lambda x: np.ones_like(x)),
    "XIELU": _xielu_terms,
}
