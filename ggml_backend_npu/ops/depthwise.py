"""CONV_2D_DW: a convolution in which each channel has its own kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.convolution import TYPES
from ggml_backend_npu.ops.kernels.functions import wide
from ggml_backend_npu.ops.kernels.windows import Moves2d, Two
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.shapes import gaps
from quant.kernels.jit import array_at, compiled, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work
from quant.runs import F16, F32, widen_run

_BOUND = 1e-12  # a few roundings, one after the other


def _in_channels(x: Tensor) -> bool:
    """Whether the channels of a pixel lie together, with no gaps between pixels."""
    width, height, channels, _ = x.ne
    unit = x.codec.block_bytes
    nb = unit * channels, unit * channels * width, unit, unit * channels * width * height
    return all(n == 1 or actual == stride for n, actual, stride in zip(x.ne, x.nb, nb, strict=True))


def _refuse_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d) -> str | None:
    if kernel.ne[2:] != (1, x.ne[2]) or dst.ne[2:] != x.ne[2:]:
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    if x.is_contiguous():
        return gaps(kernel=kernel, dst=dst)
    kernel_nb = tuple(kernel.codec.block_bytes * n for n in (x.ne[2], x.ne[2] * kernel.ne[0], 1))
    places = (kernel.ne[0], kernel.nb[0]), (kernel.ne[1], kernel.nb[1]), (kernel.ne[3], kernel.nb[3])
    fits = all(n == 1 or actual == nb for (n, actual), nb in zip(places, kernel_nb, strict=True))
    if not (_in_channels(x) and x.nb[0] > x.nb[2] and x.nb[1] > x.nb[0]):
        return f"x is neither planes nor channels without gaps: nb {x.nb}"
    if not fits or kernel.nb[0] < kernel.nb[2] or kernel.nb[1] < kernel.nb[0] or not _in_channels(dst):
        return f"kernel of nb {kernel.nb}, dst of nb {dst.nb}: x has its channels together"
    return None


@op(
    "CONV_2D_DW",
    types=TYPES,
    refuse=_refuse_dw,
    params=Moves2d,
    bound=_BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_2d_dw_direct": "ctt iiiiii"},
)
def conv_2d_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d) -> None:
    """dst[n, c, oh, ow] = sum over kh, kw of kernel[c, 0, kh, kw] * x[n, c, oh * s1 + kh * d1 - p1, ...], 0 outside x:
    each channel has its own kernel.

    x and dst (width, height, channels, images), in planes or with the channels of a pixel together, kernel (width,
    height, 1, channels) likewise. Equals ggml_compute_forward_conv_2d_dw but for rounding.
    """
    p = params
    image, factors = x.view(), wide(kernel)[:, 0]
    y = np.zeros(dst.view().shape, image.dtype)
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(kernel.ne[1], kernel.ne[0]):
            rows, columns = np.arange(dst.ne[1]) * p.s1 + i * p.d1 - p.p1, np.arange(dst.ne[0]) * p.s0 + j * p.d0 - p.p0
            (r,), (c,) = (np.nonzero((at >= 0) & (at < n)) for at, n in ((rows, x.ne[1]), (columns, x.ne[0])))
            y[:, :, r[:, None], c] += factors[:, i, j, None, None] * image[:, :, rows[r, None], columns[c]]
    dst.view()[...] = y


class Depthwise(NamedTuple):
    """Images of a size at x, kernels and dst, at addresses.

    kernel_size, places  sizes of kernels and of dst; step, pad, apart: strides, paddings, dilations
    is_half   the kernels are float16
    together  the channels of a pixel lie together
    """

    x: int
    size: Two
    n_channels: int
    kernel: int
    kernel_size: Two
    is_half: int
    dst: int
    places: Two
    step: Two
    pad: Two
    apart: Two
    together: int


@inlined
def _add_pixels(factors, source, step, to, count, n_c):
    """Adds the products of pixels, whose channels lie together, with one factor per channel."""
    for place in range(count):
        pixel = array_at(source + 4 * place * step * n_c, types.float32, n_c)
        y = array_at(to + 4 * place * n_c, types.float32, n_c)
        for c in range(n_c):
            y[c] = fused_multiply_add(factors[c], pixel[c], y[c])


@inlined
def _add_line(factor, source, n_x, step, to, count):
    """Adds the products of the pixels of a plane's row with one factor."""
    pixels, y = array_at(source, types.float32, n_x), array_at(to, types.float32, count)
    if step == 1:
        for place in range(count):
            y[place] = fused_multiply_add(factor, pixels[place], y[place])
    else:
        for place in range(count):
            y[place] = fused_multiply_add(factor, pixels[place * step], y[place])


