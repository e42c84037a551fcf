"""Transposed convolutions: CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D; and COL2IM_1D, the last step of one by a matrix
product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.ops.kernels.functions import put, wide
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Params, i32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows
from quant.kernels.jit import array_at, compiled
from quant.kernels.late import types
from quant.kernels.orders import dots_f16, dots_f32, dots_in_halves
from quant.kernels.records import Dims, record_at
from quant.kernels.threads import Job, Work
from quant.runs import CODES, narrow_run, widen_run

_SPAN = 4096  # elements of a signal that are added up together
_TILE_BYTES = 1 << 15  # of pixels that all taps of a kernel are multiplied with


@dataclass(frozen=True)
class Transpose1d(Params):
    """op_params of CONV_TRANSPOSE_1D: stride, padding (0) and dilation (1); ggml_conv_transpose_1d."""

    s0: i32
    p0: i32
    d0: i32


@dataclass(frozen=True)
class Transpose2d(Params):
    """op_params of CONV_TRANSPOSE_2D: ggml_conv_transpose_2d_p0."""

    stride: i32


@dataclass(frozen=True)
class Col2im1d(Params):
    """op_params of COL2IM_1D: stride, channels, padding; ggml_col2im_1d."""

    s0: i32
    oc: i32
    p0: i32


# CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D


def _as_2d(dst: Tensor, kernel: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of one dimension as of two, with a height of 1."""

    def raised(t: Tensor) -> Tensor:
        return replace(t, ne=(t.ne[0], 1, *t.ne[1:3]), nb=(t.nb[0], t.nb[1], *t.nb[1:3]))

    return raised(dst), raised(kernel), raised(x)


def _refuse(dst: Tensor, kernel: Tensor, x: Tensor, stride: int) -> str | None:
    """For two dimensions."""
    if stride < 1:
        return f"stride {stride}"
    width, height = ((n - 1) * stride + k for n, k in zip(x.ne[:2], kernel.ne[:2], strict=True))
    if dst.ne != (width, height, kernel.ne[2], x.ne[3]) or kernel.ne[3] != x.ne[2]:
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    if kernel.ne[1] != 1 and kernel.nb[1] != kernel.ne[0] * kernel.nb[0]:
        return f"kernel rows are not adjacent: nb {kernel.nb}"
    return gaps_in_rows(kernel=kernel, x=x) or gaps(dst=dst)


def _refuse_1d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose1d) -> str | None:
    if params.p0 or params.d0 != 1:
        return f"padding {params.p0}, dilation {params.d0}"
    if kernel.ne[3] != 1 or x.ne[2:] != (1, 1) or dst.ne[3] != 1:
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    return _refuse(*_as_2d(dst, kernel, x), params.s0)


def _refuse_2d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose2d) -> str | None:
    return _refuse(dst, kernel, x, params.stride)


def _define(dst: Tensor, kernel: Tensor, x: Tensor, stride: int, numerics: Numerics) -> None:
    """For two dimensions."""
    rounded = convert(x.view(), x.type, kernel.type, numerics=numerics) if kernel.type == "f16" else x.view()
    images = rounded.astype(dst.view().dtype)
    factors, (n1, n0) = wide(kernel), images.shape[2:]
    y = np.zeros(dst.view().shape, images.dtype)
    with np.errstate(all="ignore"):
        for i1, i0 in np.ndindex(kernel.ne[1], kernel.ne[0]):
            part = y[:, :, i1 : i1 + n1 * stride : stride, i0 : i0 + n0 * stride : stride]
            part += np.einsum("co,nchw->nohw", factors[:, :, i1, i0], images)
    dst.view()[...] = y


_TYPES = [("f32", kernel, "f32") for kernel in ("f32", "f16")]


@op(
    "CONV_TRANSPOSE_1D",
    types=_TYPES,
    refuse=_refuse_1d,
    params=Transpose1d,
    bound=BOUND,
    wide=True,
    products=True,
)
def conv_transpose_1d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose1d, numerics: Numerics = PLAIN) -> None:
    """dst[co, t * s0 + k] = sum over t, k and c of kernel[c, co, k] * x[c, t].

    kernel (width, channels of dst, channels of x), x (width, channels), dst (width, channels). Equals
    ggml_compute_forward_conv_transpose_1d but for the order of sums.
    """
    _define(*_as_2d(dst, kernel, x), params.s0, numerics)


@op(
    "CONV_TRANSPOSE_2D",
    types=_TYPES,
    refuse=_refuse_2d,
    params=Transpose2d,
    bound=BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_transpose_2d_p0": "ctt i"},
)
def conv_transpose_2d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose2d, numerics: Numerics = PLAIN) -> None:
    """dst[n, co, h * stride + kh, w * stride + kw] = sum over all of kernel[c, co, kh, kw] * x[n, c, h, w].

    kernel (width, height, channels of dst, channels of x), x and dst (width, height, channels, images). Equals
    ggml_compute_forward_conv_transpose_2d but for the order of sums.
    """
    _define(dst, kernel, x, params.stride, numerics)


