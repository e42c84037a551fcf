"""dst = f(x), element by element: the functions of UNARY, and SQR, SQRT, LOG, SIN, COS, LEAKY_RELU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels import elements, functions
from ggml_backend_npu.ops.kernels.elements import Elementwise
from ggml_backend_npu.ops.kernels.functions import Floats, Function, mapped
from ggml_backend_npu.ops.kernels.tiles import bind_elementwise, bind_lookup
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, Op, op
from ggml_backend_npu.registry.params import Params, f32, i32
from ggml_backend_npu.registry.shapes import gaps_in_matrices, gaps_in_rows, other_ne

_FLOATS = ("f32", "f16", "bf16")
_SAME = [(name, name) for name in _FLOATS]
_WIDENED = [*_SAME, ("f32", "f16"), ("f32", "bf16")]

_BOUND = 1e-12  # a few roundings, one after the other: right ones give up to 1e-14, half floats 5e-9 and more


class _Function(NamedTuple):
    """of        the function of float32
    compiled  the same, compiled
    exact     the same function of float64
    terms     the size of the numbers whose difference it takes last
    low, high  the range that it is measured on
    """

    of: Function
    compiled: Elementwise
    exact: exact.Function
    bound: float = 0.0
    terms: exact.Function | None = None
    low: float = -6
    high: float = 6


FUNCTIONS = {
    "ABS": _Function(np.abs, elements.absolute, np.abs),
    "SGN": _Function(functions.sign, elements.sgn, np.sign),
    "NEG": _Function(np.negative, elements.neg, np.negative),
    "STEP": _Function(functions.step, elements.step, lambda x: np.where(x > 0, 1.0, 0.0)),
    "TANH": _Function(functions.tanhf, elements.tanh, np.tanh, _BOUND),
    "ELU": _Function(
        functions.elu,
        elements.elu,
        lambda x: np.where(x > 0, x, np.expm1(x)),
        _BOUND,
        terms=lambda x: np.where(x > 0, np.abs(x), 1.0),
    ),
    "RELU": _Function(functions.relu, elements.relu, exact.relu),
    "SIGMOID": _Function(functions.sigmoid, elements.sigmoid, exact.sigmoid, _BOUND),
    "HARDSWISH": _Function(
        lambda x: x * functions.hardsigmoid(x), elements.hardswish, lambda x: x * np.clip((x + 3) / 6, 0, 1), _BOUND
    ),
    "HARDSIGMOID": _Function(functions.hardsigmoid, elements.hardsigmoid, lambda x: np.clip((x + 3) / 6, 0, 1), _BOUND),
    "EXP": _Function(functions.expf, elements.exp, np.exp, _BOUND),
    "EXPM1": _Function(
        lambda x: functions.expf(x) - np.float32(1), elements.expm1, np.expm1, _BOUND, terms=np.ones_like
    ),
    "SOFTPLUS": _Function(
        functions.softplus,
        elements.softplus,
        lambda x: np.where(x > 20, x, np.log1p(np.exp(x))),
        _BOUND,
        terms=np.ones_like,
    ),
    "FLOOR": _Function(np.floor, elements.floor, np.floor),
    "CEIL": _Function(np.ceil, elements.ceil, np.ceil),
    "ROUND": _Function(functions.round_half_away, elements.rounded, lambda x: np.trunc(x + np.copysign(0.5, x))),
    "TRUNC": _Function(np.trunc, elements.trunc, np.trunc),
    "SQR": _Function(np.square, elements.sqr, np.square),
    "SQRT": _Function(np.sqrt, elements.sqrt, np.sqrt),
    "LOG": _Function(functions.logf, elements.log, np.log, _BOUND, low=0.01, high=9),
    "SIN": _Function(functions.sinf, elements.sin, np.sin, _BOUND),
    "COS": _Function(functions.cosf, elements.cos, np.cos, _BOUND),
    "SILU": _Function(functions.silu, elements.silu, exact.silu, _BOUND),
    "GELU_ERF": _Function(functions.gelu_erf, elements.gelu_erf, exact.gelu_erf, _BOUND, terms=exact.half),
}
_OF_ONE_TYPE = ("SILU", "GELU_ERF")


def _refuse(dst: Tensor, x: Tensor) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_rows(x=x, dst=dst)


def _built_by(name: str) -> dict[str, str]:
    return {f"ggml_{name.lower()}": "ct", "ggml_unary": "cti", "ggml_unary_inplace": "cti"}


def _measure(
    unary: Op, function: exact.Function, low: float, high: float, terms: exact.Function | None, *others: Make
) -> None:
    """Sets the formula of an op, its nodes and its probes, of many widths and others."""

    def of_width(width: int) -> Make:
        return probes.of_elements(unary.name, low, high, width=width)

    unary.formula(exact.of_elements(function))
    if terms is not None:
        unary.terms(exact.of_elements(terms))
    if unary.bound:
        unary.nodes(of_width(64))
        unary.probes(lambda: [Probe("", (*probes.of_widths(of_width), *others))])


def _register(name: str, function: _Function) -> None:
    """Registers dst = function(x), in x's ne. Equals ggml_compute_forward_<name>.

    For SILU of f32 the compiled kernel is equal on x86; the definition is so but for the last bits of e ** x.
    """
    types = _SAME if name in _OF_ONE_TYPE else _WIDENED

    @op(name, types=types, refuse=_refuse, bound=function.bound, built_by=_built_by(name))
    def unary(dst: Tensor, x: Tensor) -> None:
        """dst = function(x), in x's ne."""
        mapped(function.of, dst, x)

    unary.compiled(partial(bind_elementwise, function.compiled))
    _measure(unary, function.exact, function.low, function.high, function.terms)


