"""Steps of optimisers: OPT_STEP_ADAMW and OPT_STEP_SGD, rounded as in ggml's CPU. Weights and momenta change in
place."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import PARAMS_BYTES, Node, Tensor
from ggml_backend_npu.ops.gradients import FEW
from ggml_backend_npu.ops.kernels.functions import Floats
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add as fma
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows, other_ne
from quant.kernels.jit import array_at, compiled, fused_multiply_add
from quant.kernels.late import types
from quant.kernels.records import Dims, Place, index_of, record_at, row_of
from quant.kernels.threads import Job, Work

_1 = np.float32(1)


def _refuse_step(n_numbers: int, dst: Tensor, numbers: Tensor, **others: Tensor) -> str | None:
    if numbers.n_elements != n_numbers:
        return f"{numbers.n_elements} parameters"
    for role, tensor in others.items():
        if tensor.nb != dst.nb:
            return f"{role} of nb {tensor.nb}, dst of nb {dst.nb}"
    if dst.address != others["src0"].address:
        return "dst is not src0"
    return other_ne(**others, dst=dst) or gaps_in_rows(dst=dst) or gaps(parameters=numbers)


def _refuse_adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> str | None:
    return _refuse_step(7, dst, numbers, src0=w, src1=g, src2=m, src3=v)


def _refuse_sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> str | None:
    return _refuse_step(2, dst, numbers, src0=w, src1=g)


def _updated(x: Tensor) -> Floats:
    """A writable view of a source, which its node updates."""
    return replace(x, memory=replace(x.memory, writable=True)).view()


@op(
    "OPT_STEP_ADAMW",
    types=[("f32",) * 6],
    refuse=_refuse_adamw,
    bound=FEW,
    built_by={"ggml_opt_step_adamw": "cttttt", "ggml_set_param": "t"},
)
@np.errstate(all="ignore")
def adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> None:
    """Updates weights w and their momenta m and v, all in place, by one step of AdamW with the gradient g; all of one
    ne.

    numbers  (7): alpha, beta1, beta2, eps, weight decay, and the bias corrections beta1h and beta2h of the momenta

    Equals ggml_compute_forward_opt_step_adamw_f32.
    """
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = np.ravel(numbers.view())
    x, first, second = g.view(), _updated(m), _updated(v)
    first[...] = fma(first, beta1, x * (_1 - beta1))
    second[...] = fma(second, beta2, x * x * (_1 - beta2))
    keep = fma(np.atleast_1d(-alpha), decay, _1)
    dst.view()[...] = fma(dst.view(), keep, -(alpha * (first * beta1h) / (np.sqrt(second * beta2h) + eps)))


@op("OPT_STEP_SGD", types=[("f32",) * 4], refuse=_refuse_sgd, bound=FEW)
@np.errstate(all="ignore")
def sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> None:
    """Updates weights w, in place, by one step down the gradient g, of the same ne. numbers (2): alpha and weight
    decay.

    Equals ggml_compute_forward_opt_step_sgd_f32.
    """
    alpha, decay = np.ravel(numbers.view())
    keep = fma(np.atleast_1d(-alpha), decay, _1)
    dst.view()[...] = fma(dst.view(), keep, -(alpha * g.view()))


class Step(NamedTuple):
    """ne  of weights and gradients; numbers: address of the optimiser's parameters"""

    ne: Dims
    weights: Place
    gradients: Place
    numbers: int


class AdamwStep(NamedTuple):
    """A step, and the first and second momenta."""

    step: Step
    first: Place
    second: Place


@compiled
def adamw_steps(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, AdamwStep)
    step = of.step
    n, k = step.ne[0], array_at(step.numbers, types.float32, 7)
    alpha, beta1, beta2, eps, beta1h, beta2h = k[0], k[1], k[2], k[3], k[5], k[6]
    one = types.float32(1)
    kept, rest1, rest2 = fused_multiply_add(-alpha, k[4], one), one - beta1, one - beta2
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, step.ne[1], step.ne[2])
        w = array_at(row_of(step.weights, i1, i2, i3), types.float32, n)
        g = array_at(row_of(step.gradients, i1, i2, i3), types.float32, n)
        m = array_at(row_of(of.first, i1, i2, i3), types.float32, n)
        v = array_at(row_of(of.second, i1, i2, i3), types.float32, n)
        for i in range(n):
            m[i] = fused_multiply_add(m[i], beta1, g[i] * rest1)
            v[i] = fused_multiply_add(v[i], beta2, g[i] * g[i] * rest2)
            change = alpha * (m[i] * beta1h) / (np.sqrt(v[i] * beta2h) + eps)
            w[i] = fused_multiply_add(w[i], kept, -change)
    return 0


