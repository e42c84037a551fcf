"""IM2COL: what each place of a convolution sees, as rows that a matrix product multiplies with the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows
from ggml_backend_npu.params import Params, i32
from ggml_backend_npu.registry import op
from quant import type_names


class _Sizes(NamedTuple):
    """Of images, kernels and results, as arrays have them: (images, channels, height, width), (height, width), ..."""

    images: tuple[int, int, int, int]
    kernel: tuple[int, int]
    places: tuple[int, int]


@dataclass(frozen=True)
class Im2col(Params):
    """op_params of IM2COL: strides, paddings and dilations of rows and columns, and whether there are two dimensions;
    ggml_im2col."""

    s0: i32
    s1: i32
    p0: i32
    p1: i32
    d0: i32
    d1: i32
    is_2d: i32


def _sizes(dst: Tensor, kernel: Tensor, x: Tensor, p: Im2col) -> _Sizes:
    width, height, channels, n_images = x.ne
    if p.is_2d:
        return _Sizes((n_images, channels, height, width), (kernel.ne[1], kernel.ne[0]), (dst.ne[2], dst.ne[1]))
    channels, n_images = x.ne[1:3]
    return _Sizes((n_images, channels, 1, width), (1, kernel.ne[0]), (1, dst.ne[1]))


def _refuse(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col) -> str | None:
    p = params
    (n_images, channels, _, _), size, (height, width) = _sizes(dst, kernel, x, p)
    rest = (height, n_images) if p.is_2d else (n_images, 1)
    if dst.ne != (channels * prod(size), width, *rest) or (not p.is_2d and x.ne[3] != 1):
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    return gaps_in_rows(x=x) or gaps(dst=dst)


_TYPES = [(dst, kernel, x) for dst, x in (("f32", "f32"), ("f16", "f32"), ("f16", "f16")) for kernel in type_names()]


@op("IM2COL", types=_TYPES, refuse=_refuse, optional=True, params=Im2col)
def im2col(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col) -> None:
    """dst[n, oh, ow, (c, kh, kw)] = x[n, c, oh * s1 + kh * d1 - p1, ow * s0 + kw * d0 - p0], 0 beyond x.

    x (width, height, channels, images) and kernel (width, height, ...), of which only the size counts; in one dimension
    x (width, channels, images). Equals ggml_compute_forward_im2col.
    """
    p = params
    images, size, places = _sizes(dst, kernel, x, p)
    n_images, channels, height, width = images
    seen = dst.view().reshape(n_images, *places, channels, *size)
    pixels = convert(x.view(), x.type, dst.type).reshape(images)
    seen[...] = 0
    for kh, kw in np.ndindex(*size):
        rows = np.arange(places[0]) * p.s1 + kh * p.d1 - p.p1
        columns = np.arange(places[1]) * p.s0 + kw * p.d0 - p.p0
        r, c = ((at >= 0) & (at < n) for at, n in ((rows, height), (columns, width)))
        found = pixels[:, :, rows[r]][..., columns[c]]
        seen[..., kh, kw][np.ix_(range(n_images), r, c, range(channels))] = found.transpose(0, 2, 3, 1)
