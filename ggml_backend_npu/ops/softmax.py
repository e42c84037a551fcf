"""SOFT_MAX: softmax over rows (`ops.kernels.softmax`) whose mask is numbers.

The mask is added, as ggml's CPU does, so that a NaN or +inf makes its row NaN even where the mask is -inf, and so does
a row of -inf alone. The steps are those of ggml's CPU: SOFT_MAX is byte-equal to it on x86 with AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.softmax import MASKS, Rows, masked, slopes
from ggml_backend_npu.registry import cases, exact, probes
from ggml_backend_npu.registry.checks import Exact, Mistake, Probe, Sums, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.mistakes import LARGEST, of_repeated
from ggml_backend_npu.registry.params import Instead, Params, f32


@dataclass(frozen=True)
class SoftMax(Params):
    """op_params of SOFT_MAX: ggml_soft_max_impl. max_bias: of ALiBi; with 0 the mask is used as it is."""

    scale: Annotated[f32, Instead("scale", (1.0,))]
    max_bias: Annotated[f32, Instead("ALiBi bias", (0.0,))]


def _refuse(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> str | None:
    if dst.ne != x.ne:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    for role, tensor in (("x", x), ("dst", dst)):
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    if mask is not None:
        fits = mask.ne[0] == x.ne[0] and mask.ne[1] >= x.ne[1]
        repeats = all(m and n % m == 0 for n, m in zip(x.ne[2:], mask.ne[2:], strict=True))
        if mask.type not in MASKS or not (fits and repeats):
            return f"mask of type {mask.type}, ne {mask.ne} does not fit x of ne {x.ne}"
        if not mask.has_contiguous_rows():
            return f"mask rows have gaps: nb0 is {mask.nb[0]}"
    if sinks is not None and (sinks.type != "f32" or sinks.ne != (x.ne[2], 1, 1, 1) or not sinks.is_contiguous()):
        return f"sinks of type {sinks.type}, ne {sinks.ne} do not fit x of ne {x.ne}"
    return None


@op(
    "SOFT_MAX",
    types=[("f32", "f32")],
    refuse=_refuse,
    params=SoftMax,
    bound=1e-11,  # over 16,384 cells, added one after the other, 6e-12
    roles={"mask": "the mask", "sinks": "the sinks"},
    built_by={"ggml_soft_max_ext": "ctt ff", "ggml_soft_max_add_sinks": "tt"},
)
def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """dst = softmax of x * scale + slope * mask over each row, with a head's sink in its sum.

    x and dst (n, rows, heads, ...), mask (n, at least as many rows, ...), which repeats in dimensions 2 and 3, sinks
    (heads). Equals ggml_compute_forward_soft_max (the definition but for rounding): a row of
    which -inf alone is left is NaN. dst may be x.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scores = x.view() * np.float32(params.scale)
    if mask is not None:
        _, n2, n1, _ = scores.shape
        added = mask.view()[:, :, :n1].astype(np.float32)
        added = np.tile(added, (scores.shape[0] // added.shape[0], n2 // added.shape[1], 1, 1))
        slope = slopes(n2, params.max_bias)
        with np.errstate(invalid="ignore", over="ignore"):
            scores += added if slope is None else added * slope[:, None, None]
    sink = None if sinks is None else sinks.view().reshape(1, -1, 1, 1)
    dst.view()[...] = masked(scores, np.True_, sink)


@soft_max.compiled
def _soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> Call | None:
    by_head = None
    if sinks is not None:
        by_head = np.broadcast_to(sinks.view().reshape(1, -1, 1), x.ne[:0:-1])
    alibi = slopes(x.ne[2], params.max_bias) if mask is not None else None
    return Rows(dst, x, params.scale, mask, alibi, sinks=by_head).bind()


@soft_max.formula
def _exact_soft_max(x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> Exact:
    scores = exact.values(x) * params.scale
    if mask is not None:
        added = exact.values(mask)[:, :, : scores.shape[2]]
        added = exact.repeated(added, (*scores.shape[:2], *added.shape[2:]))
        slope = slopes(scores.shape[1], params.max_bias)
        scores = scores + (added if slope is None else added * slope.astype(np.float64)[:, None, None])
    maximum = scores.max(axis=-1, keepdims=True)
    sink = None if sinks is None else exact.values(sinks).reshape(1, -1, 1, 1)
    if sink is not None:
        maximum = np.maximum(maximum, sink)
    e = np.exp(scores - maximum)
    total = e.sum(axis=-1, keepdims=True)
    y: Exact = e / (total if sink is None else total + np.exp(sink - maximum))
    return y


@soft_max.sums
def _sums(x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> Sums | None:
    if x.ne[0] ** 2 > LARGEST:
        return None
    shares, each = _exact_soft_max(x, mask, sinks, params), np.eye(x.ne[0])
    return Sums(x.ne[0], lambda place: (shares[place], each), True, "elements {} of each row of src0")


def _make(rng: probes.Rng, types: Types, max_bias: float = 8.0) -> Node:
    """With a mask, sinks and ALiBi; the slopes for a bias of 8 are powers of two."""
    shape = 2, probes.HEADS, probes.TOKENS, 96
    x, mask = probes.normal(rng, "f32", *shape, size=4), probes.normal(rng, "f16", 1, 1, *shape[2:])
    mask.view()[..., ::5] = -np.inf
    sinks = probes.normal(rng, "f32", 1, 1, 1, probes.HEADS)
    return probes.node("SOFT_MAX", "f32", shape, x, mask, sinks, params=SoftMax(0.6, max_bias))


soft_max.nodes(_make)


@soft_max.probes
def _of_slopes() -> Iterator[Probe]:
    yield Probe("of a mask that slopes of 2 ** n scale", (_make,), fixed=True)
    yield Probe("of a mask that other slopes scale", (partial(_make, max_bias=1.5),), fused=True)


@soft_max.mistakes
def _mistaken(node: Node, x: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Iterator[Mistake]:
    if mask is not None:
        yield from of_repeated(node, 1, (*mask.ne[:2], *node.dst.ne[2:]))


@soft_max.cases
def _nearest(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> list[str]:
    return [
        cases.has("type", x.type),
        cases.has("mask", mask is not None),
        cases.has("sinks", sinks is not None),
        cases.has("m_prec", mask.type if mask is not None else "f32"),
        r"max_bias=[1-9][\d.]*" if mask is not None and params.max_bias > 0 else r"max_bias=0\.0*",
    ]