class TransposedConvolution(NamedTuple):
    """Addresses of tensors without gaps, and dimensions 0 and 1 of each.

    pixels, factors  x and the kernel, permuted so that their k channels of x are dimension 0
    is_half          pixels are float16; in_halves: their products are added as float16
    n_channels       of dst
    tile             pixels that are multiplied together
    """

    pixels: int
    x_ne: tuple[int, int]
    is_half: int
    in_halves: int
    factors: int
    kernel_ne: tuple[int, int]
    k: int
    dst: int
    dst_ne: tuple[int, int]
    n_channels: int
    stride: int
    tile: int


@compiled
def transposed_convolution(p, begin, end, products):
    """A unit is a plane of dst: one channel of one image. Pixels in order, a tile with one tap of the kernel after the
    other from the last one: so each element gets its terms in the order of the pixels, as ggml adds them."""
    of = record_at(p, TransposedConvolution)
    n0, n1 = of.x_ne
    k0, k1 = of.kernel_ne
    width, height = of.dst_ne
    k, tile, stride = of.k, of.tile, of.stride
    line = 2 * k if of.is_half else 4 * k
    for unit in range(begin, end):
        image, channel = unit // of.n_channels, unit % of.n_channels
        at = of.dst + 4 * unit * height * width
        array_at(at, types.float32, height * width)[:] = types.float32(0)
        for first in range(0, n1 * n0, tile):
            last = min(first + tile, n1 * n0)
            rows = of.pixels + (image * n1 * n0 + first) * line
            for tap in range(k1 * k0 - 1, -1, -1):
                column = of.factors + 4 * (channel * k1 * k0 + tap) * k
                if of.in_halves:
                    dots_in_halves(rows, line, column, k, products, last - first)
                elif of.is_half:
                    dots_f16(rows, line, column, k, products, last - first)
                else:
                    dots_f32(rows, line, column, k, products, last - first)
                i = first
                while i < last:
                    row, begins = i // n0, i % n0
                    some = min(last - i, n0 - begins)
                    place = (row * stride + tap // k0) * width + begins * stride + tap % k0
                    y = array_at(at + 4 * place, types.float32, some * stride)
                    v = array_at(products + 4 * (i - first), types.float32, some)
                    for j in range(some):
                        y[j * stride] += v[j]
                    i += some
    return 0


def _turned(x: Tensor, order: Dims, type: str) -> tuple[Tensor, list[Work]]:
    """A tensor with its dimensions in another order, in memory of its own, and the works that move it there."""
    i, j, k, m = order
    turned = replace(x, ne=(x.ne[i], x.ne[j], x.ne[k], x.ne[m]), nb=(x.nb[i], x.nb[j], x.nb[k], x.nb[m]))
    made = Tensor.of(np.empty(turned.ne[::-1], np.float16 if type == "f16" else np.float32))
    job = strided.bind_move(made, turned)
    assert job is not None
    return made, list(job.works)


def _bind(dst: Tensor, kernel: Tensor, x: Tensor, stride: int, numerics: Numerics) -> Call:
    """For two dimensions."""
    pixels, first = _turned(x, (2, 0, 1, 3), kernel.type)
    factors, second = _turned(kernel, (3, 0, 1, 2), "f32")
    k, line = x.ne[2], x.ne[2] * pixels.codec.block_bytes
    tile = max(16, _TILE_BYTES // max(1, line))
    of = TransposedConvolution(
        pixels=pixels.address,
        x_ne=x.ne[:2],
        is_half=kernel.type == "f16",
        in_halves=kernel.type == "f16" and numerics.dots_in_halves,
        factors=factors.address,
        kernel_ne=kernel.ne[:2],
        k=k,
        dst=dst.address,
        dst_ne=dst.ne[:2],
        n_channels=kernel.ne[2],
        stride=stride,
        tile=tile,
    )
    n_planes, n_bytes = dst.ne[2] * dst.ne[3], x.n_elements * kernel.n_elements // max(1, k)
    kept = dst, kernel, x, pixels, factors
    return Job(*first, *second, Work(transposed_convolution, of, n_planes, n_bytes, scratch=4 * tile, keep=kept))


@conv_transpose_1d.compiled
def _conv_transpose_1d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose1d, numerics: Numerics) -> Call:
    return _bind(*_as_2d(dst, kernel, x), params.s0, numerics)


@conv_transpose_2d.compiled
def _conv_transpose_2d(dst: Tensor, kernel: Tensor, x: Tensor, params: Transpose2d, numerics: Numerics) -> Call:
    return _bind(dst, kernel, x, params.stride, numerics)


def _make_1d(channels: int) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 1, 1, channels, 20), probes.normal(rng, types[1], 1, channels, 4, 3)
        return probes.node("CONV_TRANSPOSE_1D", "f32", (4, 41), kernel, x, params=Transpose1d(2, 0, 1))

    return make


