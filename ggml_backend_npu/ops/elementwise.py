"""Element by element: ADD, ADD1, SUB, MUL, DIV, ADD_ID, SCALE, CLAMP, FILL, ARANGE. Byte for byte what ggml's CPU
computes.

For SCALE with a bias, and for ARANGE, that holds on a processor with fused multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Annotated, NamedTuple

import numpy as np

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import undefined
from ggml_backend_npu.ops.kernels import elements
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add as fma
from ggml_backend_npu.ops.kernels.strided import ids_check
from ggml_backend_npu.ops.kernels.tiles import bind_elementwise
from ggml_backend_npu.ops.movers import DECODED, ENCODED, checked_ids, convert, tiled
from ggml_backend_npu.registry import cases, exact, probes
from ggml_backend_npu.registry.checks import Exact, Formula, Make, Mistake, Probe, Types
from ggml_backend_npu.registry.entry import Call, Op, op
from ggml_backend_npu.registry.mistakes import of_repeated, of_swapped_operands
from ggml_backend_npu.registry.params import Instead, Params, f32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, fused_multiply_add
from quant.kernels.late import types
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work


@dataclass(frozen=True)
class Scale(Params):
    """op_params of SCALE: ggml_scale_impl."""

    scale: Annotated[f32, Instead("scale", (1.0,))]
    bias: Annotated[f32, Instead("bias", (0.0,))]


@dataclass(frozen=True)
class Clamp(Params):
    """op_params of CLAMP: ggml_clamp."""

    min: Annotated[f32, Instead("minimum", (-inf,))]
    max: Annotated[f32, Instead("maximum", (inf,))]


@dataclass(frozen=True)
class Fill(Params):
    """op_params of FILL: ggml_fill_impl."""

    c: f32


@dataclass(frozen=True)
class Arange(Params):
    """op_params of ARANGE: ggml_arange."""

    start: f32
    stop: f32
    step: f32


_BOUND = 1e-14  # of a product and its sum, two roundings


def _refuse_scale(dst: Tensor, x: Tensor, params: Scale) -> str | None:
    return gaps(src=x, dst=dst) or other_ne(src=x, dst=dst)


def _is_product_alone(x: Tensor, bias: float) -> bool:
    """True for float32 without a bias; to bfloat16 the bias is always added, even 0."""
    return x.type == "f32" and bias == 0


@op(
    "SCALE",
    types=[("f32", "f32"), ("bf16", "bf16")],
    refuse=_refuse_scale,
    default=True,
    params=Scale,
    bound=_BOUND,
    built_by={"ggml_scale": "ctf", "ggml_scale_bias": "ctff"},
)
def scale(dst: Tensor, x: Tensor, params: Scale) -> None:
    """dst = x * scale + bias, in x's ne; dst may be x. Equals ggml_compute_forward_scale."""
    factor, bias = np.float32(params.scale), np.float32(params.bias)
    values = convert(x.view(), x.type, "f32")
    with np.errstate(all="ignore"):
        scaled = values * factor if _is_product_alone(x, float(bias)) else fma(values, factor, bias)
    dst.view()[...] = convert(scaled, "f32", dst.type)


@scale.compiled
def _scale(dst: Tensor, x: Tensor, params: Scale) -> Call | None:
    function = elements.scale if _is_product_alone(x, params.bias) else elements.scale_bias
    return bind_elementwise(function, dst, x, a=params.scale, b=params.bias)


@scale.formula
def _exact_scale(x: Tensor, params: Scale) -> Exact:
    return exact.values(x) * params.scale + params.bias


@scale.cases
def _nearest_scale(dst: Tensor, x: Tensor, params: Scale) -> list[str]:
    return [cases.has("type", x.type), cases.has("inplace", x.overlaps(dst))]


def _of_bias(bias: float) -> tuple[Make, ...]:
    return probes.of_widths(lambda width: probes.of_elements("SCALE", params=Scale(1.7, bias), width=width))


scale.nodes(probes.of_elements("SCALE", params=Scale(1.7, 0.3)))
scale.probes(
    lambda: [Probe("without a bias", _of_bias(0.0), fixed=True), Probe("with a bias", _of_bias(0.3))],
)


