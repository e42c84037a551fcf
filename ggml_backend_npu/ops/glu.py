"""GLU: dst = f(gate) * up, the gate and what it opens being two tensors or the two halves of one's rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import functions
from ggml_backend_npu.ops.functions import Floats, mapped
from ggml_backend_npu.ops.shapes import gaps_in_matrices, other_ne
from ggml_backend_npu.ops.tiles import computed
from ggml_backend_npu.params import Params, f32, i32
from ggml_backend_npu.registry import Call, op

_1 = np.float32(1)


@dataclass(frozen=True)
class Glu(Params):
    """op_params of the functions of GLU: ggml_glu_impl; alpha and limit of ggml_swiglu_oai and ggml_swiglu_clamp.

    op       a ggml_glu_op
    swapped  of one tensor's rows the second half is the gate
    """

    op: i32
    swapped: i32
    alpha: f32
    limit: f32


def _gate_and_up(a: Tensor, b: Tensor | None, params: Glu) -> tuple[Tensor, Tensor]:
    """a and b, or the halves of a's rows."""
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


def _register(name: str, function: Callable[[Floats, Floats, str], Floats]) -> None:
    """dst = function(gate, up, type). Equals ggml_compute_forward_<name>.

    Of SWIGLU of f32 that is the compiled kernel, on x86; this is so but for the last bits of e ** x.
    """

    @op(name, types=[(type, type) for type in ("f32", "f16", "bf16")], refuse=_refuse, optional=True, params=Glu)
    def glu(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
        mapped(lambda gate, up: function(gate, up, a.type), dst, *_gate_and_up(a, b, params))

    @glu.compiled
    def prepare(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
        return computed(name, dst, *_gate_and_up(a, b, params))


def _geglu(gate: Floats, up: Floats, type: str) -> Floats:
    closed = (gate <= -10) & (type == "f32")  # whatever up is
    return np.where(closed, np.float32(0), functions.gelu(gate, type) * up)


_register("REGLU", lambda gate, up, type: np.where(gate > 0, gate * up, np.float32(0)))
_register("GEGLU", _geglu)
_register("GEGLU_QUICK", lambda gate, up, type: functions.gelu_quick(gate, type) * up)
_register("GEGLU_ERF", lambda gate, up, type: functions.gelu_erf(gate) * up)
_register("SWIGLU", lambda gate, up, type: functions.silu(gate) * up)


def _refuse_limited(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> str | None:
    return _refuse(dst, a, b, params) or (None if params.limit >= 0 else f"limit {params.limit}")


@op("SWIGLU_OAI", types=[("f32", "f32")], refuse=_refuse_limited, optional=True, params=Glu)
def swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """dst = gate / (1 + e ** (-alpha * gate)) * (up + 1), of a gate up to limit and of up between -limit and limit.

    Equals ggml_compute_forward_swiglu_oai.
    """
    alpha, limit = np.float32(params.alpha), np.float32(params.limit)

    def function(gate: Floats, up: Floats) -> Floats:
        gate = np.where(limit < gate, limit, gate)
        y: Floats = gate / (_1 + functions.expf(alpha * -gate)) * (functions.clamped(up, -limit, limit) + _1)
        return y

    mapped(function, dst, *_gate_and_up(a, b, params))


@op("SWIGLU_CLAMP", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_limited, optional=True, params=Glu)
def swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> None:
    """dst = silu(gate) * up, of a gate up to limit and of up between -limit and limit.

    Equals ggml_compute_forward_swiglu_clamp.
    """
    limit = np.float32(params.limit)

    def function(gate: Floats, up: Floats) -> Floats:
        return functions.silu(np.where(limit < gate, limit, gate)) * functions.clamped(up, -limit, limit)

    mapped(function, dst, *_gate_and_up(a, b, params))


@swiglu_oai.compiled
def _swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
    return computed("SWIGLU_OAI", dst, *_gate_and_up(a, b, params), a=params.alpha, b=params.limit)


@swiglu_clamp.compiled
def _swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: Glu) -> Call | None:
    return computed("SWIGLU_CLAMP", dst, *_gate_and_up(a, b, params), b=params.limit)