for _name, _function in FUNCTIONS.items():
    _register(_name, _function)


@op("GELU", types=_SAME, refuse=_refuse, bound=_BOUND, built_by=_built_by("GELU"))
def gelu(dst: Tensor, x: Tensor) -> None:
    """dst = x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x))), by `functions.gelu`; in x's ne.

    Equals ggml_compute_forward_gelu.
    """
    mapped(partial(functions.gelu, type=x.type), dst, x)


@op("GELU_QUICK", types=_SAME, refuse=_refuse, bound=_BOUND, built_by=_built_by("GELU_QUICK"))
def gelu_quick(dst: Tensor, x: Tensor) -> None:
    """dst = x / (1 + e ** (-1.702 * x)), by `functions.gelu_quick`; in x's ne. Equals
    ggml_compute_forward_gelu_quick."""
    mapped(partial(functions.gelu_quick, type=x.type), dst, x)


def _of_halves(op: str) -> Make:
    """Every half float between -10 and 10."""

    def make(rng: probes.Rng, types: Types) -> Node:
        with np.errstate(invalid="ignore"):  # on an ARM, NumPy warns of signalling NaNs
            every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        x = np.where(np.abs(every) < 10, every, 0).reshape(1, 1, 64, 1024)
        return probes.node(op, types[0], x.shape, probes.tensor(types[1], x))

    return make


gelu.compiled(partial(bind_lookup, functions.gelu, elements.gelu))
gelu_quick.compiled(partial(bind_lookup, functions.gelu_quick, elements.gelu_quick))
_measure(gelu, exact.gelu, -6, 6, exact.half, _of_halves("GELU"))
_measure(gelu_quick, exact.gelu_quick, -6, 6, None, _of_halves("GELU_QUICK"))


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


@op("XIELU", types=_WIDENED, refuse=_refuse_xielu, params=Xielu, bound=_BOUND, built_by={"ggml_xielu": "ctffff"})
def xielu(dst: Tensor, x: Tensor, params: Xielu) -> None:
    """dst = p * x * x + beta * x above 0, and (e ** min(x, eps) - 1 - x) * n + beta * x elsewhere; in x's ne.

    n and p are alpha_n and alpha_p. Equals ggml_compute_forward_xielu.
    """
    n, p, beta, eps = params.constants

    def function(x: Floats) -> Floats:
        below = functions.fused_multiply_add(functions.expm1f(np.fmin(x, eps)) - x, n, beta * x)
        return np.where(x > 0, functions.fused_multiply_add(p * x, x, beta * x), below)

    mapped(function, dst, x)


@xielu.compiled
def _xielu(dst: Tensor, x: Tensor, params: Xielu) -> Call | None:
    return bind_elementwise(elements.xielu, dst, x, table=params.constants)


@xielu.formula
def _exact_xielu(x: Tensor, params: Xielu) -> Exact:
    y = exact.values(x)
    below = (np.expm1(np.minimum(y, params.eps)) - y) * params.alpha_n
    return np.where(y > 0, params.alpha_p * y * y, below) + params.beta * y


@xielu.terms
def _terms_of_xielu(x: Tensor, params: Xielu) -> Exact:
    y = np.abs(exact.values(x))
    return np.maximum(abs(params.alpha_n) * y, abs(params.beta) * y)


xielu.nodes(probes.of_elements("XIELU", params=Xielu(0, 0.8, 0.9, 0.5, -1e-6)))


@dataclass(frozen=True)
class LeakyRelu(Params):
    """op_params of LEAKY_RELU: ggml_leaky_relu."""

    negative_slope: f32


def _refuse_leaky_relu(dst: Tensor, x: Tensor, params: LeakyRelu) -> str | None:
    return other_ne(x=x, dst=dst) or gaps_in_matrices(x=x, dst=dst)


@op(
    "LEAKY_RELU",
    types=[("f32", "f32"), ("f16", "f16")],
    refuse=_refuse_leaky_relu,
    params=LeakyRelu,
    built_by={"ggml_leaky_relu": "ctf b"},
)
def leaky_relu(dst: Tensor, x: Tensor, params: LeakyRelu) -> None:
    """dst = x above 0, and x times negative_slope elsewhere; NaN gives 0. Equals ggml_compute_forward_leaky_relu."""

    def function(x: Floats) -> Floats:
        below = np.where(x < 0, x, np.float32(0))
        return functions.fused_multiply_add(below, np.float32(params.negative_slope), functions.relu(x)) + _zero()

    mapped(function, dst, x)


@leaky_relu.compiled
def _leaky_relu(dst: Tensor, x: Tensor, params: LeakyRelu) -> Call | None:
    return bind_elementwise(elements.leaky_relu, dst, x, a=params.negative_slope, b=float(_zero()))


def _zero() -> np.float32:
    """What is added to a product of LEAKY_RELU that may be -0, which stays only if ggml fuses it with its sum."""
    return np.float32(-0.0 if codecs.bound().contracts else 0.0)


@leaky_relu.formula
def _exact_leaky_relu(x: Tensor, params: LeakyRelu) -> Exact:
    y = exact.values(x)
    return np.where(y > 0, y, y * params.negative_slope)