_BINARY = [
    *((name, name, name) for name in ("f32", "f16", "bf16")),
    *((dst, src, "f32") for src in ("f16", "bf16") for dst in (src, "f32")),
]
_QUANTIZED_SUMS = [(dst, src, "f32") for src in DECODED for dst in ("f32", "f16", "bf16", *ENCODED)]


def _refuse_binary(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != a.ne or any(n % m if m else n for n, m in zip(a.ne, b.ne, strict=True)):
        return f"src1 of ne {b.ne} does not repeat to src0 of ne {a.ne}, dst of ne {dst.ne}"
    return gaps_in_rows(src0=a, dst=dst)


def _refuse_add(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if not a.codec.is_quantized:
        return _refuse_binary(dst, a, b)
    if not dst.nb[0] <= dst.nb[1] <= dst.nb[2] <= dst.nb[3]:
        return f"dst is permuted: nb {dst.nb}"
    return other_ne(src0=a, src1=b, dst=dst) or gaps_in_rows(src0=a, src1=b, dst=dst)


def _compute(function: np.ufunc, dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = function(a, b), b repeated to the size of a; rounded to float32, and then to dst's type."""
    y, x0, x1 = tiled(dst.view(), b.ne), tiled(a.view(), b.ne), tiled(b.view(), b.ne)
    with np.errstate(all="ignore"):
        if dst.type == a.type == b.type == "f32":
            function(x0, x1, out=y)
        else:
            values = function(convert(x0, a.type, "f32"), convert(x1, b.type, "f32"))
            y[...] = convert(values, "f32", dst.type)


@op(
    "ADD",
    types=[*_BINARY, *_QUANTIZED_SUMS],
    refuse=_refuse_add,
    built_by={"ggml_add": "ctt", "ggml_add_cast": "ctti"},
)
def add(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst = a + b, b repeated to the ne of a, which is dst's; a may be quantised if b has the same size.

    Equals ggml_compute_forward_add_non_quantized and ggml_compute_forward_add_q_f32.
    """
    if a.codec.is_quantized:
        with np.errstate(all="ignore"):
            total = convert(a.view(), a.type, "f32", numerics=numerics) + b.view()
            dst.view()[...] = convert(total, "f32", dst.type, rows=True, numerics=numerics)
    else:
        _compute(np.add, dst, a, b)


add.undefined(undefined.blocks_of_sums)

_ADD1 = [
    ("f32", "f32", "f32"),
    *((type, type, other) for type in ("f16", "bf16") for other in (type, "f32")),
    *((type, type, "f32") for type in DECODED if type in ENCODED),
]


def _refuse_add1(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if b.ne != (1, 1, 1, 1):
        return f"src1 of ne {b.ne}"
    if a.codec.is_quantized:
        if a.ne[3] != 1:
            return f"src0 of ne {a.ne}: ggml's CPU writes quantised rows elsewhere"
        if not dst.nb[0] <= dst.nb[1] <= dst.nb[2] <= dst.nb[3]:
            return f"dst is permuted: nb {dst.nb}"
    return other_ne(src0=a, dst=dst) or gaps_in_rows(src0=a, dst=dst)


@op("ADD1", types=_ADD1, refuse=_refuse_add1)
def add1(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst = a + b, where b is a single number, ne (1, 1, 1, 1). Equals ggml_compute_forward_add1."""
    add.define(dst, a, b, numerics=numerics)


add1.undefined(undefined.blocks_of_sums)


@add1.compiled
def _add1(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    return None if a.codec.is_quantized else bind_elementwise(elements.add, dst, a, b)


@op("SUB", types=_BINARY, refuse=_refuse_binary)
def sub(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a - b, b repeated to the ne of a, which is dst's. Equals ggml_compute_forward_sub."""
    _compute(np.subtract, dst, a, b)


@op("MUL", types=_BINARY, refuse=_refuse_binary)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a * b, b repeated to the ne of a, which is dst's. Equals ggml_compute_forward_mul."""
    _compute(np.multiply, dst, a, b)


@op("DIV", types=_BINARY, refuse=_refuse_binary)
def div(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """dst = a / b, b repeated to the ne of a, which is dst's. Equals ggml_compute_forward_div."""
    _compute(np.divide, dst, a, b)


@add.compiled
def _add(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    return None if a.codec.is_quantized else bind_elementwise(elements.add, dst, a, b)


@sub.compiled
def _sub(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return bind_elementwise(elements.sub, dst, a, b)


@mul.compiled
def _mul(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return bind_elementwise(elements.mul, dst, a, b)


@div.compiled
def _div(dst: Tensor, a: Tensor, b: Tensor) -> Call | None:
    return bind_elementwise(elements.div, dst, a, b)


# of broadcasts, those that ggml's cases of the four have: which dimensions repeat; the last two not of a second source
# that is permuted
_BROADCASTS = ["1111", "n111", "1n11", "11n1", "111n", "11nn", "1nnn", "nnnn", "nn11", "1nn1"]


def _nearest_binary(dst: Tensor, a: Tensor, b: Tensor) -> list[str]:
    if a.type != b.type:
        return [cases.has("type", a.type), cases.has("type_b", b.type)]
    repeats, permuted = cases.repeats(b.ne, a.ne), cases.is_permuted(b)
    overlap = a.overlaps(b) and not permuted and repeats == "1111"
    known = repeats in (_BROADCASTS[:-2] if permuted else _BROADCASTS)
    flags = [cases.has("nf", 1), cases.has("perm1", permuted), cases.has("src_overlap", overlap)]
    return [cases.has("type", a.type), *([cases.nr(repeats)] if known else []), *flags]


def _exact_binary(function: np.ufunc) -> Formula:
    def formula(a: Tensor, b: Tensor) -> Exact:
        x = exact.values(a)
        result: Exact = function(x, exact.repeated(exact.values(b), x.shape))
        return result

    return formula


def _check_binary(binary: Op, function: np.ufunc, *, commutes: bool) -> None:
    binary.formula(_exact_binary(function))

    @binary.mistakes
    def mistaken(node: Node, a: Tensor, b: Tensor) -> Iterator[Mistake]:
        yield from of_repeated(node, 1, node.dst.ne, in_dst=True)
        if a.ne == b.ne and not commutes:
            yield from of_swapped_operands(node, a, b)

    binary.cases(_nearest_binary)


add1.formula(_exact_binary(np.add))
_check_binary(add, np.add, commutes=True)
_check_binary(sub, np.subtract, commutes=False)
_check_binary(mul, np.multiply, commutes=True)
_check_binary(div, np.divide, commutes=False)


def _refuse_add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> str | None:
    if b.ne[0] != a.ne[0] or ids.ne[:2] != a.ne[1:3]:
        return f"src1 of ne {b.ne}, ids of ne {ids.ne} do not fit src0 of ne {a.ne}"
    return other_ne(src0=a, dst=dst) or gaps_in_rows(src0=a, src1=b, dst=dst)


@op("ADD_ID", types=[("f32", "f32", "f32", "i32")], refuse=_refuse_add_id)
def add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    """dst[:, i2, i1, :] = a[:, i2, i1, :] + b[0, 0, ids[i2, i1], :]: the bias of the expert that made the row.

    a and dst (n, experts used, tokens, ...), b (n, experts), ids (experts used, tokens). Equals
    ggml_compute_forward_add_id. Raises KernelError, before anything is written, for an id outside b's rows.
    """
    rows = checked_ids(ids, b.ne[1])[0]
    with np.errstate(all="ignore"):
        np.add(a.view(), b.view()[0, 0, rows], out=dst.view())


@add_id.compiled
def _add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Call | None:
    added = bind_elementwise(elements.add, dst, a, b, ids=ids)
    return None if added is None else Job(ids_check(ids, b.ne[1]), *added.works)


@add_id.formula
def _exact_add_id(a: Tensor, b: Tensor, ids: Tensor) -> Exact:
    total: Exact = exact.values(a) + exact.values(b)[0, 0, ids.view()[0, 0]]
    return total


def _refuse_clamp(dst: Tensor, x: Tensor, params: Clamp) -> str | None:
    return other_ne(x=x, dst=dst) or gaps(x=x, dst=dst)


@op("CLAMP", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_clamp, params=Clamp)
def clamp(dst: Tensor, x: Tensor, params: Clamp) -> None:
    """dst = x, at least min and at most max, in x's ne; NaN becomes max.

    Equals ggml_compute_forward_clamp; which, if x has gaps between rows, reads past them.
    """
    low, high = np.float32(params.min), np.float32(params.max)
    values = convert(x.view(), x.type, "f32")
    below = np.where(values < high, values, high)
    dst.view()[...] = convert(np.where(below > low, below, low), "f32", dst.type)


@clamp.compiled
def _clamp(dst: Tensor, x: Tensor, params: Clamp) -> Call | None:
    return bind_elementwise(elements.clamp, dst, x, a=params.min, b=params.max)


@clamp.formula
def _exact_clamp(x: Tensor, params: Clamp) -> Exact:
    return np.clip(exact.values(x), params.min, params.max)


clamp.cases(lambda dst, x, params: cases.of_type(dst, x))


def _refuse_fill(dst: Tensor, x: Tensor, params: Fill) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(dst=dst)


@op("FILL", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_fill, params=Fill)
def fill(dst: Tensor, x: Tensor, params: Fill) -> None:
    """dst = c in every element; of x only the size is used.

    Equals ggml_compute_forward_fill.
    """
    dst.view()[...] = convert(np.full(1, params.c, np.float32), "f32", dst.type)


@fill.compiled
def _fill(dst: Tensor, x: Tensor, params: Fill) -> Call | None:
    return bind_elementwise(elements.clamp, dst, x, a=params.c, b=params.c)


def _refuse_arange(dst: Tensor, params: Arange) -> str | None:
    start, stop, step = (np.float32(value) for value in (params.start, params.stop, params.step))
    if dst.n_elements != math.ceil((stop - start) / step):
        return f"from {start} to {stop} by {step} into dst of ne {dst.ne}"
    return gaps(dst=dst)


@op("ARANGE", types=[("f32",)], refuse=_refuse_arange, params=Arange, bound=_BOUND)
def arange(dst: Tensor, params: Arange) -> None:
    """dst = start, start + step, start + 2 * step, ..., below stop: ceil((stop - start) / step) elements.

    Equals ggml_compute_forward_arange.
    """
    start, step = np.float32(params.start), np.float32(params.step)
    places = np.arange(dst.n_elements).astype(np.float32)
    dst.view()[...] = fma(places, step, start).reshape(dst.view().shape)


class Progression(NamedTuple):
    """start + i * step, to dst, an address."""

    dst: int
    start: np.float32
    step: np.float32


@compiled
def progression(p, begin, end, scratch):
    """A unit is one element: start + i * step."""
    of = record_at(p, Progression)
    start, step = of.start, of.step
    y = array_at(of.dst, types.float32, end)
    for i in range(begin, end):
        y[i] = fused_multiply_add(types.float32(i), step, start)
    return 0


@arange.compiled
def _arange(dst: Tensor, params: Arange) -> Call:
    of = Progression(dst.address, np.float32(params.start), np.float32(params.step))
    return Job(Work(progression, of, dst.n_elements, dst.nbytes, keep=dst))


@arange.formula
def _exact_arange(params: Arange) -> Exact:
    n = np.ceil(np.float32(params.stop - params.start) / np.float32(params.step))
    return (params.start + params.step * np.arange(n, dtype=np.float64)).reshape(1, 1, 1, -1)


@arange.terms
def _terms_of_arange(params: Arange) -> Exact:
    return np.abs(_exact_arange(params) - params.start) + abs(params.start)


@arange.nodes
def _make_arange(rng: probes.Rng, types: Types) -> Node:
    return probes.node("ARANGE", "f32", (1, 1, 1, 200), params=Arange(-3.3, 16.7, 0.1))
