"""FLASH_ATTN_EXT: softmax(q k^T) v, without ever holding all scores of a query in memory.

ggml's CPU rounds in three ways, which the definition and the kernels follow:

- q is rounded to the type that k's dot product takes: to float16 for a float16 k, to q8_0 for a q8_0 or q4_0 one ...
- if v is float16, a query's sum of v is float16 too: it is rounded after every cell, and once more if a larger
  score makes it smaller. A single query over 512 cells or more has one such sum per thread.
- neither, if k and v are both float32 or both float16 and there are 64 queries or more.

With `matmul` "fast" sums of v are float32, unless k is quantised, and the rows that share a head of k are multiplied
together. That is nearer to the truth, and gives other bytes.

With "exact", float16 k and v and fewer queries, every step is the CPU's: the order of ggml_vec_dot_f16, C's expf and
tanhf, and what GCC fuses. Where it multiplies and adds float16 as float16 (`Numerics`), so do they. There the result is
byte-equal if ggml was built for this processor.

NaN and infinity do in the kernels what they do on ggml's CPU; the definition leaves out what the mask excludes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import undefined
from ggml_backend_npu.ops.kernels.cells import attention
from ggml_backend_npu.ops.kernels.cells_fast import bind_attend_few
from ggml_backend_npu.ops.kernels.cells_in_halves import bind_attend_in_halves, products, sum_of_parts
from ggml_backend_npu.ops.kernels.cells_many import bind_attend
from ggml_backend_npu.ops.kernels.functions import tanhf
from ggml_backend_npu.ops.kernels.products import VEC_DOT
from ggml_backend_npu.ops.kernels.softmax import masked, slopes
from ggml_backend_npu.ops.movers import DECODED, convert
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Cost, Exact, Make, Mistake, Probe, Sums, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.mistakes import LARGEST, made, with_stride
from ggml_backend_npu.registry.params import Instead, Params, f32, i32
from quant import codec, dequantize
from quant.kernels.threads import working_team

_PRECISIONS = (0, 10)  # GGML_PREC_DEFAULT, GGML_PREC_F32
_MANY = 64  # queries that ggml's CPU multiplies as matrices
_LONG = 512  # cells that its threads share if there is one query
_FEW_CELLS = 64  # whose float32 sums the bound is enough for

_VALUES = ("f32", "f16", "bf16", *DECODED)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class FlashAttn(Params):
    """op_params of FLASH_ATTN_EXT: those of ggml_flash_attn_ext, prec (a ggml_prec), and n_kv_max."""

    scale: Annotated[f32, Instead("scale", (1.0,))]
    max_bias: Annotated[f32, Instead("ALiBi bias", (0.0,))]
    logit_softcap: Annotated[f32, Instead("soft cap of the logits", (0.0,))]
    prec: i32
    n_kv_max: i32


def _is_product(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ggml's CPU multiplies float32 matrices (64 queries or more)."""
    return k.type == v.type and k.type in ("f32", "f16") and q.ne[1] >= _MANY


def _query_type(q: Tensor, k: Tensor, v: Tensor) -> str:
    """The type that q is rounded to."""
    return "f32" if _is_product(q, k, v) else VEC_DOT[k.type]


def _in_halves(q: Tensor, k: Tensor, v: Tensor, numerics: Numerics) -> bool:
    """Whether the sums of v are float16. Beside a k whose products take a quantised q they always are: there the exact
    value is too far from the CPU's to show that float32 sums are right. So they are if k and v have other heads."""
    if v.type != "f16" or _is_product(q, k, v):
        return False
    return numerics.matmul == "exact" or codec(VEC_DOT[k.type]).is_quantized or k.ne[2:] != v.ne[2:]


def _n_sums(q: Tensor, k: Tensor, v: Tensor) -> int:
    """In how many parts the cells of a query are added up, joined at the end; 0 if they are not split."""
    alone = q.ne[1] == q.ne[3] == 1
    return working_team().n_threads if alone and k.type == v.type and k.ne[1] >= _LONG else 0


