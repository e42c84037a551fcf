"""POOL_2D: the maximum or mean under a window that moves over an image."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.functions import Floats
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.ops.shapes import gaps
from ggml_backend_npu.registry import op

_MAX, _MEAN = range(2)
_LOWEST = np.finfo(np.float32).min


class _Params(NamedTuple):
    """op_params of POOL_2D: what is taken; the window's size, its steps, and how far it reaches over the edges"""

    kind: int
    k0: int
    k1: int
    s0: int
    s1: int
    p0: int
    p1: int


def _params(params: bytes) -> _Params:
    return _Params(*struct.unpack_from("7i", params))


def _refuse(dst: Tensor, x: Tensor, params: bytes) -> str | None:
    p = _params(params)
    if p.kind not in (_MAX, _MEAN):
        return f"kind {p.kind}"
    if dst.ne[2:] != x.ne[2:]:
        return f"x of ne {x.ne}, dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op("POOL_2D", types=[("f32", "f32"), ("f32", "f16")], refuse=_refuse, optional=True)
def pool_2d(dst: Tensor, x: Tensor, params: bytes) -> None:
    """dst = maximum, or sum over the window's size, of what the window at (i0 * s0 - p0, i1 * s1 - p1) covers of x.

    Equals ggml_compute_forward_pool_2d.
    """
    p = _params(params)
    image = convert(raw(x), x.type, "f32")
    y: Floats = np.full(dst.view().shape, _LOWEST if p.kind == _MAX else 0, np.float32)
    rows, columns = (np.arange(n) * step - edge for n, step, edge in ((dst.ne[1], p.s1, p.p1), (dst.ne[0], p.s0, p.p0)))
    with np.errstate(all="ignore"):
        for k1, k0 in np.ndindex(p.k1, p.k0):
            i1, i0 = rows + k1, columns + k0
            (j1,), (j0,) = (np.nonzero((i >= 0) & (i < n)) for i, n in ((i1, x.ne[1]), (i0, x.ne[0])))
            value, before = image[:, :, i1[j1, None], i0[j0]], y[:, :, j1[:, None], j0]
            taken = np.where(value < before, before, value) if p.kind == _MAX else before + value
            y[:, :, j1[:, None], j0] = taken
        dst.view()[...] = y if p.kind == _MAX else y / np.float32(p.k0 * p.k1)
