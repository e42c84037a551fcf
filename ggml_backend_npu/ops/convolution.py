"""Convolutions: CONV_2D and CONV_3D. Those with one kernel per channel are in `ops.depthwise`.

ggml's CPU computes them as a matrix product: the elements under a window are a row, in the type of the kernels, and
rows are multiplied as in MUL_MAT. GGML_NPU_MATMUL says how that is done here: exact, in the order of ggml's sums, or
fast, by BLAS, with rows that are not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.functions import wide
from ggml_backend_npu.ops.kernels.products import fits_blocks, multiply_by_blas
from ggml_backend_npu.ops.kernels.windows import Moves2d, Moves3d, Windows, find_offsets, in_a_plane, in_space, see
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import i32
from ggml_backend_npu.registry.shapes import gaps
from quant.kernels.jit import LINE, array_at, compiled, f16_to_f32
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.orders import (
    GROUP,
    HALVES,
    dots_f16,
    dots_f32,
    dots_in_halves,
    multiply_f32,
    multiply_in_halves,
)
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work
from quant.runs import F16, f32_to_f16, widen_run

TYPES = [("f32", kernel, "f32") for kernel in ("f32", "f16")]

_WORK_BYTES = 16 << 20  # GGML_IM2COL_WORK_SIZE
_TILE_BYTES = 1 << 18  # of what places see, that is multiplied with all kernels
_PARTS, _LEAST_KERNELS = 4, 128  # if there are few tiles: in how many parts kernels are cut, and how small at least


@dataclass(frozen=True)
class Conv3d(Moves3d):
    """op_params of CONV_3D: ggml_conv_3d_direct. Numbers of channels, images and kernels."""

    c: i32
    n: i32
    oc: i32


def _conv_windows(dst: Tensor, kernel: Tensor, x: Tensor, p: Moves2d | Conv3d) -> Windows:
    if isinstance(p, Conv3d):
        size, places = (kernel.ne[2], kernel.ne[1], kernel.ne[0]), (dst.ne[2], dst.ne[1], dst.ne[0])
        return Windows(*in_space(x, p.c), size, places, *p.moves)
    size, places = (1, kernel.ne[1], kernel.ne[0]), (1, dst.ne[1], dst.ne[0])
    return Windows(*in_a_plane(x), size, places, *p.moves)


def _refuse_conv(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d | Conv3d) -> str | None:
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


def _n_kernels(kernel: Tensor, p: Moves2d | Conv3d) -> int:
    return p.oc if isinstance(p, Conv3d) else kernel.ne[3]


def _sgemm(numerics: Numerics) -> int:
    """Address of cblas_sgemm; 0 if ggml's own order is wanted."""
    return numerics.sgemm if numerics.matmul == "fast" else 0


def _define_conv(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d | Conv3d, numerics: Numerics) -> None:
    w = _conv_windows(dst, kernel, x, params)
    rounded = convert(x.view(), x.type, "f16") if kernel.type == "f16" and not _sgemm(numerics) else x.view()
    kernels = wide(kernel).reshape(_n_kernels(kernel, params), w.n_seen)
    y = dst.view().reshape(w.n_images, len(kernels), *w.places)
    with np.errstate(all="ignore"):
        for n, seen in enumerate(w.seen(rounded.astype(y.dtype))):
            for oz, oy in np.ndindex(*w.places[:2]):
                rows = np.moveaxis(seen[:, oz, oy], 1, -1).reshape(w.n_seen, w.places[2])
                y[n, :, oz, oy] = kernels @ rows


@op(
    "CONV_2D",
    types=TYPES,
    refuse=_refuse_conv,
    params=Moves2d,
    bound=BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_2d_direct": "ctt iiiiii"},
)
def conv_2d(dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d, numerics: Numerics = PLAIN) -> None:
    """dst[n, oc, oh, ow] = sum over c, kh, kw of kernel[oc, c, kh, kw] * x[n, c, oh * s1 + kh * d1 - p1, ...].

    x (width, height, channels, images), kernel (width, height, channels, kernels), dst (width, height, kernels,
    images). Equals ggml_compute_forward_conv_2d but for the order of sums.
    """
    _define_conv(dst, kernel, x, params, numerics)