@compiled
def depthwise(p, begin, end, all_factors):
    """A unit is one row of dst: of a plane, or of an image if the channels of a pixel lie together. Products are
    added one after the other, each fused with its addition."""
    of = record_at(p, Depthwise)
    (n_y, n_x), n_c, (ky, kx), (oy, ox) = of.size, of.n_channels, of.kernel_size, of.places
    (s1, s0), (p1, p0), (d1, d0) = of.step, of.pad, of.apart
    code, step = types.int64(F16 if of.is_half else F32), types.int64(2 if of.is_half else 4)
    widen_run(code, of.kernel, step, all_factors, ky * kx * n_c)
    lanes = n_c if of.together else types.int64(1)
    for unit in range(begin, end):
        i, row = unit // oy, unit % oy
        image = of.x + 4 * i * n_y * n_x * lanes
        kernel = all_factors if of.together else all_factors + 4 * (i % n_c) * ky * kx
        to = of.dst + 4 * unit * ox * lanes
        array_at(to, types.float32, ox * lanes)[:] = types.float32(0)
        for j in range(ky):
            from_y = row * s1 + j * d1 - p1
            if not 0 <= from_y < n_y:
                continue
            line = image + 4 * from_y * n_x * lanes
            for m in range(kx):
                shift = m * d0 - p0
                first = min(ox, max(0, -(shift // s0)))
                count = max(0, min(ox, (n_x - 1 - shift) // s0 + 1) - first)
                factors = array_at(kernel + 4 * (j * kx + m) * lanes, types.float32, lanes)
                source, y = line + 4 * (first * s0 + shift) * lanes, to + 4 * first * lanes
                if of.together:
                    _add_pixels(factors, source, s0, y, count, n_c)
                else:
                    _add_line(factors[0], source, n_x, s0, y, count)
    return 0


@conv_2d_dw.compiled
def _conv_2d_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d) -> Call | None:
    if params.s0 < 1:
        return None
    q, together = params, not x.is_contiguous()
    of = Depthwise(
        x=x.address,
        size=(x.ne[1], x.ne[0]),
        n_channels=x.ne[2],
        kernel=kernel.address,
        kernel_size=(kernel.ne[1], kernel.ne[0]),
        is_half=kernel.type == "f16",
        dst=dst.address,
        places=(dst.ne[1], dst.ne[0]),
        step=(q.s1, q.s0),
        pad=(q.p1, q.p0),
        apart=(q.d1, q.d0),
        together=together,
    )
    n_units, size = dst.ne[1] * dst.ne[3] * (1 if together else dst.ne[2]), prod(kernel.ne[:2])
    return Job(Work(depthwise, of, n_units, dst.nbytes * size, scratch=4 * size * x.ne[2], keep=(dst, kernel, x)))


# what it is measured by


def _make_conv_2d_dw(size: int, channels: int, *, together: bool) -> Make:
    """together: the channels of a pixel lie together."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 2, channels, 9, 20), probes.normal(rng, types[1], channels, 1, size, size)
        shape, params = (2, channels, 10 - size, (20 + 2 - size) // 2 + 1), Moves2d(2, 1, 1, 0, 1, 1)
        of = probes.node("CONV_2D_DW", "f32", shape, kernel, x, params=params)
        if not together:
            return of
        (kernel, x), dst = (_by_pixels(each) for each in (kernel, x)), _by_pixels(of.dst)
        planes = replace(kernel, ne=(size, size, 1, channels), nb=(*kernel.nb[:2], kernel.nb[0], kernel.nb[2]))
        return replace(of, dst=dst, src=(planes, x))

    return make


def _by_pixels(x: Tensor) -> Tensor:
    """A tensor whose dimension 2 comes first in memory; the kernel of CONV_2D_DW with its dimension 3 there."""
    if x.ne[2] == 1:
        x = replace(x, ne=(x.ne[0], x.ne[1], x.ne[3], 1), nb=(x.nb[0], x.nb[1], x.nb[3], x.nb[3] * x.ne[3]))
    other = Tensor.of(np.ascontiguousarray(np.moveaxis(x.view(), 1, 3)), x.type)
    nb0, nb1, nb2, nb3 = other.nb
    return replace(other, ne=(*x.ne[:3], other.ne[3]), nb=(nb1, nb2, nb0, nb3))


conv_2d_dw.nodes(_make_conv_2d_dw(3, 6, together=False), _make_conv_2d_dw(3, 37, together=True))


@conv_2d_dw.probes
def _of_kernels() -> Iterator[Probe]:
    sizes, channels, orders = (1, 2, 3, 5), (3, 16, 37), (False, True)
    makes = [_make_conv_2d_dw(size, n, together=order) for size in sizes for n in channels for order in orders]
    for type in ("f32", "f16"):

        def covers(dst: Tensor, kernel: Tensor, x: Tensor, type: str = type) -> bool:
            return kernel.type == type and max(kernel.ne[:2]) <= max(sizes)

        yield Probe(f"of {type}, up to {max(sizes)} wide", tuple(makes), ("f32", type, "f32"), covers=covers)
