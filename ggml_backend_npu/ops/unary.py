"""dst = f(x), element by element: the functions of UNARY, and SQR, SQRT, LOG, SIN, COS."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import functions
from ggml_backend_npu.ops.functions import Floats, Function, mapped
from ggml_backend_npu.ops.shapes import gaps_in_matrices, gaps_in_rows, other_ne
from ggml_backend_npu.ops.tiles import Compiled, computed
from ggml_backend_npu.params import Params, f32, i32
from ggml_backend_npu.registry import Call, op

_FLOATS = ("f32", "f16", "bf16")
_SAME = [(name, name) for name in _FLOATS]
_WIDENED = [*_SAME, ("f32", "f16"), ("f32", "bf16")]

FUNCTIONS: dict[str, Function] = {
    "ABS": np.abs,
    "SGN": functions.sign,
    "NEG": np.negative,
    "STEP": functions.step,
    "TANH": functions.tanhf,
    "ELU": functions.elu,
    "RELU": functions.relu,
    "SIGMOID": functions.sigmoid,
    "HARDSWISH": lambda x: x * functions.hardsigmoid(x),
    "HARDSIGMOID": functions.hardsigmoid,
    "EXP": functions.expf,
    "EXPM1": lambda x: functions.expf(x) - np.float32(1),
    "SOFTPLUS": functions.softplus,
    "FLOOR": np.floor,
    "CEIL": np.ceil,
    "ROUND": functions.round_half_away,
    "TRUNC": np.trunc,
    "SQR": np.square,
    "SQRT": np.sqrt,
    "LOG": functions.logf,
    "SIN": functions.sinf,
    "COS": functions.cosf,
    "SILU": functions.silu,
    "GELU_ERF": functions.gelu_erf,
}
_OF_ONE_TYPE = ("SILU", "GELU_ERF")


def _refuse(dst: Tensor, x: Tensor) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


def _register(name: str, function: Function) -> None:
    """dst = function(x). Equals ggml_compute_forward_<name>.

    Of SILU of f32 that is the compiled kernel, on x86; this is so but for the last bits of e ** x.
    """

    @op(name, types=_SAME if name in _OF_ONE_TYPE else _WIDENED, refuse=_refuse, optional=True)
    def unary(dst: Tensor, x: Tensor) -> None:
        mapped(function, dst, x)

    if name in Compiled.__members__:
        unary.compiled(partial(computed, name))


for _name, _function in FUNCTIONS.items():
    _register(_name, _function)


@op("GELU", types=_SAME, refuse=_refuse, optional=True)
def gelu(dst: Tensor, x: Tensor) -> None:
    """dst = `functions.gelu` of x. Equals ggml_compute_forward_gelu."""
    mapped(partial(functions.gelu, type=x.type), dst, x)


@op("GELU_QUICK", types=_SAME, refuse=_refuse, optional=True)
def gelu_quick(dst: Tensor, x: Tensor) -> None:
    """dst = `functions.gelu_quick` of x. Equals ggml_compute_forward_gelu_quick."""
    mapped(partial(functions.gelu_quick, type=x.type), dst, x)


gelu.compiled(partial(computed, "GELU"))
gelu_quick.compiled(partial(computed, "GELU_QUICK"))


@dataclass(frozen=True)
class Xielu(Params):
    """op_params of XIELU: ggml_xielu. op: a ggml_unary_op."""

    op: i32
    alpha_n: f32
    alpha_p: f32
    beta: f32
    eps: f32

    @property
    def constants(self) -> Floats:
        """alpha_n, alpha_p, beta and eps."""
        return np.array([self.alpha_n, self.alpha_p, self.beta, self.eps], np.float32)


def _refuse_xielu(dst: Tensor, x: Tensor, params: Xielu) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_matrices(x=x, dst=dst)


@op("XIELU", types=_WIDENED, refuse=_refuse_xielu, optional=True, params=Xielu)
def xielu(dst: Tensor, x: Tensor, params: Xielu) -> None:
    """dst = p * x * x + beta * x above 0, and (e ** min(x, eps) - 1 - x) * n + beta * x elsewhere.

    n and p are alpha_n and alpha_p. Equals ggml_compute_forward_xielu.
    """
    n, p, beta, eps = params.constants

    def function(x: Floats) -> Floats:
        below = functions.fused_multiply_add(functions.expm1f(np.fmin(x, eps)) - x, n, beta * x)
        return np.where(x > 0, functions.fused_multiply_add(p * x, x, beta * x), below)

    mapped(function, dst, x)


@xielu.compiled
def _xielu(dst: Tensor, x: Tensor, params: Xielu) -> Call | None:
    return computed("XIELU", dst, x, table=params.constants)
