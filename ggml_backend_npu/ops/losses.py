"""Losses: CROSS_ENTROPY_LOSS and CROSS_ENTROPY_LOSS_BACK, in the steps in which ggml's CPU rounds."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.gradients import FEW, ROWS, lie_apart, one_after_the_other
from ggml_backend_npu.ops.kernels import functions
from ggml_backend_npu.ops.kernels.exponentials import expf, exps, largest, scaled
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.shapes import gaps, gaps_in_matrices, other_ne
from quant.kernels.jit import array_at, compiled, copy
from quant.kernels.late import types
from quant.kernels.records import Place, record_at
from quant.kernels.threads import Job, Work

_COST = 4  # how much longer than to move an element it takes to compute e ** x of it


def _refuse_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> str | None:
    if dst.ne != (1, 1, 1, 1):
        return f"dst of ne {dst.ne}"
    return other_ne(src0=logits, src1=labels) or gaps_in_matrices(src0=logits, src1=labels)


@op("CROSS_ENTROPY_LOSS", types=[("f32", "f32", "f32")], refuse=_refuse_loss, bound=ROWS)
@np.errstate(all="ignore")
def cross_entropy_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> None:
    """dst = -the mean over rows of sum(labels * log(softmax(logits))); logits and labels of one ne, dst (1, 1, 1, 1).

    Equals ggml_compute_forward_cross_entropy_loss with one thread; several threads add up parts of the rows.
    """
    x = logits.view() - logits.view().max(axis=-1, keepdims=True, initial=-np.inf)
    total = functions.logf(one_after_the_other(functions.expf(x), np.float64).astype(np.float32))
    rows = one_after_the_other((x - total) * labels.view(), np.float64).astype(np.float32)
    mean = one_after_the_other(rows.reshape(-1), np.float32) * (np.float32(-1) / np.float32(rows.size))
    dst.view()[...] = mean


class RowLosses(NamedTuple):
    """Rows of n elements; the loss of each row goes to an address."""

    n: int
    logits: Place
    labels: Place
    losses: int


class MeanLoss(NamedTuple):
    """Addresses of the rows' losses, and of their mean."""

    n_rows: int
    losses: int
    dst: int


@compiled
def row_losses(p, begin, end, scratch):
    """A unit is a row: its sum of labels * log(softmax(logits))."""
    of = record_at(p, RowLosses)
    n = of.n
    for row in range(begin, end):
        logits = of.logits.address + row * of.logits.nb[1]
        x = array_at(logits, types.float32, n)
        y = array_at(of.labels.address + row * of.labels.nb[1], types.float32, n)
        maximum = largest(logits, n)
        total = types.float64(0)
        for i in range(n):
            total += types.float64(expf(x[i] - maximum))
        logarithm = types.float32(math.log(types.float32(total)))
        found = types.float64(0)
        for i in range(n):
            found += types.float64((x[i] - maximum - logarithm) * y[i])
        array_at(of.losses + 4 * row, types.float32, 1)[0] = types.float32(found)
    return 0


@compiled
def mean_loss(p, begin, end, scratch):
    """There is one unit: the mean of the losses of all rows."""
    of = record_at(p, MeanLoss)
    rows = array_at(of.losses, types.float32, of.n_rows)
    total = types.float32(0)
    for row in range(of.n_rows):
        total += rows[row]
    array_at(of.dst, types.float32, 1)[0] = total * (types.float32(-1) / types.float32(of.n_rows))
    return 0


@cross_entropy_loss.compiled
def _cross_entropy_loss(dst: Tensor, logits: Tensor, labels: Tensor) -> Call:
    n_rows = logits.ne[1] * logits.ne[2] * logits.ne[3]
    losses = np.empty(n_rows, np.float32)
    at, kept = losses.ctypes.data, (dst, logits, labels, losses)
    of = RowLosses(logits.ne[0], logits.place, labels.place, at)
    return Job(
        Work(row_losses, of, n_rows, _COST * 8 * logits.n_elements, keep=kept),
        Work(mean_loss, MeanLoss(n_rows, at, dst.address), 1, keep=kept),
    )


def _refuse_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> str | None:
    if gradient.ne != (1, 1, 1, 1):
        return f"src0 of ne {gradient.ne}"
    return other_ne(src1=logits, src2=labels, dst=dst) or gaps(src1=logits, src2=labels, dst=dst)