def _make_2d(channels: int) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 2, channels, 6, 7), probes.normal(rng, types[1], channels, 4, 3, 3)
        return probes.node("CONV_TRANSPOSE_2D", "f32", (2, 4, 13, 15), kernel, x, params=Transpose2d(2))

    return make


conv_transpose_1d.nodes(_make_1d(5))
conv_transpose_2d.nodes(_make_2d(5))
conv_transpose_1d.probes(lambda: probes.of_channels(_make_1d, 1))
conv_transpose_2d.probes(lambda: probes.of_channels(_make_2d, 1))


# COL2IM_1D


def _refuse_col2im(dst: Tensor, x: Tensor, params: Col2im1d) -> str | None:
    p = params
    if min(p.s0, p.oc) < 1 or p.p0 < 0:
        return f"stride {p.s0}, {p.oc} channels, padding {p.p0}"
    if not x.n_elements or x.ne[0] % p.oc or x.ne[2:] != (1, 1) or dst.ne[1:] != (p.oc, 1, 1):
        return f"x of ne {x.ne} does not fit dst of ne {dst.ne}"
    return gaps(x=x, dst=dst)


@op(
    "COL2IM_1D",
    types=[(type, type) for type in ("f32", "f16", "bf16")],
    refuse=_refuse_col2im,
    params=Col2im1d,
    bound=1e-12,
    wide=True,
)
def col2im_1d(dst: Tensor, x: Tensor, params: Col2im1d) -> None:
    """dst[c, t * s0 + k - p0] = sum over t and k of x[t, (c, k)].

    x (channels * width of a kernel, time), dst (time, channels). Equals ggml_compute_forward_col2im_1d.
    """
    p = params
    columns = wide(x)[0, 0].reshape(x.ne[1], p.oc, -1)
    y: NDArray[Any] = np.zeros((p.oc, dst.ne[0]), columns.dtype)
    with np.errstate(all="ignore"):
        for k in reversed(range(columns.shape[2])):
            places = np.arange(x.ne[1]) * p.s0 + k - p.p0
            inside = (places >= 0) & (places < dst.ne[0])
            y[:, places[inside]] += columns[inside, :, k].T
    put(dst, y[None, None])


class Signal(NamedTuple):
    """n_columns columns of n_channels times k elements; n elements for each channel of dst.

    x, dst   addresses; code, element: the type of both and its bytes
    padding  elements that are cut off
    """

    x: int
    dst: int
    code: int
    element: int
    n_columns: int
    n_channels: int
    k: int
    stride: int
    padding: int
    n: int


@compiled
def signal(p, begin, end, scratch):
    """A unit is a span of time of one channel. Each element adds its terms in the order of time. Scratch: the sums of a
    span, and k elements of a column."""
    of = record_at(p, Signal)
    code, element, k, stride, padding, n = of.code, of.element, of.k, of.stride, of.padding, of.n
    to, at = scratch, scratch + 4 * _SPAN
    sums = array_at(to, types.float32, _SPAN)
    spans = -(-n // _SPAN)
    for unit in range(begin, end):
        channel, begins = unit // spans, unit % spans * _SPAN
        count = min(_SPAN, n - begins)
        sums[:] = types.float32(0)
        earliest = max(0, (begins + padding - k) // stride)
        latest = min(of.n_columns, (begins + padding + count) // stride + 1)
        for t in range(earliest, latest):
            first = t * stride - padding - begins
            widen_run(code, of.x + (t * of.n_channels + channel) * k * element, element, at, k)
            skipped = max(0, -first)
            terms = array_at(at + 4 * skipped, types.float32, k)
            totals = array_at(to + 4 * (first + skipped), types.float32, k)
            for i in range(min(k, count - first) - skipped):
                totals[i] += terms[i]
        narrow_run(to, code, of.dst + (channel * n + begins) * element, element, count)
    return 0


@col2im_1d.compiled
def _col2im_1d(dst: Tensor, x: Tensor, params: Col2im1d) -> Call:
    p, k = params, x.ne[0] // params.oc
    of = Signal(
        x=x.address,
        dst=dst.address,
        code=CODES[x.type],
        element=x.codec.block_bytes,
        n_columns=x.ne[1],
        n_channels=p.oc,
        k=k,
        stride=p.s0,
        padding=p.p0,
        n=dst.ne[0],
    )
    n_units = p.oc * -(-dst.ne[0] // _SPAN)
    return Job(Work(signal, of, n_units, 4 * x.nbytes, scratch=4 * (_SPAN + k), keep=(dst, x)))


@col2im_1d.nodes
def _make_columns(rng: probes.Rng, types: Types) -> Node:
    columns = probes.normal(rng, types[1], 1, 1, 20, 12)
    return probes.node("COL2IM_1D", types[0], (3, 40), columns, params=Col2im1d(2, 3, 1))
