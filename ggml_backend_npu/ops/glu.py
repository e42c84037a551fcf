"""GLU: dst = f(gate) * up, where gate and up are two tensors, or the two halves of one tensor's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels import elements, functions
from ggml_backend_npu.ops.kernels.functions import Floats, mapped
from ggml_backend_npu.ops.kernels.tiles import bind_elementwise, bind_lookup
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Mistake, Probe, Types
from ggml_backend_npu.registry.entry import Call, Op, op
from ggml_backend_npu.registry.mistakes import of_swapped_operands
from ggml_backend_npu.registry.params import Params, f32, i32
from ggml_backend_npu.registry.shapes import gaps_in_matrices, other_ne

_1 = np.float32(1)
_BOUND = 1e-12  # as of the functions of UNARY


@dataclass(frozen=True)
class Glu(Params):
    """op_params of the functions of GLU: ggml_glu_impl; alpha and limit of ggml_swiglu_oai and ggml_swiglu_clamp.

    op       a ggml_glu_op
    swapped  the gate is the second half of one tensor's rows, not the first
    """

    op: i32
    swapped: i32
    alpha: f32
    limit: f32


def _gate_and_up(a: Tensor, b: Tensor | None, params: Glu) -> tuple[Tensor, Tensor]:
    """Gate and up: a and b, or the halves of a's rows."""
    if b is not None:
        return a, b
    width = a.ne[0] // 2
    first = replace(a, ne=(width, *a.ne[1:]))
    second = replace(first, offset=a.offset + width * a.nb[0])
    return (second, first) if params.swapped else (first, second)