@op("CROSS_ENTROPY_LOSS_BACK", types=[("f32",) * 4], refuse=_refuse_loss_back, bound=FEW)
@np.errstate(all="ignore")
def cross_entropy_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> None:
    """dst = (softmax(logits) - labels) * gradient / the number of rows.

    gradient (1, 1, 1, 1), the others of one ne. Equals ggml_compute_forward_cross_entropy_loss_back but for the last
    bits of e ** x.
    """
    x = logits.view()
    e = functions.expf(x - x.max(axis=-1, keepdims=True, initial=-np.inf))
    factor = (1 / one_after_the_other(e, np.float64)).astype(np.float32)
    n_rows = np.float32(x.size // x.shape[-1])
    dst.view()[...] = (e * factor - labels.view()) * (gradient.view().reshape(-1)[0] / n_rows)


class LossGradients(NamedTuple):
    """Rows of n elements, at addresses, without gaps; gradient is the address of a single number."""

    n: int
    n_rows: int
    gradient: int
    logits: int
    labels: int
    dst: int


@compiled
def loss_gradients(p, begin, end, scratch):
    """A unit is a row."""
    of = record_at(p, LossGradients)
    n = of.n
    scale = array_at(of.gradient, types.float32, 1)[0] / types.float32(of.n_rows)
    for row in range(begin, end):
        to = of.dst + 4 * n * row
        x, y = array_at(to, types.float32, n), array_at(of.labels + 4 * n * row, types.float32, n)
        copy(of.logits + 4 * n * row, to, 4 * n)
        scaled(to, n, types.float32(types.float64(1) / exps(to, n, largest(to, n))))
        for i in range(n):
            x[i] -= y[i]
        scaled(to, n, scale)
    return 0


@cross_entropy_loss_back.compiled
def _cross_entropy_loss_back(dst: Tensor, gradient: Tensor, logits: Tensor, labels: Tensor) -> Call | None:
    if labels.overlaps(dst) or gradient.overlaps(dst) or not lie_apart(dst, logits) or not dst.n_elements:
        return None
    n_rows = dst.n_elements // dst.ne[0]
    of = LossGradients(dst.ne[0], n_rows, gradient.address, logits.address, labels.address, dst.address)
    kept = dst, gradient, logits, labels
    return Job(Work(loss_gradients, of, n_rows, _COST * 8 * dst.n_elements, keep=kept))


def _log_soft_max(x: Exact) -> Exact:
    below = x - x.max(axis=-1, keepdims=True)
    y: Exact = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return y


@cross_entropy_loss.formula
def _exact_loss(logits: Tensor, labels: Tensor) -> Exact:
    rows = (exact.values(labels) * _log_soft_max(exact.values(logits))).sum(axis=-1)
    mean: Exact = -rows.mean(keepdims=True)[..., None]
    return mean


@cross_entropy_loss_back.formula
def _exact_loss_back(gradient: Tensor, logits: Tensor, labels: Tensor) -> Exact:
    x, factor = exact.values(logits), exact.values(gradient)
    back: Exact = (np.exp(_log_soft_max(x)) - exact.values(labels)) * factor * x.shape[-1] / x.size
    return back


def _make_loss(width: int, *, rows: int = 30, back: bool = False) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        shape = 1, 1, rows, width
        logits, labels = probes.normal(rng, "f32", *shape, size=3), rng.exponential(1, shape) ** 4
        sources = logits, probes.tensor("f32", labels / labels.sum(axis=-1, keepdims=True))
        if back:
            gradient = probes.tensor("f32", np.full(1, 3.3))
            return probes.node("CROSS_ENTROPY_LOSS_BACK", "f32", shape, gradient, *sources)
        return probes.node("CROSS_ENTROPY_LOSS", "f32", (1, 1, 1, 1), *sources)

    return make


cross_entropy_loss.nodes(_make_loss(70, rows=3))  # of many rows the rounding of sources cancels
cross_entropy_loss_back.nodes(_make_loss(70, back=True))
cross_entropy_loss.probes(lambda: [Probe("", probes.of_widths(_make_loss))])
cross_entropy_loss_back.probes(lambda: [Probe("", probes.of_widths(partial(_make_loss, back=True)))])
