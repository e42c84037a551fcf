"""Convolutions: CONV_2D, CONV_3D, CONV_2D_DW; and as rows that a matrix product multiplies with the kernels, IM2COL,
IM2COL_3D and IM2COL_BACK.

ggml's CPU computes CONV_2D and CONV_3D as such a product: what a place sees is a row, in the type of the kernels, and
rows are multiplied as those of MUL_MAT. GGML_NPU_MATMUL says how that is done here: exact, in the order of ggml's sums,
or fast, by BLAS, with rows that are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.checks import Make, Probe, Types
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.ops import probes
from ggml_backend_npu.ops.functions import wide
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.ops.products import multiply_by_blas
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.params import Params, i32
from ggml_backend_npu.registry import Call, op
from quant import type_names
from quant.kernels.jit import (
    array_at,
    compiled,
    f16_to_f32,
    fused_multiply_add,
    inlined,
    keep,
    parameters,
    values,
)
from quant.kernels.matrices import LANES
from quant.kernels.orders import GROUP, dots_f16, dots_f32, multiply_f32
from quant.kernels.threads import Job, Work
from quant.runs import F16, F32, f32_to_f16, narrow_run, widen_run

Three = tuple[int, int, int]  # of depth, height and width
Five = tuple[int, int, int, int, int]  # of images, channels and these

_WORK_BYTES = 16 << 20  # GGML_IM2COL_WORK_SIZE
_TILE_BYTES = 1 << 18  # of what places see, that is multiplied with all kernels
_PARTS, _LEAST_KERNELS = 4, 128  # where there are few tiles: in how many parts kernels are cut, and how small at least


_BOUND = 1e-12  # a few roundings, one after the other


@dataclass(frozen=True)
class Conv2d(Params):
    """op_params of CONV_2D and CONV_2D_DW: strides, paddings and dilations of columns and rows; ggml_conv_2d_direct."""

    s0: i32
    s1: i32
    p0: i32
    p1: i32
    d0: i32
    d1: i32


@dataclass(frozen=True)
class Conv3d(Params):
    """op_params of CONV_3D: strides, paddings, dilations; channels, images and kernels; ggml_conv_3d_direct."""

    s0: i32
    s1: i32
    s2: i32
    p0: i32
    p1: i32
    p2: i32
    d0: i32
    d1: i32
    d2: i32
    c: i32
    n: i32
    oc: i32


@dataclass(frozen=True)
class Im2col(Params):
    """op_params of IM2COL and IM2COL_BACK: as of CONV_2D, and whether there are two dimensions; ggml_im2col."""

    s0: i32
    s1: i32
    p0: i32
    p1: i32
    d0: i32
    d1: i32
    is_2d: i32


@dataclass(frozen=True)
class Im2col3d(Params):
    """op_params of IM2COL_3D: strides, paddings, dilations, channels; ggml_im2col_3d."""

    s0: i32
    s1: i32
    s2: i32
    p0: i32
    p1: i32
    p2: i32
    d0: i32
    d1: i32
    d2: i32
    IC: i32


@dataclass(frozen=True)
class _Windows:
    """Windows that move over images: each place sees what lies under its own.

    shape   images, channels, depth, height, width; nb: how far apart they are, in bytes
    size    of a window; places: how many there are; step, pad, apart: strides, paddings, dilations
    """

    shape: Five
    nb: Five
    size: Three
    places: Three
    step: Three
    pad: Three
    apart: Three

    @property
    def n_seen(self) -> int:
        """How many elements a place sees."""
        return self.shape[1] * prod(self.size)

    @property
    def n_places(self) -> int:
        """Of an image."""
        return prod(self.places)

    @property
    def n_images(self) -> int:
        return self.shape[0]

    def seen(self, x: NDArray[Any]) -> NDArray[Any]:
        """(images, channels, *places, *size) of the images in any type; 0 beyond them."""
        x = x.reshape(self.shape)
        reach = [
            max(0, (n - 1) * s + (k - 1) * d + 1)
            for n, s, k, d in zip(self.places, self.step, self.size, self.apart, strict=True)
        ]
        padded = np.zeros((*x.shape[:2], *reach), x.dtype)
        sizes = zip(x.shape[2:], self.pad, reach, strict=True)
        to = tuple(slice(max(p, 0), max(0, min(n + p, m))) for n, p, m in sizes)
        part = tuple(slice(t.start - p, max(t.start, t.stop) - p) for t, p in zip(to, self.pad, strict=True))
        padded[:, :, *to] = x[:, :, *part]
        lead, along = padded.strides[:2], padded.strides[2:]
        strides = (*lead, *(n * s for n, s in zip(along, self.step, strict=True)))
        strides += tuple(n * d for n, d in zip(along, self.apart, strict=True))
        return np.lib.stride_tricks.as_strided(padded, (*x.shape[:2], *self.places, *self.size), strides)

    def numbers(self, x: Tensor) -> list[int]:
        """What kernels know of it, whose elements are x's."""
        return [
            x.address, *self.nb, *self.shape[1:], *self.size, *self.places, *self.step, *self.pad, *self.apart
        ]  # fmt: skip


