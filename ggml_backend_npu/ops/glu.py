"""GLU: dst = f(gate) * up, the gate and what it opens being two tensors or the two halves of one's rows."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import functions
from ggml_backend_npu.ops.functions import Floats, mapped
from ggml_backend_npu.ops.shapes import gaps_in_matrices, other_ne
from ggml_backend_npu.ops.tiles import computed
from ggml_backend_npu.registry import Call, op

_1 = np.float32(1)


def _gate_and_up(a: Tensor, b: Tensor | None, params: bytes) -> tuple[Tensor, Tensor]:
    """a and b, or the halves of a's rows; the second one is the gate where params say swapped."""
    if b is not None:
        return a, b
    width = a.ne[0] // 2
    first = replace(a, ne=(width, *a.ne[1:]))
    second = replace(first, offset=a.offset + width * a.nb[0])
    (swapped,) = struct.unpack_from("i", params, 4)
    return (second, first) if swapped else (first, second)


def _refuse(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> str | None:
    sources = {"src0": a} if b is None else {"src0": a, "src1": b}
    if b is not None and b.type != a.type:
        return f"src0 of type {a.type}, src1 of type {b.type}"
    gate, up = _gate_and_up(a, b, params)
    return other_ne(gate=gate, up=up, dst=dst) or gaps_in_matrices(**sources, dst=dst)


def _register(name: str, function: Callable[[Floats, Floats, str], Floats]) -> None:
    """dst = function(gate, up, type). Equals ggml_compute_forward_<name>.

    Of SWIGLU of f32 that is the compiled kernel, on x86; this is so but for the last bits of e ** x.
    """

    @op(name, types=[(type, type) for type in ("f32", "f16", "bf16")], refuse=_refuse, optional=True)
    def glu(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
        mapped(lambda gate, up: function(gate, up, a.type), dst, *_gate_and_up(a, b, params))

    @glu.compiled
    def prepare(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> Call | None:
        return computed(name, dst, *_gate_and_up(a, b, params))


def _geglu(gate: Floats, up: Floats, type: str) -> Floats:
    closed = (gate <= -10) & (type == "f32")  # whatever up is
    return np.where(closed, np.float32(0), functions.gelu(gate, type) * up)


_register("REGLU", lambda gate, up, type: np.where(gate > 0, gate * up, np.float32(0)))
_register("GEGLU", _geglu)
_register("GEGLU_QUICK", lambda gate, up, type: functions.gelu_quick(gate, type) * up)
_register("GEGLU_ERF", lambda gate, up, type: functions.gelu_erf(gate) * up)
_register("SWIGLU", lambda gate, up, type: functions.silu(gate) * up)


def _limits(params: bytes) -> tuple[float, float]:
    """alpha and limit, which params hold behind the function and whether it is swapped."""
    alpha, limit = struct.unpack_from("2f", params, 8)
    return alpha, limit


def _refuse_limited(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> str | None:
    _, limit = _limits(params)
    return _refuse(dst, a, b, params) or (None if limit >= 0 else f"limit {limit}")


@op("SWIGLU_OAI", types=[("f32", "f32")], refuse=_refuse_limited, optional=True)
def swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    """dst = gate / (1 + e ** (-alpha * gate)) * (up + 1), of a gate up to limit and of up between -limit and limit.

    alpha and limit stand in params. Equals ggml_compute_forward_swiglu_oai.
    """
    alpha, limit = (np.float32(value) for value in _limits(params))

    def function(gate: Floats, up: Floats) -> Floats:
        gate = np.where(limit < gate, limit, gate)
        y: Floats = gate / (_1 + functions.expf(alpha * -gate)) * (functions.clamped(up, -limit, limit) + _1)
        return y

    mapped(function, dst, *_gate_and_up(a, b, params))


@op("SWIGLU_CLAMP", types=[("f32", "f32"), ("f16", "f16")], refuse=_refuse_limited, optional=True)
def swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    """dst = silu(gate) * up, of a gate up to limit and of up between -limit and limit; limit stands in params.

    Equals ggml_compute_forward_swiglu_clamp.
    """
    limit = np.float32(_limits(params)[1])

    def function(gate: Floats, up: Floats) -> Floats:
        return functions.silu(np.where(limit < gate, limit, gate)) * functions.clamped(up, -limit, limit)

    mapped(function, dst, *_gate_and_up(a, b, params))


@swiglu_oai.compiled
def _swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> Call | None:
    alpha, limit = _limits(params)
    return computed("SWIGLU_OAI", dst, *_gate_and_up(a, b, params), a=alpha, b=limit)


@swiglu_clamp.compiled
def _swiglu_clamp(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> Call | None:
    _, limit = _limits(params)
    return computed("SWIGLU_CLAMP", dst, *_gate_and_up(a, b, params), b=limit)
