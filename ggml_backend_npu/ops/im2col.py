"""The elements under each window of a convolution, as rows that a matrix product multiplies with its kernels: IM2COL,
IM2COL_3D. And the way back: IM2COL_BACK."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.windows import Moves2d, Moves3d, Two, Windows, find_offsets, in_a_plane, in_space, see
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import i32
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows
from quant import type_names
from quant.kernels.jit import array_at, compiled
from quant.kernels.late import types
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work
from quant.runs import F16, narrow_run

_BOUND = 1e-12  # a few roundings, one after the other


@dataclass(frozen=True)
class Im2col(Moves2d):
    """op_params of IM2COL and IM2COL_BACK: ggml_im2col. is_2d: whether there are two dimensions."""

    is_2d: i32


@dataclass(frozen=True)
class Im2col3d(Moves3d):
    """op_params of IM2COL_3D: ggml_im2col_3d. IC: the number of channels."""

    IC: i32


# IM2COL, IM2COL_3D


def _im2col_windows(dst: Tensor, kernel: Tensor, x: Tensor, p: Im2col | Im2col3d) -> Windows:
    if isinstance(p, Im2col3d):
        address, shape, nb = in_space(x, p.IC)
        places = dst.ne[3] // max(1, shape[0]), dst.ne[2], dst.ne[1]
        return Windows(address, shape, nb, (kernel.ne[2], kernel.ne[1], kernel.ne[0]), places, *p.moves)
    if p.is_2d:
        size, places = (1, kernel.ne[1], kernel.ne[0]), (1, dst.ne[2], dst.ne[1])
        return Windows(*in_a_plane(x), size, places, *p.moves)
    shape, nb = (x.ne[2], x.ne[1], 1, 1, x.ne[0]), (x.nb[2], x.nb[1], 0, 0, x.nb[0])
    return Windows(x.address, shape, nb, (1, 1, kernel.ne[0]), (1, 1, dst.ne[1]), *p.moves)


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
    if isinstance(params, Im2col) and params.is_2d and x.ne[1] > 1 and x.nb[1] != x.ne[0] * x.nb[0]:
        return f"x rows lie apart: nb {x.nb}; ggml's CPU reads them side by side"
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
    """dst[n, oh, ow, (c, kh, kw)] = x[n, c, oh * s1 + kh * d1 - p1, ow * s0 + kw * d0 - p0], 0 outside x.

    x (width, height, channels, images) and kernel (width, height, ...), of which only the size is used; in one
    dimension x (width, channels, images). dst (channels * kh * kw, ow, oh, images). Equals ggml_compute_forward_im2col.
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
    """As IM2COL, in three dimensions: dst[(n, od), oh, ow, (c, kd, kh, kw)] of x[(n, c), id, ih, iw], 0 outside x.

    x (width, height, depth, channels * images), of which an incomplete last image is left out, kernel (width, height,
    depth, ...), of which only the size is used. Equals ggml_compute_forward_im2col_3d.
    """
    _define_im2col(dst, kernel, x, params)


class Rows(NamedTuple):
    """Rows of the elements that the places of all images see, to an address.

    n_places, n_seen  places of an image; elements of a row
    is_half  the images are float16; rounds: they are float32, and the rows float16
    """

    windows: Windows
    n_places: int
    n_seen: int
    dst: int
    is_half: int
    rounds: int


@compiled
def rows_of_places(p, begin, end, scratch):
    """A unit is one place of one image: what it sees, as a row of float32 or float16, or rounded to float16."""
    of = record_at(p, Rows)
    windows, dst, n = of.windows, of.dst, of.n_seen
    offsets, row = scratch, scratch + 8 * n
    find_offsets(windows, offsets)
    for i in range(begin, end):
        image, place = i // of.n_places, i % of.n_places
        if of.rounds:
            see(windows, offsets, types.uint32, image, place, row)
            narrow_run(row, types.int64(F16), dst + 2 * i * n, types.int64(2), n)
        elif of.is_half:
            see(windows, offsets, types.uint16, image, place, dst + 2 * i * n)
        else:
            see(windows, offsets, types.uint32, image, place, dst + 4 * i * n)
    return 0


def _bind_im2col(dst: Tensor, kernel: Tensor, x: Tensor, params: Im2col | Im2col3d) -> Call:
    w = _im2col_windows(dst, kernel, x, params)
    of = Rows(w, w.n_places, w.n_seen, dst.address, x.type == "f16", x.type != dst.type)
    n_units = w.n_images * w.n_places
    return Job(Work(rows_of_places, of, n_units, 2 * dst.nbytes, scratch=12 * w.n_seen, keep=(dst, x)))


im2col.compiled(_bind_im2col)
im2col_3d.compiled(_bind_im2col)


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
    """dst[n, c, ih, iw] = sum of gradient[n, oh, ow, (c, kh, kw)] over all that IM2COL took from there, ordered by kh
    and kw.

    gradient has the shape of IM2COL's dst, dst that of its x. Equals ggml_compute_forward_im2col_back_f32.
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


class Gradients(NamedTuple):
    """Images of a size at dst, and the gradient of the rows that IM2COL took from them, at addresses.

    kernel, places  their sizes; step, pad, apart: strides, paddings, dilations
    """

    gradient: int
    dst: int
    n_channels: int
    size: Two
    places: Two
    kernel: Two
    step: Two
    pad: Two
    apart: Two


@compiled
def gradients(p, begin, end, scratch):
    """A unit is a plane: one channel of one image. Its elements add their terms in the order of the kernel's rows and
    columns."""
    of = record_at(p, Gradients)
    n_c, (n_y, n_x), (oy, ox), (ky, kx) = of.n_channels, of.size, of.places, of.kernel
    (s1, s0), (p1, p0), (d1, d0) = of.step, of.pad, of.apart
    size = ky * kx
    for unit in range(begin, end):
        image, channel = unit // n_c, unit % n_c
        source = of.gradient + 4 * (image * oy * ox * n_c + channel) * size
        for row in range(n_y):
            y = array_at(of.dst + 4 * (unit * n_y + row) * n_x, types.float32, n_x)
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
    ky, oy, step, pad, apart = kernel.ne[1], gradient.ne[2], (q.s1, q.s0), (q.p1, q.p0), (q.d1, q.d0)
    if not q.is_2d:
        height, channels, n_images = 1, *dst.ne[1:3]
        ky, oy, step, pad, apart = 1, 1, (1, q.s0), (0, q.p0), (1, q.d0)
    of = Gradients(
        gradient=gradient.address,
        dst=dst.address,
        n_channels=channels,
        size=(height, width),
        places=(oy, gradient.ne[1]),
        kernel=(ky, kernel.ne[0]),
        step=step,
        pad=pad,
        apart=apart,
    )
    return Job(Work(gradients, of, channels * n_images, 2 * gradient.nbytes, keep=(dst, gradient)))


# what IM2COL_BACK is measured by


@im2col_back.nodes
def _make_im2col_back(rng: probes.Rng, types: Types) -> Node:
    gradient, kernel = probes.normal(rng, "f32", 2, 9, 10, 36), probes.normal(rng, types[2], 1, 4, 3, 3)
    params = Im2col(2, 1, 1, 1, 1, 1, 1)
    return probes.node("IM2COL_BACK", "f32", (2, 4, 9, 20), gradient, kernel, params=params)
