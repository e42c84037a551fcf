"""POOL_2D: the maximum or mean under a window that moves over an image."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.functions import Floats
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.ops.shapes import gaps
from ggml_backend_npu.params import Params, i32
from ggml_backend_npu.registry import op

_MAX, _MEAN = range(2)
_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Pool2d(Params):
    """op_params of POOL_2D: ggml_pool_2d.

    op      a ggml_op_pool: 0 the maximum, 1 the mean
    k0, k1  the window's size
    s0, s1  its steps
    p0, p1  how far it reaches over the edges
    """

    op: i32
    k0: i32
    k1: i32
    s0: i32
    s1: i32
    p0: i32
    p1: i32


def _refuse(dst: Tensor, x: Tensor, params: Pool2d) -> str | None:
    p = params
    if p.op not in (_MAX, _MEAN):
        return f"kind {p.op}"
    if dst.ne[2:] != x.ne[2:]:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op("POOL_2D", types=[("f32", "f32"), ("f32", "f16")], refuse=_refuse, optional=True, params=Pool2d)
def pool_2d(dst: Tensor, x: Tensor, params: Pool2d) -> None:
    """dst = maximum, or sum over the window's size, of what the window at (i0 * s0 - p0, i1 * s1 - p1) covers of x.

    Equals ggml_compute_forward_pool_2d.
    """
    p = params
    image = convert(raw(x), x.type, "f32")
    y: Floats = np.full(dst.view().shape, _LOWEST if p.op == _MAX else 0, np.float32)
    rows, columns = (np.arange(n) * step - edge for n, step, edge in ((dst.ne[1], p.s1, p.p1), (dst.ne[0], p.s0, p.p0)))
    with np.errstate(all="ignore"):
        for k1, k0 in np.ndindex(p.k1, p.k0):
            i1, i0 = rows + k1, columns + k0
            (j1,), (j0,) = (np.nonzero((i >= 0) & (i < n)) for i, n in ((i1, x.ne[1]), (i0, x.ne[0])))
            value, before = image[:, :, i1[j1, None], i0[j0]], y[:, :, j1[:, None], j0]
            taken = np.where(value < before, before, value) if p.op == _MAX else before + value
            y[:, :, j1[:, None], j0] = taken
        dst.view()[...] = y if p.op == _MAX else y / np.float32(p.k0 * p.k1)