@op(
    "CONV_3D",
    types=TYPES,
    refuse=_refuse_conv,
    params=Conv3d,
    bound=BOUND,
    wide=True,
    products=True,
    built_by={"ggml_conv_3d_direct": "ctt iiiiiiiiiiii"},
)
def conv_3d(dst: Tensor, kernel: Tensor, x: Tensor, params: Conv3d, numerics: Numerics = PLAIN) -> None:
    """As CONV_2D, in three dimensions: x (width, height, depth, channels * images), kernel (width, height, depth,
    channels * kernels), dst (width, height, depth, kernels * images).

    Equals ggml_compute_forward_conv_3d but for the order of sums.
    """
    _define_conv(dst, kernel, x, params, numerics)


_BY_DOTS, _IN_BLOCKS, _BY_BLAS = range(3)


class Scratch(NamedTuple):
    """Offsets in bytes of the parts of scratch that follow the rows of a tile, and the end of the last one.

    results     of a tile, one row per place
    kernels     converted to float32
    offsets     of the elements under a window
    x, y        addresses of the rows and of their results
    block       what `multiply_f32` is told of its block
    """

    results: int
    kernels: int
    offsets: int
    x: int
    y: int
    block: int
    end: int


def _scratch(tile: int, k: int, some_kernels: int, widened: int) -> Scratch:
    """Scratch in which each part has whole cache lines."""
    sizes = 4 * tile * k, 4 * tile * some_kernels, 4 * widened * k, 8 * k, 8 * tile, 8 * tile, 8 * 3
    return Scratch(*accumulate(-(-size // LINE) * LINE for size in sizes))


class Convolution(NamedTuple):
    """Kernels of k elements each, at an address, times the rows that the places of images see.

    some_kernels, tile  kernels and places of a unit
    is_half             the kernels are float16; widened: how many are converted to float32 at a time
    in_halves           their products are added as float16
    way                 one of _BY_DOTS, _IN_BLOCKS, _BY_BLAS; sgemm: the address of cblas_sgemm
    """

    windows: Windows
    n_images: int
    n_places: int
    tile: int
    kernels: int
    n_kernels: int
    some_kernels: int
    k: int
    is_half: int
    in_halves: int
    widened: int
    dst: int
    way: int
    sgemm: int
    scratch: Scratch


@compiled
def convolution(p, begin, end, columns):
    """A unit is some kernels times a tile of places of one image; kernels are the outermost index, then images."""
    of = record_at(p, Convolution)
    n_places, tile, some_kernels, k, is_half, way = of.n_places, of.tile, of.some_kernels, of.k, of.is_half, of.way
    out, widened, offsets = columns + of.scratch.results, columns + of.scratch.kernels, columns + of.scratch.offsets
    x_at, y_at, block_at = columns + of.scratch.x, columns + of.scratch.y, columns + of.scratch.block
    x, y = array_at(x_at, types.int64, tile), array_at(y_at, types.int64, tile)
    for i in range(tile):
        x[i] = columns + 4 * i * k
        y[i] = out + 4 * i * some_kernels
    line, block = k * (2 if is_half else 4), array_at(block_at, types.int64, 3)
    block[0], block[1] = (line, k // HALVES) if of.in_halves else (4 * k, k // LANES)
    find_offsets(of.windows, offsets)
    tiles = -(-n_places // tile)
    per_kernels = of.n_images * tiles
    for unit in range(begin, end):
        first_kernel, image = unit // per_kernels * some_kernels, unit % per_kernels // tiles
        first = unit % tiles * tile
        count, n_rows = min(tile, n_places - first), min(some_kernels, of.n_kernels - first_kernel)
        rows = of.kernels + first_kernel * line
        to = of.dst + 4 * ((image * of.n_kernels + first_kernel) * n_places + first)
        for i in range(count):
            see(of.windows, offsets, types.uint32, image, first + i, x[i])
            if is_half and way != _BY_BLAS:
                column = array_at(x[i], types.float32, k)
                for j in range(k):
                    column[j] = f16_to_f32(f32_to_f16(column[j]))
        if way == _BY_BLAS:
            if not is_half:
                multiply_by_blas(of.sgemm, n_rows, count, k, rows, k, columns, k, to, n_places)
                continue
            for r in range(0, n_rows, of.widened):
                some, at = min(of.widened, n_rows - r), to + 4 * r * n_places
                widen_run(types.int64(F16), rows + r * line, types.int64(2), widened, some * k)
                multiply_by_blas(of.sgemm, some, count, k, widened, k, columns, k, at, n_places)
            continue
        for r in range(0, n_rows, GROUP):
            row, some = rows + r * line, min(GROUP, n_rows - r)
            if way == _IN_BLOCKS:
                block[2] = 4 * r
                if of.in_halves:
                    multiply_in_halves(row, block_at, x_at, y_at, count)
                    continue
                if is_half:
                    widen_run(types.int64(F16), row, types.int64(2), widened, GROUP * k)
                    row = widened
                multiply_f32(row, block_at, x_at, y_at, count)
            else:
                for i in range(count):
                    if of.in_halves:
                        dots_in_halves(row, line, x[i], k, y[i] + 4 * r, some)
                    elif is_half:
                        dots_f16(row, line, x[i], k, y[i] + 4 * r, some)
                    else:
                        dots_f32(row, line, x[i], k, y[i] + 4 * r, some)
        for c in range(n_rows):
            found = array_at(to + 4 * c * n_places, types.float32, count)
            made = array_at(out + 4 * c, types.float32, tile * some_kernels)
            for i in range(count):
                found[i] = made[i * some_kernels]
    return 0


def _bind_convolution(
    dst: Tensor, kernel: Tensor, x: Tensor, params: Moves2d | Conv3d, numerics: Numerics
) -> Call | None:
    if not dst.is_contiguous() or not dst.n_elements:
        return None
    w = _conv_windows(dst, kernel, x, params)
    k, n_kernels = w.n_seen, _n_kernels(kernel, params)
    as_blocks = fits_blocks(kernel.type, k, n_kernels, w.n_images * w.n_places, numerics)
    in_halves = numerics.blocks_in_halves if as_blocks else numerics.dots_in_halves
    sgemm = _sgemm(numerics) if k else 0
    tile = min(w.n_places, max(12, (4 if sgemm else 1) * _TILE_BYTES // max(1, 48 * k) * 12))
    n_tiles = w.n_images * -(-w.n_places // tile)
    parts = max(1, min(_PARTS // n_tiles, n_kernels // _LEAST_KERNELS))
    some_kernels = -(-n_kernels // (parts * GROUP)) * GROUP
    widened = max(GROUP, _TILE_BYTES // max(1, k)) if sgemm else GROUP
    scratch = _scratch(tile, k, some_kernels, widened)
    of = Convolution(
        windows=w,
        n_images=w.n_images,
        n_places=w.n_places,
        tile=tile,
        kernels=kernel.address,
        n_kernels=n_kernels,
        some_kernels=some_kernels,
        k=k,
        is_half=kernel.type == "f16",
        in_halves=kernel.type == "f16" and in_halves,
        widened=widened,
        dst=dst.address,
        way=_BY_BLAS if sgemm else _IN_BLOCKS if as_blocks else _BY_DOTS,
        sgemm=sgemm,
        scratch=scratch,
    )
    n_units, n_bytes = n_tiles * -(-n_kernels // some_kernels), dst.n_elements * (4 + k // 2)
    return Job(Work(convolution, of, n_units, n_bytes, scratch=scratch.end, keep=(dst, kernel, x)))


conv_2d.compiled(_bind_convolution)
conv_3d.compiled(_bind_convolution)


# what they are measured by


def _make_conv_2d(channels: int, kernels: int) -> Make:
    """A node whose rows have 6 elements per channel."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x, kernel = probes.normal(rng, "f32", 2, channels, 9, 20), probes.normal(rng, types[1], kernels, channels, 3, 2)
        params = Moves2d(s0=2, s1=1, p0=1, p1=0, d0=1, d1=2)
        return probes.node("CONV_2D", "f32", (2, kernels, 5, 11), kernel, x, params=params)

    return make


def _make_conv_3d(channels: int, kernels: int) -> Make:
    """A node whose rows have 12 elements per channel."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x = probes.normal(rng, "f32", 2 * channels, 5, 6, 7)
        kernel = probes.normal(rng, types[1], channels * kernels, 2, 3, 2)
        params = Conv3d(1, 2, 1, 1, 1, 0, 1, 1, 2, channels, 2, kernels)
        return probes.node("CONV_3D", "f32", (2 * kernels, 3, 3, 8), kernel, x, params=params)

    return make


conv_2d.nodes(_make_conv_2d(5, 6), _make_conv_2d(16, 8))
conv_3d.nodes(_make_conv_3d(5, 6), _make_conv_3d(16, 8))

conv_2d.probes(lambda: probes.of_channels(lambda n: _make_conv_2d(n, 5 + n % 4), 6))
conv_3d.probes(lambda: probes.of_channels(lambda n: _make_conv_3d(n, 5 + n % 4), 12))