def _moves(p: Conv2d | Conv3d | Im2col | Im2col3d) -> tuple[Three, Three, Three]:
    """Strides, paddings and dilations, by depth, height and width."""
    s, p_, d = ((getattr(p, f"{name}2", none), getattr(p, f"{name}1"), getattr(p, f"{name}0")) for name, none in _NONE)
    return s, p_, d


_NONE = (("s", 1), ("p", 0), ("d", 1))


def _in_a_plane(x: Tensor) -> tuple[Five, Five]:
    """Images of two dimensions: shape and strides of `_Windows`."""
    return (x.ne[3], x.ne[2], 1, x.ne[1], x.ne[0]), (x.nb[3], x.nb[2], 0, x.nb[1], x.nb[0])


def _in_space(x: Tensor, n_channels: int) -> tuple[Five, Five]:
    """Images of three dimensions, one after the other's channels: shape and strides of `_Windows`."""
    nb = n_channels * x.nb[3], x.nb[3], x.nb[2], x.nb[1], x.nb[0]
    return (x.ne[3] // n_channels, n_channels, x.ne[2], x.ne[1], x.ne[0]), nb


# IM2COL, IM2COL_3D


def _im2col_windows(dst: Tensor, kernel: Tensor, x: Tensor, p: Im2col | Im2col3d) -> _Windows:
    if isinstance(p, Im2col3d):
        shape, nb = _in_space(x, p.IC)
        places = dst.ne[3] // max(1, shape[0]), dst.ne[2], dst.ne[1]
        return _Windows(shape, nb, (kernel.ne[2], kernel.ne[1], kernel.ne[0]), places, *_moves(p))
    if p.is_2d:
        size, places = (1, kernel.ne[1], kernel.ne[0]), (1, dst.ne[2], dst.ne[1])
        return _Windows(*_in_a_plane(x), size, places, *_moves(p))
    shape, nb = (x.ne[2], x.ne[1], 1, 1, x.ne[0]), (x.nb[2], x.nb[1], 0, 0, x.nb[0])
    return _Windows(shape, nb, (1, 1, kernel.ne[0]), (1, 1, dst.ne[1]), *_moves(p))


def _refuse_im2col(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col | Im2col3d) -> str | None:
    if isinstance(params, Im2col3d):
        if params.IC < 1:
            return f"{params.IC} channels"
        w = _im2col_windows(dst, kernel, x, params)
        depth, height, width = w.places
        fits = dst.ne == (w.n_seen, width, height, depth * w.n_images)
    else:
        if not params.is_2d and x.ne[3] != 1:
            return f"x of ne {x.ne}: must be 1 in dimension 3"
        w = _im2col_windows(dst, kernel, x, params)
        _, height, width = w.places
        fits = dst.ne == (w.n_seen, width, *((height, w.n_images) if params.is_2d else (w.n_images, 1)))
    if not fits:
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    return gaps_in_rows(x=x) or gaps(dst=dst)


def _define_im2col(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col | Im2col3d) -> None:
    w = _im2col_windows(dst, kernel, x, params)
    images = x.view()[: w.n_images * params.IC] if isinstance(params, Im2col3d) else x.view()
    seen = w.seen(convert(images, x.type, dst.type))
    dst.view().reshape(w.n_images, *w.places, w.shape[1], *w.size)[...] = seen.transpose(0, 2, 3, 4, 1, 5, 6, 7)


_IM2COL = (("f32", "f32"), ("f16", "f32"), ("f16", "f16"))  # dst, x


@op(
    "IM2COL",
    types=[(dst, kernel, x) for dst, x in _IM2COL for kernel in type_names()],
    refuse=_refuse_im2col,
    params=Im2col,
    built_by={"ggml_im2col": "ctt iiiiii bi"},
)
def im2col(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col) -> None:
    """dst[n, oh, ow, (c, kh, kw)] = x[n, c, oh * s1 + kh * d1 - p1, ow * s0 + kw * d0 - p0], 0 beyond x.

    x (width, height, channels, images) and kernel (width, height, ...), of which only the size counts; in one dimension
    x (width, channels, images). Equals ggml_compute_forward_im2col.
    """
    _define_im2col(dst, kernel, x, params)


@op(
    "IM2COL_3D",
    types=[(dst, kernel, "f32") for dst in ("f32", "f16") for kernel in type_names()],
    refuse=_refuse_im2col,
    params=Im2col3d,
    built_by={"ggml_im2col_3d": "ctt l iiiiiiiiii"},
)
def im2col_3d(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col3d) -> None:
    """As IM2COL in three dimensions: dst[(n, od), oh, ow, (c, kd, kh, kw)] of x[(n, c), id, ih, iw], 0 beyond x.

    x (width, height, depth, channels of images, of which an image that is not whole is left out), kernel (width,
    height, depth, ...), of which only the size counts. Equals ggml_compute_forward_im2col_3d.
    """
    _define_im2col(dst, kernel, x, params)


@inlined
def _offsets(windows, to):
    """How far from the first element under a window the others lie, int64, to an address."""
    _, _, nb_c, nb_z, nb_y, nb_x, n_c, _, _, _, kz, ky, kx, _, _, _, _, _, _, _, _, _, dz, dy, dx = windows
    found, i = array_at(to, types.int64, n_c * kz * ky * kx), 0
    for c in range(n_c):
        for z in range(kz):
            for y in range(ky):
                for x in range(kx):
                    found[i] = c * nb_c + z * dz * nb_z + y * dy * nb_y + x * dx * nb_x
                    i += 1


@inlined
def _see(windows, offsets, bits, image, place, to):
    """What a place of an image sees, elements of uint32 or uint16, as a row at an address."""
    (
        at, nb_n, nb_c, nb_z, nb_y, nb_x, n_c, n_z, n_y, n_x, kz, ky, kx, _, oy, ox, sz, sy, sx, pz, py, px, dz, dy, dx,
    ) = windows  # fmt: skip
    z0, y0, x0 = place // (oy * ox) * sz - pz, place // ox % oy * sy - py, place % ox * sx - px
    first, n = at + image * nb_n + z0 * nb_z + y0 * nb_y + x0 * nb_x, n_c * kz * ky * kx
    row = array_at(to, bits, n)
    inside = min(z0, y0, x0) >= 0 and z0 + (kz - 1) * dz < n_z and y0 + (ky - 1) * dy < n_y and x0 + (kx - 1) * dx < n_x
    if inside:
        far = array_at(offsets, types.int64, n)
        for i in range(n):
            row[i] = array_at(first + far[i], bits, 1)[0]
        return
    i = 0
    for c in range(n_c):
        for z in range(kz):
            for y in range(ky):
                is_line = 0 <= z0 + z * dz < n_z and 0 <= y0 + y * dy < n_y
                line = first + c * nb_c + z * dz * nb_z + y * dy * nb_y
                for x in range(kx):
                    if is_line and 0 <= x0 + x * dx < n_x:
                        row[i] = array_at(line + x * dx * nb_x, bits, 1)[0]
                    else:
                        row[i] = 0
                    i += 1


@compiled
def rows_of_places(p, begin, end):
    """What places [begin, end) of all images see, one row after the other: float32, float16, or rounded to float16."""
    windows = values(p, 25)
    dst, is_half, rounds, n_places, n = values(p + 8 * 25, 5)
    memory, row_memory = np.empty(max(1, n), np.int64), np.empty(max(1, n), np.float32)
    offsets, row = types.int64(memory.ctypes.data), types.int64(row_memory.ctypes.data)
    _offsets(windows, offsets)
    for i in range(begin, end):
        image, place = i // n_places, i % n_places
        if rounds:
            _see(windows, offsets, types.uint32, image, place, row)
            narrow_run(row, types.int64(F16), dst + 2 * i * n, types.int64(2), n)
        elif is_half:
            _see(windows, offsets, types.uint16, image, place, dst + 2 * i * n)
        else:
            _see(windows, offsets, types.uint32, image, place, dst + 4 * i * n)
    keep(memory)
    keep(row_memory)
    return 0


def _im2col_job(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col | Im2col3d) -> Call:
    w = _im2col_windows(dst, kernel, x, params)
    p = parameters(*w.numbers(x), dst.address, x.type == "f16", x.type != dst.type, w.n_places, w.n_seen)
    return Job(Work(rows_of_places, p, w.n_images * w.n_places, 2 * dst.nbytes, keep=(dst, x)))


im2col.compiled(_im2col_job)
im2col_3d.compiled(_im2col_job)


# IM2COL_BACK


def _refuse_back(dst: Tensor, gradient: Tensor, kernel: Tensor, params: Im2col) -> str | None:
    p = params
    if min(p.s0, p.s1 if p.is_2d else 1) < 1:
        return f"strides {p.s0}, {p.s1}"
    channels, n_images, size = dst.ne[1], dst.ne[2], kernel.ne[0]
    fits = dst.ne[3] == gradient.ne[3] == 1 and gradient.ne[2] == n_images
    if p.is_2d:
        channels, n_images, size = dst.ne[2], dst.ne[3], kernel.ne[0] * kernel.ne[1]
        fits = gradient.ne[3] == n_images
    if not fits or gradient.ne[0] != channels * size:
        return f"gradient of ne {gradient.ne}, kernel of ne {kernel.ne} do not fit dst of ne {dst.ne}"
    return gaps(gradient=gradient, dst=dst)


@op(
    "IM2COL_BACK",
    types=[("f32", "f32", kernel) for kernel in ("f32", "f16")],
    refuse=_refuse_back,
    params=Im2col,
    bound=_BOUND,
    wide=True,
    built_by={"ggml_im2col_back": "ctt q iiiiii b"},
)
def im2col_back(dst: Tensor, gradient: Tensor, kernel: Tensor, params: Im2col) -> None:
    """dst[n, c, ih, iw] = sum of gradient[n, oh, ow, (c, kh, kw)] over all that IM2COL took from there, by kh and kw.

    Equals ggml_compute_forward_im2col_back_f32.
    """
    p = params
    width, height, channels, n_images = dst.ne if p.is_2d else (dst.ne[0], 1, *dst.ne[1:3])
    kh, kw = (kernel.ne[1] if p.is_2d else 1), kernel.ne[0]
    oh, ow = (gradient.ne[2] if p.is_2d else 1), gradient.ne[1]
    taken = gradient.view().reshape(n_images, oh, ow, channels, kh, kw).transpose(4, 5, 0, 3, 1, 2)
    y = np.zeros((n_images, channels, height, width), gradient.view().dtype)
    with np.errstate(all="ignore"):
        for i, j in np.ndindex(kh, kw):
            rows = np.arange(oh) * p.s1 + i * p.d1 - p.p1 if p.is_2d else np.zeros(1, int)
            columns = np.arange(ow) * p.s0 + j * p.d0 - p.p0
            (r,), (c,) = (np.nonzero((at >= 0) & (at < n)) for at, n in ((rows, height), (columns, width)))
            y[:, :, rows[r, None], columns[c]] += taken[i, j][:, :, r[:, None], c]
    dst.view()[...] = y.reshape(dst.view().shape)


@compiled
def gradients(p, begin, end):
    """Planes [begin, end): of each element the terms in the order of the kernel's rows and columns."""
    gradient, dst, n_c, n_y, n_x, oy, ox, ky, kx, s0, s1, p0, p1, d0, d1 = values(p, 15)
    size = ky * kx
    for unit in range(begin, end):
        image, channel = unit // n_c, unit % n_c
        source = gradient + 4 * (image * oy * ox * n_c + channel) * size
        for row in range(n_y):
            y = array_at(dst + 4 * (unit * n_y + row) * n_x, types.float32, n_x)
            y[:] = types.float32(0)
            for i in range(ky):
                from_y = row + p1 - i * d1
                if from_y < 0 or from_y % s1 != 0 or from_y // s1 >= oy:
                    continue
                line = source + 4 * (from_y // s1 * ox * n_c * size + i * kx)
                for j in range(kx):
                    for place in range(ox):
                        column = place * s0 + j * d0 - p0
                        if 0 <= column < n_x:
                            y[column] += array_at(line + 4 * (place * n_c * size + j), types.float32, 1)[0]
    return 0


@im2col_back.compiled
def _im2col_back(dst: Tensor, gradient: Tensor, kernel: Tensor, params: Im2col) -> Call:
    q, (width, height, channels, n_images) = params, dst.ne
    ky, oy, moves = kernel.ne[1], gradient.ne[2], (q.s0, q.s1, q.p0, q.p1, q.d0, q.d1)
    if not q.is_2d:
        height, channels, n_images = 1, *dst.ne[1:3]
        ky, oy, moves = 1, 1, (q.s0, 1, q.p0, 0, q.d0, 1)
    p = parameters(gradient.address, dst.address, channels, height, width, oy, gradient.ne[1], ky, kernel.ne[0], *moves)
    return Job(Work(gradients, p, channels * n_images, 2 * gradient.nbytes, keep=(dst, gradient)))


# CONV_2D, CONV_3D


def _conv_windows(dst: Tensor, kernel: Tensor, x: Tensor, p: Conv2d | Conv3d) -> _Windows:
    if isinstance(p, Conv3d):
        size, places = (kernel.ne[2], kernel.ne[1], kernel.ne[0]), (dst.ne[2], dst.ne[1], dst.ne[0])
        return _Windows(*_in_space(x, p.c), size, places, *_moves(p))
    size, places = (1, kernel.ne[1], kernel.ne[0]), (1, dst.ne[1], dst.ne[0])
    return _Windows(*_in_a_plane(x), size, places, *_moves(p))


def _refuse_conv(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d | Conv3d) -> str | None:
    if isinstance(params, Conv3d):
        c, n = params.c, params.n
        fits = min(c, n, params.oc) > 0
        fits = fits and (kernel.ne[3], x.ne[3], dst.ne[3]) == (c * params.oc, c * n, params.oc * n)
    else:
        fits = (*kernel.ne[2:], x.ne[3]) == (x.ne[2], *dst.ne[2:])
    if not fits:
        return f"kernel of ne {kernel.ne}, x of ne {x.ne} do not fit dst of ne {dst.ne}"
    oc = _n_kernels(kernel, params)
    n_bytes = kernel.n_elements // max(1, oc) * kernel.codec.block_bytes + 4 * oc
    if n_bytes > _WORK_BYTES:
        return f"{n_bytes} bytes for a place, of which ggml's CPU has {_WORK_BYTES}"
    return gaps(kernel=kernel)


def _n_kernels(kernel: Tensor, p: Conv2d | Conv3d) -> int:
    return p.oc if isinstance(p, Conv3d) else kernel.ne[3]


def _sgemm(numerics: Numerics) -> int:
    """The function of BLAS that multiplies, 0 where ggml's own order is wanted."""
    return numerics.sgemm if numerics.matmul == "fast" else 0


def _define_conv(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d | Conv3d, numerics: Numerics) -> None:
    w = _conv_windows(dst, kernel, x, params)
    rounded = convert(x.view(), x.type, "f16") if kernel.type == "f16" and not _sgemm(numerics) else x.view()
    kernels = wide(kernel).reshape(_n_kernels(kernel, params), w.n_seen)
    y = dst.view().reshape(w.n_images, len(kernels), *w.places)
    with np.errstate(all="ignore"):
        for n, seen in enumerate(w.seen(rounded.astype(y.dtype))):
            for oz, oy in np.ndindex(*w.places[:2]):
                rows = np.moveaxis(seen[:, oz, oy], 1, -1).reshape(w.n_seen, w.places[2])
                y[n, :, oz, oy] = kernels @ rows


_CONV = [("f32", kernel, "f32") for kernel in ("f32", "f16")]


@op(
    "CONV_2D",
    types=_CONV,
    refuse=_refuse_conv,
    params=Conv2d,
    bound=BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_2d_direct": "ctt iiiiii"},
)
def conv_2d(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d, numerics: Numerics = PLAIN) -> None:
    """dst[n, oc, oh, ow] = sum over c, kh, kw of kernel[oc, c, kh, kw] * x[n, c, oh * s1 + kh * d1 - p1, ...].

    x (width, height, channels, images), kernel (width, height, channels, kernels), dst (width, height, kernels,
    images). Equals ggml_compute_forward_conv_2d but for the order of sums.
    """
    _define_conv(dst, kernel, x, params, numerics)


@op(
    "CONV_3D",
    types=_CONV,
    refuse=_refuse_conv,
    params=Conv3d,
    bound=BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_3d_direct": "ctt iiiiiiiiiiii"},
)
def conv_3d(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv3d, numerics: Numerics = PLAIN) -> None:
    """As CONV_2D in three dimensions: x (width, height, depth, channels of images), kernel (width, height, depth,
    channels of kernels), dst (width, height, depth, kernels of images).

    Equals ggml_compute_forward_conv_3d but for the order of sums.
    """
    _define_conv(dst, kernel, x, params, numerics)


_BY_DOTS, _IN_BLOCKS, _BY_BLAS = range(3)


@compiled
def convolution(p, begin, end):
    """Units [begin, end): some kernels, times tiles of places of one image after the other; kernels outermost."""
    windows = values(p, 25)
    kernels, n_kernels, some_kernels, k, is_half, dst, n_places, tile, way, sgemm, n_images = values(p + 8 * 25, 11)
    n_wide = max(GROUP, _TILE_BYTES // max(1, k)) if way == _BY_BLAS else types.int64(GROUP)
    columns_memory = np.empty(max(1, tile * k), np.float32)
    offsets_memory = np.empty(max(1, k), np.int64)
    out_memory, rows_memory = np.empty(tile * some_kernels, np.float32), np.empty(max(1, n_wide * k), np.float32)
    x, y, where = np.empty(tile, np.int64), np.empty(tile, np.int64), np.empty(3, np.int64)
    columns, offsets = types.int64(columns_memory.ctypes.data), types.int64(offsets_memory.ctypes.data)
    wide_rows = types.int64(rows_memory.ctypes.data)
    out, x_at = types.int64(out_memory.ctypes.data), types.int64(x.ctypes.data)
    y_at, where_at = types.int64(y.ctypes.data), types.int64(where.ctypes.data)
    line = k * (2 if is_half else 4)
    for i in range(tile):
        x[i] = columns + 4 * i * k
        y[i] = out + 4 * i * some_kernels
    where[0], where[1] = 4 * k, k // LANES
    _offsets(windows, offsets)
    tiles = -(-n_places // tile)
    per_kernels = n_images * tiles
    for unit in range(begin, end):
        first_kernel, image = unit // per_kernels * some_kernels, unit % per_kernels // tiles
        first = unit % tiles * tile
        count, n_rows = min(tile, n_places - first), min(some_kernels, n_kernels - first_kernel)
        rows = kernels + first_kernel * line
        to = dst + 4 * ((image * n_kernels + first_kernel) * n_places + first)
        for i in range(count):
            _see(windows, offsets, types.uint32, image, first + i, x[i])
            if is_half and way != _BY_BLAS:
                column = array_at(x[i], types.float32, k)
                for j in range(k):
                    column[j] = f16_to_f32(f32_to_f16(column[j]))
        if way == _BY_BLAS:
            if not is_half:
                multiply_by_blas(sgemm, n_rows, count, k, rows, k, columns, k, to, n_places)
                continue
            for r in range(0, n_rows, n_wide):
                some = min(n_wide, n_rows - r)
                widen_run(types.int64(F16), rows + r * line, types.int64(2), wide_rows, some * k)
                at = to + 4 * r * n_places
                multiply_by_blas(sgemm, some, count, k, wide_rows, k, columns, k, at, n_places)
            continue
        for r in range(0, n_rows, GROUP):
            row, some = rows + r * line, min(GROUP, n_rows - r)
            if way == _IN_BLOCKS:
                where[2] = 4 * r
                if is_half:
                    widen_run(types.int64(F16), row, types.int64(2), wide_rows, GROUP * k)
                    row = wide_rows
                multiply_f32(row, where_at, x_at, y_at, count)
            else:
                for i in range(count):
                    if is_half:
                        dots_f16(row, line, x[i], k, y[i] + 4 * r, some)
                    else:
                        dots_f32(row, line, x[i], k, y[i] + 4 * r, some)
        for c in range(n_rows):
            found = array_at(to + 4 * c * n_places, types.float32, count)
            made = array_at(out + 4 * c, types.float32, tile * some_kernels)
            for i in range(count):
                found[i] = made[i * some_kernels]
    keep(columns_memory)
    keep(offsets_memory)
    keep(out_memory)
    keep(rows_memory)
    keep(x)
    keep(y)
    keep(where)
    return 0


def _conv_job(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d | Conv3d, numerics: Numerics) -> Call | None:
    if not dst.is_contiguous() or not dst.n_elements:
        return None
    w = _conv_windows(dst, kernel, x, params)
    k, n_kernels = w.n_seen, _n_kernels(kernel, params)
    as_blocks = k % LANES == 0 and n_kernels % GROUP == 0 and w.n_images * w.n_places > 1
    sgemm = _sgemm(numerics) if k else 0
    way = _BY_BLAS if sgemm else _IN_BLOCKS if as_blocks else _BY_DOTS
    tile = min(w.n_places, max(12, (4 if sgemm else 1) * _TILE_BYTES // max(1, 48 * k) * 12))
    n_tiles = w.n_images * -(-w.n_places // tile)
    parts = max(1, min(_PARTS // n_tiles, n_kernels // _LEAST_KERNELS))
    some_kernels = -(-n_kernels // (parts * GROUP)) * GROUP
    p = parameters(
        *w.numbers(x), kernel.address, n_kernels, some_kernels, k, kernel.type == "f16", dst.address, w.n_places, tile,
        way, sgemm, w.n_images,
    )  # fmt: skip
    n_units = n_tiles * -(-n_kernels // some_kernels)
    return Job(Work(convolution, p, n_units, dst.n_elements * (4 + k // 2), keep=(dst, kernel, x)))


conv_2d.compiled(_conv_job)
conv_3d.compiled(_conv_job)


# CONV_2D_DW


def _in_channels(x: Tensor) -> bool:
    """Whether the channels of a pixel lie together, and nothing between pixels."""
    width, height, channels, _ = x.ne
    unit = x.codec.block_bytes
    nb = unit * channels, unit * channels * width, unit, unit * channels * width * height
    return all(n == 1 or actual == stride for n, actual, stride in zip(x.ne, x.nb, nb, strict=True))


def _refuse_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d) -> str | None:
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
    types=_CONV,
    refuse=_refuse_dw,
    params=Conv2d,
    bound=_BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_2d_dw_direct": "ctt iiiiii"},
)
def conv_2d_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d) -> None:
    """dst[n, c, oh, ow] = sum over kh, kw of kernel[c, 0, kh, kw] * x[n, c, oh * s1 + kh * d1 - p1, ...] inside x: each
    channel's own kernel.

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


@compiled
def depthwise(p, begin, end):
    """Rows [begin, end) of all planes; or, where channels lie together, of all images. Products are added one after the
    other, each fused with its addition."""
    x, n_y, n_x, kernel, is_half, ky, kx, dst, oy, ox, s0, s1, p0, p1, d0, d1, n_c, together = values(p, 18)
    memory = np.empty(ky * kx * n_c, np.float32)
    all_factors = types.int64(memory.ctypes.data)
    widen_run(
        types.int64(F16 if is_half else F32), kernel, types.int64(2 if is_half else 4), all_factors, ky * kx * n_c
    )
    lanes = n_c if together else types.int64(1)
    for unit in range(begin, end):
        i, row = unit // oy, unit % oy
        image = x + 4 * i * n_y * n_x * lanes
        kernel_at = all_factors if together else all_factors + 4 * (i % n_c) * ky * kx
        to = dst + 4 * unit * ox * lanes
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
                factors = array_at(kernel_at + 4 * (j * kx + m) * lanes, types.float32, lanes)
                source, y_at = line + 4 * (first * s0 + shift) * lanes, to + 4 * first * lanes
                if together:
                    for place in range(count):
                        pixel = array_at(source + 4 * place * s0 * n_c, types.float32, n_c)
                        y = array_at(y_at + 4 * place * n_c, types.float32, n_c)
                        for c in range(n_c):
                            y[c] = fused_multiply_add(factors[c], pixel[c], y[c])
                    continue
                factor, pixels, y = factors[0], array_at(source, types.float32, n_x), array_at(y_at, types.float32, ox)
                if s0 == 1:
                    for place in range(count):
                        y[place] = fused_multiply_add(factor, pixels[place], y[place])
                else:
                    for place in range(count):
                        y[place] = fused_multiply_add(factor, pixels[place * s0], y[place])
    keep(memory)
    return 0


@conv_2d_dw.compiled
def _conv_2d_dw(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv2d) -> Call | None:
    if params.s0 < 1:
        return None
    q, together = params, not x.is_contiguous()
    p = parameters(
        x.address, x.ne[1], x.ne[0], kernel.address, kernel.type == "f16", kernel.ne[1], kernel.ne[0],
        dst.address, dst.ne[1], dst.ne[0], q.s0, q.s1, q.p0, q.p1, q.d0, q.d1, x.ne[2], together,
    )  # fmt: skip
    n_units = dst.ne[1] * dst.ne[3] * (1 if together else dst.ne[2])
    return Job(Work(depthwise, p, n_units, dst.nbytes * prod(kernel.ne[:2]), keep=(dst, kernel, x)))


# what they are measured by


@im2col_back.nodes
def _make_im2col_back(rng: probes.Rng, types: Types) -> Node:
    gradient, kernel = probes.normal(rng, "f32", 2, 9, 10, 36), probes.normal(rng, types[2], 1, 4, 3, 3)
    params = Im2col(2, 1, 1, 1, 1, 1, 1)
    return probes.node("IM2COL_BACK", "f32", (2, 4, 9, 20), gradient, kernel, params=params)


def _make_conv_2d(channels: int, kernels: int) -> Make:
    """A node of rows of 6 elements of each channel."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 2, channels, 9, 20), probes.normal(rng, types[1], kernels, channels, 3, 2)
        params = Conv2d(s0=2, s1=1, p0=1, p1=0, d0=1, d1=2)
        return probes.node("CONV_2D", "f32", (2, kernels, 5, 11), kernel, x, params=params)

    return make


def _make_conv_3d(channels: int, kernels: int) -> Make:
    """A node of rows of 12 elements of each channel."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x = probes.normal(rng, "f32", 2 * channels, 5, 6, 7)
        kernel = probes.normal(rng, types[1], channels * kernels, 2, 3, 2)
        params = Conv3d(1, 2, 1, 1, 1, 0, 1, 1, 2, channels, 2, kernels)
        return probes.node("CONV_3D", "f32", (2 * kernels, 3, 3, 8), kernel, x, params=params)

    return make


def _make_conv_2d_dw(size: int, channels: int, *, together: bool) -> Make:
    """together: the channels of a pixel."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 2, channels, 9, 20), probes.normal(rng, types[1], channels, 1, size, size)
        shape, params = (2, channels, 10 - size, (20 + 2 - size) // 2 + 1), Conv2d(2, 1, 1, 0, 1, 1)
        of = probes.node("CONV_2D_DW", "f32", shape, kernel, x, params=params)
        if not together:
            return of
        (kernel, x), dst = (_by_pixels(each) for each in (kernel, x)), _by_pixels(of.dst)
        planes = replace(kernel, ne=(size, size, 1, channels), nb=(*kernel.nb[:2], kernel.nb[0], kernel.nb[2]))
        return replace(of, dst=dst, src=(planes, x))

    return make


def _by_pixels(x: Tensor) -> Tensor:
    """A tensor with its dimension 2 first in memory; the kernel of CONV_2D_DW with its dimension 3 there."""
    if x.ne[2] == 1:
        x = replace(x, ne=(x.ne[0], x.ne[1], x.ne[3], 1), nb=(x.nb[0], x.nb[1], x.nb[3], x.nb[3] * x.ne[3]))
    other = Tensor.of(np.ascontiguousarray(np.moveaxis(x.view(), 1, 3)), x.type)
    nb0, nb1, nb2, nb3 = other.nb
    return replace(other, ne=(*x.ne[:3], other.ne[3]), nb=(nb1, nb2, nb0, nb3))


conv_2d.nodes(_make_conv_2d(5, 6), _make_conv_2d(16, 8))
conv_3d.nodes(_make_conv_3d(5, 6), _make_conv_3d(16, 8))
conv_2d_dw.nodes(_make_conv_2d_dw(3, 6, together=False), _make_conv_2d_dw(3, 37, together=True))

conv_2d.probes(lambda: probes.of_channels(lambda n: _make_conv_2d(n, 5 + n % 4), 6))
conv_3d.probes(lambda: probes.of_channels(lambda n: _make_conv_3d(n, 5 + n % 4), 12))


@conv_2d_dw.probes
def _of_kernels() -> Iterator[Probe]:
    sizes, channels, orders = (1, 2, 3, 5), (3, 16, 37), (False, True)
    makes = [_make_conv_2d_dw(size, n, together=order) for size in sizes for n in channels for order in orders]
    for type in ("f32", "f16"):
        yield Probe(f"of {type}", tuple(makes), ("f32", type, "f32"))
