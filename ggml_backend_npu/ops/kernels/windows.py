"""The windows of a convolution, which move over images, for the ops in `ops.im2col` and `ops.convolution`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.registry.params import Params, i32
from quant.kernels.jit import array_at, inlined
from quant.kernels.late import types

Two = tuple[int, int]  # of height and width
Three = tuple[int, int, int]  # of depth, height and width
Five = tuple[int, int, int, int, int]  # of images, channels and these


class Windows(NamedTuple):
    """Windows that move over images: each place sees the elements under its window.

    address  of the images
    shape    images, channels, depth, height, width; nb: their strides in bytes
    size     of a window; places: how many there are; step, pad, apart: strides, paddings, dilations
    """

    address: int
    shape: Five
    nb: Five
    size: Three
    places: Three
    step: Three
    pad: Three
    apart: Three

    @property
    def n_seen(self) -> int:
        """Elements that a place sees."""
        return self.shape[1] * prod(self.size)

    @property
    def n_places(self) -> int:
        """Places of an image."""
        return prod(self.places)

    @property
    def n_images(self) -> int:
        """Number of images."""
        return self.shape[0]

    def seen(self, x: NDArray[Any]) -> NDArray[Any]:
        """What all places see, (images, channels, *places, *size), for images in any type; 0 outside them."""
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


@dataclass(frozen=True)
class Moves2d(Params):
    """How a window moves over an image: strides s, paddings p and dilations d of columns (0) and rows (1); op_params of
    ggml_conv_2d_direct, and the first of others."""

    s0: i32
    s1: i32
    p0: i32
    p1: i32
    d0: i32
    d1: i32

    @property
    def moves(self) -> tuple[Three, Three, Three]:
        """Strides, paddings and dilations, for depth, height and width."""
        return (1, self.s1, self.s0), (0, self.p1, self.p0), (1, self.d1, self.d0)


@dataclass(frozen=True)
class Moves3d(Params):
    """As `Moves2d`, with a third dimension (2); the first op_params of ggml_conv_3d_direct and ggml_im2col_3d."""

    s0: i32
    s1: i32
    s2: i32
    p0: i32
    p1: i32
    p2: i32
    d0: i32
    d1: i32
    d2: i32

    @property
    def moves(self) -> tuple[Three, Three, Three]:
        """Strides, paddings and dilations, for depth, height and width."""
        return (self.s2, self.s1, self.s0), (self.p2, self.p1, self.p0), (self.d2, self.d1, self.d0)


def in_a_plane(x: Tensor) -> tuple[int, Five, Five]:
    """Images of two dimensions: address, shape and strides of `Windows`."""
    return x.address, (x.ne[3], x.ne[2], 1, x.ne[1], x.ne[0]), (x.nb[3], x.nb[2], 0, x.nb[1], x.nb[0])


def in_space(x: Tensor, n_channels: int) -> tuple[int, Five, Five]:
    """Images of three dimensions, whose channels follow each other: address, shape and strides of `Windows`."""
    nb = n_channels * x.nb[3], x.nb[3], x.nb[2], x.nb[1], x.nb[0]
    return x.address, (x.ne[3] // n_channels, n_channels, x.ne[2], x.ne[1], x.ne[0]), nb


@inlined
def find_offsets(windows, to):
    """Writes the offsets of the elements under a window from the first one, int64, to an address."""
    _, nb_c, nb_z, nb_y, nb_x = windows.nb
    kz, ky, kx = windows.size
    dz, dy, dx = windows.apart
    n_c = windows.shape[1]
    found, i = array_at(to, types.int64, n_c * kz * ky * kx), 0
    for c in range(n_c):
        for z in range(kz):
            for y in range(ky):
                for x in range(kx):
                    found[i] = c * nb_c + z * dz * nb_z + y * dy * nb_y + x * dx * nb_x
                    i += 1


@inlined
def see(windows, offsets, bits, image, place, to):
    """Writes what a place of an image sees, elements of uint32 or uint16, as a row to an address.

    offsets  the address of what `find_offsets` wrote
    """
    _, n_c, n_z, n_y, n_x = windows.shape
    nb_n, nb_c, nb_z, nb_y, nb_x = windows.nb
    kz, ky, kx = windows.size
    _, oy, ox = windows.places
    sz, sy, sx = windows.step
    pz, py, px = windows.pad
    dz, dy, dx = windows.apart
    z0, y0, x0 = place // (oy * ox) * sz - pz, place // ox % oy * sy - py, place % ox * sx - px
    first, n = windows.address + image * nb_n + z0 * nb_z + y0 * nb_y + x0 * nb_x, n_c * kz * ky * kx
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