def _refuse(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> str | None:
    sources = {"src0": a} if b is None else {"src0": a, "src1": b}
    if b is not None and b.type != a.type:
        return f"src0 of type {a.type}, src1 of type {b.type}"
    gate, up = _gate_and_up(a, b, params)
    return other_ne(gate=gate, up=up, dst=dst) or gaps_in_matrices(**sources, dst=dst)


def _check(glu: Op, function: Callable[..., Exact], terms: exact.Function | None = None, **params: float) -> None:
    """Sets the formula of an op, the exact value of `function`(gate, up, params); and its nodes with these params."""

    @glu.formula
    def formula(a: Tensor, b: Tensor | None, params: Glu) -> Exact:
        gate, up = _exact_halves(a, b, params)
        return function(gate, up, params)

    if terms is not None:

        @glu.terms
        def terms_of(a: Tensor, b: Tensor | None, params: Glu) -> Exact:
            gate, up = _exact_halves(a, b, params)
            return terms(gate) * np.abs(up)

    def of_width(width: int) -> Make:
        """Of two sources."""

        def make(rng: probes.Rng, types: Types) -> Node:
            shape = 1, 3, 5, width
            a, b = (probes.tensor(types[1], rng.uniform(-6, 6, shape)) for _ in range(2))
            return probes.node(glu.name, types[0], shape, a, b, params=Glu(0, 0, **{"alpha": 0, "limit": 0} | params))

        return make

    if glu.bound:
        glu.nodes(of_width(64))
        glu.probes(lambda: [Probe("", probes.of_widths(of_width))])

    @glu.mistakes
    def mistaken(node: Node, a: Tensor, b: Tensor | None) -> Iterator[Mistake]:
        yield from of_swapped_operands(node, a, b)
        if b is None:
            given = Glu.of(node.params)
            which = "first" if given.swapped else "second"
            text = f"takes the {which} half of a row of src0 for the one that the function is of"
            yield Mistake(text, replace(node, params=replace(given, swapped=int(not given.swapped)).packed))


def _exact_halves(a: Tensor, b: Tensor | None, params: Glu) -> tuple[Exact, Exact]:
    gate, up = _gate_and_up(a, b, params)
    return exact.values(gate), exact.values(up)


def _register(
    name: str,
    function: Callable[[Floats, Floats, str], Floats],
    compiled: Callable[[Tensor, Tensor, Tensor], Call | None],
    exactly: exact.Function,
    bound: float = _BOUND,
    terms: exact.Function | None = None,
) -> None:
    """Registers dst = function(gate, up, type), which is exactly(gate) * up; compiled(dst, gate, up) is its call.

    Equals ggml_compute_forward_<name>.

    For SWIGLU of f32 the compiled kernel is equal on x86; the definition is so but for the last bits of e ** x.
    """
    built_by = {"ggml_glu": "ctib", "ggml_glu_split": "ctti", f"ggml_{name.lower()}_split": "ctt"}
    types = [(type, type) for type in ("f32", "f16", "bf16")]

    @op(name, types=types, refuse=_refuse, params=Glu, bound=bound, built_by=built_by)
    def glu(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
        """dst = function(gate, up, type), in the ne of gate and up: that of a and b, or half of a's rows."""
        mapped(lambda gate, up: function(gate, up, a.type), dst, *_gate_and_up(a, b, params))

    @glu.compiled
    def prepare(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
        return compiled(dst, *_gate_and_up(a, b, params))

    _check(glu, lambda gate, up, params: exactly(gate) * up, terms)


def _geglu(gate: Floats, up: Floats, type: str) -> Floats:
    closed = (gate <= -10) & (type == "f32")  # whatever up is
    return np.where(closed, np.float32(0), functions.gelu(gate, type) * up)


_register(
    "REGLU",
    lambda gate, up, type: np.where(gate > 0, gate * up, np.float32(0)),
    partial(bind_elementwise, elements.reglu),
    exact.relu,
    bound=0,
)
_register("GEGLU", _geglu, partial(bind_lookup, functions.gelu, elements.geglu), exact.gelu, terms=exact.half)
_register(
    "GEGLU_QUICK",
    lambda gate, up, type: functions.gelu_quick(gate, type) * up,
    partial(bind_lookup, functions.gelu_quick, elements.geglu_quick),
    exact.gelu_quick,
)
_register(
    "GEGLU_ERF",
    lambda gate, up, type: functions.gelu_erf(gate) * up,
    partial(bind_elementwise, elements.geglu_erf),
    exact.gelu_erf,
    terms=exact.half,
)
_register(
    "SWIGLU", lambda gate, up, type: functions.silu(gate) * up, partial(bind_elementwise, elements.swiglu), exact.silu
)


def _refuse_limited(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> str | None:
    return _refuse(dst, a, b, params) or (None if params.limit >= 0 else f"limit {params.limit}")


@op(
    "SWIGLU_OAI",
    types=[("f32", "f32")],
    refuse=_refuse_limited,
    params=Glu,
    bound=_BOUND,
    built_by={"ggml_swiglu_oai": "cttff"},
)
def swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """dst = gate / (1 + e ** (-alpha * gate)) * (up + 1), with gate at most limit, and up between -limit and limit.

    dst has the ne of gate and up: that of a and b, or half of a's rows. Equals ggml_compute_forward_swiglu_oai.
    """
    alpha, limit = np.float32(params.alpha), np.float32(params.limit)

    def function(gate: Floats, up: Floats) -> Floats:
        gate = np.where(limit < gate, limit, gate)
        y: Floats = gate / (_1 + functions.expf(alpha * -gate)) * (functions.clamped(up, -limit, limit) + _1)
        return y

    mapped(function, dst, *_gate_and_up(a, b, params))


@op(
    "SWIGLU_CLAMP",
    types=[("f32", "f32"), ("f16", "f16")],
    refuse=_refuse_limited,
    params=Glu,
    bound=_BOUND,
    built_by={"ggml_swiglu_clamp": "cttf"},
)
def swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """dst = silu(gate) * up, with gate at most limit, and up between -limit and limit.

    dst has the ne of gate and up: that of a and b, or half of a's rows. Equals ggml_compute_forward_swiglu_clamp.
    """
    limit = np.float32(params.limit)

    def function(gate: Floats, up: Floats) -> Floats:
        return functions.silu(np.where(limit < gate, limit, gate)) * functions.clamped(up, -limit, limit)

    mapped(function, dst, *_gate_and_up(a, b, params))


@swiglu_oai.compiled
def _swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
    return bind_elementwise(elements.swiglu_oai, dst, *_gate_and_up(a, b, params), a=params.alpha, b=params.limit)


@swiglu_clamp.compiled
def _swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
    return bind_elementwise(elements.swiglu_clamp, dst, *_gate_and_up(a, b, params), b=params.limit)


def _exact_swiglu_oai(gate: Exact, up: Exact, params: Glu) -> Exact:
    gate = np.minimum(gate, params.limit)
    return gate * exact.sigmoid(params.alpha * gate) * (np.clip(up, -params.limit, params.limit) + 1)


def _exact_swiglu_clamp(gate: Exact, up: Exact, params: Glu) -> Exact:
    return exact.silu(np.minimum(gate, params.limit)) * np.clip(up, -params.limit, params.limit)


_check(swiglu_oai, _exact_swiglu_oai, alpha=1.702, limit=3.0)
_check(swiglu_clamp, _exact_swiglu_clamp, limit=3.0)