def _chunk(q: Tensor) -> int:
    """How many rows (query, head, sequence) a thread of ggml's CPU takes at once."""
    n_rows, n_threads = prod(q.ne[1:]), working_team().n_threads
    n_chunks = -(-n_rows // -(-n_rows // (4 * n_threads)))
    return -(-n_rows // (n_threads if n_threads == 1 or n_chunks < n_threads else n_chunks))


def _refuse(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> str | None:
    if params.prec not in _PRECISIONS:
        return f"precision {params.prec}"
    for role, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ne[0] % tensor.codec.block_size or not tensor.has_contiguous_rows():
            return f"{role} rows of {tensor.ne[0]} elements, nb0 {tensor.nb[0]}"
    if not dst.is_contiguous():
        return f"dst is not contiguous: nb {dst.nb}"
    if dst.ne != (v.ne[0], q.ne[2], q.ne[1], q.ne[3]) or k.ne[:2] != (q.ne[0], v.ne[1]):
        return f"q of ne {q.ne}, k of ne {k.ne}, v of ne {v.ne} do not fit dst of ne {dst.ne}"
    for role, ne in (("k", k.ne), ("v", v.ne), ("mask", mask.ne if mask is not None else q.ne)):
        if any(n % m if m else n for n, m in zip(q.ne[2:], ne[2:], strict=True)):
            return f"{role} of ne {ne} does not repeat to q of ne {q.ne}"
    if mask is not None:
        fits = mask.ne[0] >= k.ne[1] and mask.ne[1] >= q.ne[1] and mask.has_contiguous_rows()
        if mask.type != "f16" or not fits:
            return f"mask of type {mask.type}, ne {mask.ne}, nb0 {mask.nb[0]} for {k.ne[1]} cells, {q.ne[1]} queries"
    if sinks is not None and (sinks.type != "f32" or sinks.ne != (q.ne[2], 1, 1, 1) or not sinks.is_contiguous()):
        return f"sinks of type {sinks.type}, ne {sinks.ne} do not fit q of ne {q.ne}"
    return None


def _rounded(x: Floats, type: str, numerics: Numerics) -> Floats:
    """x rounded to a type, as float32 again."""
    return dequantize(convert(x, "f32", type, numerics=numerics), type).reshape(x.shape)


def _for_heads(values: Floats, q: Tensor, x: Tensor) -> Floats:
    """The values of k or v, repeated for every head and sequence of q."""
    return values.repeat(q.ne[2] // x.ne[2], axis=1).repeat(q.ne[3] // x.ne[3], axis=0)


def _repeated(x: Tensor, q: Tensor, numerics: Numerics) -> Floats:
    return _for_heads(convert(x.view(), x.type, "f32", numerics=numerics), q, x)


def _error_of_sums(q: Tensor, k: Tensor, queries: Floats, numerics: Numerics) -> Floats:
    """What the product of q8_1 with blocks that have a minimum adds: there, float16 rounds a block's sum of q."""
    sums = convert(q.view(), "f32", "q8_1", numerics=numerics)[..., 2:4].copy().view(np.float16)[..., 0]
    minima = k.view()[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    errors = sums - queries.reshape(*q.ne[:0:-1], k.n_blocks, -1).sum(-1)
    found: Floats = errors @ _for_heads(minima, q, k).swapaxes(2, 3)
    return found


def _added(mask: Tensor, q: Tensor, k: Tensor) -> Floats:
    n3, n2 = q.ne[3] // mask.ne[3], q.ne[2] // mask.ne[2]
    return np.tile(mask.view()[:, :, : q.ne[1], : k.ne[1]].astype(np.float32), (n3, n2, 1, 1))


@op(
    "FLASH_ATTN_EXT",
    types=[("f32", "f32", k, v) for k in VEC_DOT for v in _VALUES],
    refuse=_refuse,
    params=FlashAttn,
    # the CPU adds up a float16 v in float16, cell by cell: it is 1e-5 off itself, and an ulp of a score flips roundings
    bound={"f16": 1e-6, "*": 1e-11},
    bound_by="v",
    roles={"mask": "the mask", "sinks": "the sinks"},
    built_by={"ggml_flash_attn_ext": "ctttt fff", "ggml_flash_attn_ext_add_sinks": "tt"},
)
def flash_attn_ext(
    dst: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    params: FlashAttn,
    numerics: Numerics = PLAIN,
) -> None:
    """dst = softmax(cap * tanh(scale * q k^T / cap) + slope * mask) v for each head, with the head's sink in the sum.

    q (dk, queries, heads, sequences), k (dk, cells, heads of k, sequences of k) and v (dv, cells, ...), whose heads and
    sequences repeat to q's; mask (cells, queries, ...), -inf if a cell is excluded; dst (dv, heads, queries,
    sequences). With a cap of 0 there is no tanh. Equals ggml_compute_forward_flash_attn_ext but for rounding.
    """
    scale, max_bias, softcap = params.scale, params.max_bias, params.logit_softcap
    queries = _rounded(q.view(), _query_type(q, k, v), numerics)
    values = _repeated(v, q, numerics)
    with np.errstate(all="ignore"):
        if k.type == "f16" and _in_halves(q, k, v, numerics):
            scores = products(queries, _repeated(k, q, numerics), numerics.dots_in_halves)
        else:
            scores = queries @ _repeated(k, q, numerics).swapaxes(2, 3)
        if VEC_DOT[k.type] == "q8_1":
            scores = scores + _error_of_sums(q, k, queries, numerics)
        if softcap:
            scores = np.float32(softcap) * tanhf(scores * np.float32(np.float32(scale) / np.float32(softcap)))
        else:
            scores = scores * np.float32(scale)
        kept = np.ones((1, 1, 1, 1), np.bool_)
        if mask is not None:
            added = _added(mask, q, k)
            kept = ~np.isneginf(added)
            slope = slopes(q.ne[2], max_bias)
            scores = scores + (added if slope is None else added * slope[:, None, None])
        kept = np.broadcast_to(kept, scores.shape)
        sink = None if sinks is None else sinks.view().reshape(1, -1, 1, 1)
        if _in_halves(q, k, v, numerics):
            y = sum_of_parts(scores, kept, values, _n_sums(q, k, v), numerics.halves, sink)
        else:
            y = masked(scores, kept, sink) @ values
    dst.view()[...] = y.swapaxes(1, 2)


@flash_attn_ext.compiled
def _flash_attn_ext(
    dst: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    params: FlashAttn,
    numerics: Numerics,
) -> Call | None:
    by_head = slopes(q.ne[2], params.max_bias) if mask is not None else None
    of = attention(
        dst,
        q,
        k,
        v,
        mask,
        sinks,
        scale=params.scale,
        softcap=params.logit_softcap,
        by_head=by_head,
        query_type=_query_type(q, k, v),
        numerics=numerics,
    )
    if of is None:
        return None
    if _in_halves(q, k, v, numerics):
        return bind_attend_in_halves(of, _n_sums(q, k, v), numerics, by_head)
    if numerics.matmul == "fast":
        return bind_attend_few(of, by_head) or bind_attend(of, 0, by_head)
    return bind_attend(of, _chunk(q) if _is_product(q, k, v) else 0, by_head)


@flash_attn_ext.formula
def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn) -> Exact:
    """Computes one head after the other. A cell that the mask excludes may hold anything."""
    queries, all_keys, all_gains = (exact.values(x) for x in (q, k, v))
    added = None if mask is None else exact.values(mask)
    slope = slopes(q.ne[2], params.max_bias)
    result = np.empty((q.ne[3], q.ne[1], q.ne[2], v.ne[0]))
    for i3, i2 in np.ndindex(q.ne[3], q.ne[2]):
        keys, gains = (x[i3 * len(x) // q.ne[3], i2 * x.shape[1] // q.ne[2]] for x in (all_keys, all_gains))
        scores = queries[i3, i2] @ keys.T * params.scale
        if params.logit_softcap:
            scores = params.logit_softcap * np.tanh(scores / params.logit_softcap)
        if added is not None:
            row = _rows_of_mask(added, q, k, i3, i2)
            scores += row if slope is None else row * float(slope[i2])
            scores[np.isneginf(row)] = -np.inf
        sink = -np.inf if sinks is None else exact.values(sinks).reshape(-1)[i2]
        maximum = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        maximum[np.isneginf(maximum)] = 0
        weights = np.exp(scores - maximum)
        total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - maximum)
        weights /= np.where(total == 0, 1, total)
        kept = (weights != 0).any(axis=0)
        result[i3, :, i2] = weights[:, kept] @ gains[kept]
    return result


@flash_attn_ext.terms
def _terms(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> Exact | None:
    """A float32 sum over n cells is rounded n times, so it is sqrt(n) times as far off as one addition. With hundreds
    of cells that is more than what the scores add, if the first one has nearly all of the weight. Sums in float16 have
    a bound of their own."""
    if v.type == "f16":
        return None
    result = np.abs(_exact(q, k, v, mask, sinks, params))
    added = None if mask is None else exact.values(mask)
    for i3, i2 in np.ndindex(q.ne[3], q.ne[2]):
        cells = _seen(q, k, added, i3, i2).sum(axis=-1)
        result[i3, :, i2] *= np.sqrt(np.maximum(cells / _FEW_CELLS, 1))[:, None]
    return result


@flash_attn_ext.sums
def _sums(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn) -> Sums | None:
    """The weights are what attention gives if v is the identity."""
    n = k.ne[1]
    if max(n * prod(q.ne[1:]), n * n) > LARGEST:
        return None
    shares = _exact(q, k, Tensor.of(np.eye(n).reshape(1, 1, n, n), "f64"), mask, sinks, params)
    gains = np.nan_to_num(exact.values(v), posinf=0.0, neginf=0.0)  # what is masked may be anything

    def terms(place: tuple[int, int, int]) -> tuple[Exact, Exact]:
        i3, _, i1 = place
        return shares[place], gains[i3 * v.ne[3] // q.ne[3], i1 * v.ne[2] // q.ne[2]]

    return Sums(n, terms, True, "cells {} of src1 and src2")


@flash_attn_ext.undefined
def _undefined(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *_: object, **__: object
) -> undefined.Flags:
    if _is_product(q, k, v):  # tiles are filled up with zeros, and infinity times 0 is NaN; sums may overflow
        return np.broadcast_to(undefined.spoilt_rows(q).swapaxes(1, 2)[..., None], dst.ne[::-1])
    if not codec(VEC_DOT[k.type]).is_quantized:
        return undefined.NOTHING
    found, keys = undefined.spoilt_rows(q).swapaxes(1, 2), undefined.spoilt_rows(k)
    added = None if mask is None else exact.values(mask)
    for i3, i2 in np.ndindex(q.ne[3], q.ne[2]):
        spoilt = keys[i3 * k.ne[3] // q.ne[3], i2 * k.ne[2] // q.ne[2]]
        if spoilt.any():
            found[i3, :, i2] |= (_seen(q, k, added, i3, i2) & spoilt).any(axis=-1)
    return np.broadcast_to(found[..., None], dst.ne[::-1])


def _seen(q: Tensor, k: Tensor, added: Exact | None, i3: int, i2: int) -> NDArray[np.bool_]:
    """Which cells the queries of a head see, (queries, cells), by the mask's values."""
    if added is None:
        return np.ones((q.ne[1], k.ne[1]), np.bool_)
    hidden: NDArray[np.bool_] = np.isneginf(_rows_of_mask(added, q, k, i3, i2))
    return ~hidden


def _rows_of_mask(added: Exact, q: Tensor, k: Tensor, i3: int, i2: int) -> Exact:
    """What the mask adds to the scores of a head, (queries, cells)."""
    return added[i3 % len(added), i2 % added.shape[1], : q.ne[1], : k.ne[1]]


@flash_attn_ext.costs
def _cost(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> Cost:
    return Cost(2 * (k.ne[0] + v.ne[0]) * k.ne[1] * prod(q.ne[1:]), matrix=k.type)


@flash_attn_ext.mistakes
def _mistaken(
    node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Iterator[Mistake]:
    """Wrong mappings from the sequences and heads of q to those of k and v."""
    if k.ne[3] > 1:
        first = (replace(each, nb=with_stride(each.nb, 3, 0)) for each in (k, v))
        text = "has each sequence of src0 meet sequence 0 of src1 and src2"
        yield Mistake(text, replace(node, src=(q, *first, *node.src[3:])))
    n_kv, n = k.ne[2], q.ne[2] // max(1, k.ne[2])
    if n_kv == 1 or q.ne[2] * max(k.n_elements, v.n_elements) > LARGEST * n_kv:
        return
    if n > 1:
        tiles = (made(each, np.concatenate([each.view()] * n, axis=1)) for each in (k, v))
        text = f"has head h of src0 meet head h % {n_kv} of src1 and src2, not h // {n}"
        yield Mistake(text, replace(node, src=(q, *tiles, *node.src[3:])))
    padded = 1 << (n - 1).bit_length()
    if padded > n:
        heads = np.minimum(np.arange(q.ne[2]) // padded, n_kv - 1)
        groups = (made(each, each.view()[:, heads]) for each in (k, v))
        text = f"has head h of src0 meet head h // {padded} of src1 and src2, a power of two, not h // {n}"
        yield Mistake(text, replace(node, src=(q, *groups, *node.src[3:])))
    first = (replace(each, nb=with_stride(each.nb, 2, 0)) for each in (k, v))
    yield Mistake("has each head of src0 meet head 0 of src1 and src2", replace(node, src=(q, *first, *node.src[3:])))


def _make(
    *, cells: int = 50, queries: int = 3, bias: float = 8.0, softcap: float = 5.0, sinks: bool = True,
    widths: tuple[int, int] | None = None,
) -> Make:  # fmt: skip
    """A node of grouped heads. widths: of a row of k and of v."""

    def make(rng: probes.Rng, types: Types) -> Node:
        least = max(64, codec(types[2]).block_size, codec(types[3]).block_size)
        n, n_v = widths or (least, least)
        heads = 2 * probes.HEADS
        q = probes.normal(rng, "f32", 1, heads, queries, n)
        k, v = (probes.normal(rng, types[i], 1, probes.HEADS, cells, size) for i, size in ((2, n), (3, n_v)))
        mask = probes.normal(rng, "f16", 1, 1, queries, cells)
        mask.view()[..., 3::7] = -np.inf
        sink = probes.normal(rng, "f32", heads) if sinks else None
        params = FlashAttn(n**-0.5, bias, softcap, prec=0, n_kv_max=0)
        return probes.node("FLASH_ATTN_EXT", "f32", (1, queries, heads, n_v), q, k, v, mask, sink, params=params)

    return make


_FEW, _ALONE = _make(), _make(cells=600, queries=1, bias=0, softcap=0, sinks=False)

flash_attn_ext.nodes(_FEW, _ALONE, _make(cells=50, queries=70, softcap=0))


@flash_attn_ext.probes
def _of_types() -> Iterator[Probe]:
    halves = "f32", "f32", "f16", "f16"
    of_widths = probes.of_widths(lambda n: _make(widths=(64, n), sinks=False), (64, 65, 66, 79, 80, 130))
    few = _is_of_halves(lambda q, sinks: q.ne[1] < _MANY and not sinks)
    yield Probe("of f16, fewer than 64 queries", (_ALONE, *of_widths), halves, fused=True, covers=few)
    of_sinks = tuple(_make(cells=n, queries=16) for n in (1, 2, 3, 9, 50))
    with_sinks = _is_of_halves(lambda q, sinks: q.ne[1] < _MANY and sinks)
    yield Probe("of f16 with sinks, fewer than 64 queries", of_sinks, halves, covers=with_sinks)
    many = _is_of_halves(lambda q, sinks: q.ne[1] >= _MANY)
    yield Probe("of f16, 64 queries or more", (_make(queries=70),), halves, covers=many)
    yield Probe("of q8_0", (_FEW,), ("f32", "f32", "q8_0", "q8_0"), covers=lambda dst, q, k, v, *_: k.type == "q8_0")
    yield Probe("of f32", (_FEW,), covers=lambda dst, q, k, v, *_: k.type == "f32")


def _is_of_halves(also: Callable[[Tensor, bool], bool]) -> Callable[..., bool]:
    """Whether k and v are float16, and q and whether there are sinks are so, too."""

    def covers(dst: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> bool:
        return k.type == v.type == "f16" and also(q, len(rest) > 1 and rest[1] is not None)

    return covers