@compiled
def sgd_steps(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, Step)
    n, k = of.ne[0], array_at(of.numbers, types.float32, 2)
    alpha, kept = k[0], fused_multiply_add(-k[0], k[1], types.float32(1))
    for row in range(begin, end):
        i1, i2, i3 = index_of(row, of.ne[1], of.ne[2])
        w = array_at(row_of(of.weights, i1, i2, i3), types.float32, n)
        g = array_at(row_of(of.gradients, i1, i2, i3), types.float32, n)
        for i in range(n):
            w[i] = fused_multiply_add(w[i], kept, -(alpha * g[i]))
    return 0


@adamw.compiled
def _adamw(dst: Tensor, w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Call:
    step = Step(w.ne, w.place, g.place, numbers.address)
    of, n_rows = AdamwStep(step, m.place, v.place), w.ne[1] * w.ne[2] * w.ne[3]
    return Job(Work(adamw_steps, of, n_rows, 28 * w.n_elements, keep=(dst, w, g, m, v, numbers)))


@sgd.compiled
def _sgd(dst: Tensor, w: Tensor, g: Tensor, numbers: Tensor) -> Call:
    of, n_rows = Step(w.ne, w.place, g.place, numbers.address), w.ne[1] * w.ne[2] * w.ne[3]
    return Job(Work(sgd_steps, of, n_rows, 12 * w.n_elements, keep=(dst, w, g, numbers)))


@adamw.formula
def _exact_adamw(w: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> Exact:
    weights, gradients, first, second, numbers_ = (exact.values(x) for x in (w, g, m, v, numbers))
    alpha, beta1, beta2, eps, decay, beta1h, beta2h = numbers_.reshape(-1)
    first = first * beta1 + gradients * (1 - beta1)
    second = second * beta2 + gradients * gradients * (1 - beta2)
    updated: Exact = weights * (1 - alpha * decay) - alpha * first * beta1h / (np.sqrt(second * beta2h) + eps)
    return updated


@sgd.formula
def _exact_sgd(w: Tensor, g: Tensor, numbers: Tensor) -> Exact:
    alpha, decay = exact.values(numbers).reshape(-1)
    updated: Exact = exact.values(w) * (1 - alpha * decay) - alpha * exact.values(g)
    return updated


def _make_adamw(width: int) -> Make:
    """dst is the weights, as in ggml."""

    def make(rng: probes.Rng, types: Types) -> Node:
        shape = 1, 3, 5, width
        w, g, m = (probes.normal(rng, "f32", *shape) for _ in range(3))
        v = probes.tensor("f32", rng.exponential(1, shape))
        numbers = probes.tensor("f32", np.array([0.03, 0.9, 0.97, 1e-2, 0.2, 1.3, 1.1]))
        return Node("OPT_STEP_ADAMW", w, (w, g, m, v, numbers), bytes(PARAMS_BYTES))

    return make


def _make_sgd(width: int) -> Make:
    """dst is the weights, as in ggml."""

    def make(rng: probes.Rng, types: Types) -> Node:
        w, g = (probes.normal(rng, "f32", 1, 3, 5, width) for _ in range(2))
        return Node("OPT_STEP_SGD", w, (w, g, probes.tensor("f32", np.array([0.03, 0.2]))), bytes(PARAMS_BYTES))

    return make


adamw.nodes(_make_adamw(70))
sgd.nodes(_make_sgd(70))
adamw.probes(lambda: [Probe("", probes.of_widths(_make_adamw))])
sgd.probes(lambda: [Probe("", probes.of_widths(_make_sgd))])
