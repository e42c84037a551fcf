"""Cases of the compiled kernels that models of images and sound need."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace

import numpy as np
from kit.kernel_cases import Array, Case, floats, node, positive, sevens

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import (
    OWN,
    convolution,
    depthwise,
    im2col,
    norms,
    patches,
    pooling,
    transposed,
    upscale,
    vision,
)
from ggml_backend_npu.ops.kernels import strided

IN_PLANE = struct.pack("7i", *[1] * 7)


def convolved(op: str, dst: tuple[int, ...], kernel: tuple[int, ...], x: tuple[int, ...], params: bytes) -> list[Array]:
    """Of float32, and of kernels of float16."""
    found = []
    for type in (np.float32, np.float16):
        sources = tuple(Tensor.of(array) for array in (positive(*kernel).astype(type), positive(*x, seed=1)))
        found.append(np.zeros(dst, np.float32))
        OWN[op].bind(Node(op, Tensor.of(found[-1]), sources, params), replace(codecs.bound(), matmul="exact"))()
    return found


def pooled(op: str, dst: tuple[int, ...], x: tuple[int, ...], *windows: tuple[int, ...]) -> list[Array]:
    """The maximum and the mean, of float32 and float16, under each window."""
    return [
        array
        for kind, window, type in itertools.product(range(2), windows, (np.float32, np.float16))
        for array in node(
            op,
            np.zeros(dst, np.float32),
            floats(*x).astype(type),
            params=struct.pack(f"{1 + len(window)}i", kind, *window),
        )
    ]


def padded() -> list[Array]:
    """Larger and smaller, of no element of x too, with zeros and with what comes around more than once."""
    found, x = [], floats(2, 7, 3, 5).swapaxes(1, 3)
    for edges in ((2, 1, 0, 3, 1, 9, 0, 2), (-2, 3, -1, 4, 1, -1, 2, 0), (-9, 12, 0, 0, 0, 0, 0, 0)):
        shape = [n + sum(edges[6 - 2 * i : 8 - 2 * i]) for i, n in enumerate(x.shape)]
        for circular in range(2):
            found += node("PAD", sevens(*shape), x, params=struct.pack("9i", *edges, circular))
    return found


OF_IMAGES = {
    "IM2COL": Case(
        lambda: [
            *node("IM2COL", np.zeros((2, 9, 8, 36), np.float16), floats(4, 3, 3), floats(2, 4, 9, 8), params=IN_PLANE),
            *node("IM2COL", np.zeros((2, 9, 8, 36), np.float32), floats(4, 3, 3), floats(2, 4, 9, 8), params=IN_PLANE),
        ],
        (im2col.rows_of_places,),
    ),
    "IM2COL_3D": Case(
        lambda: node(
            "IM2COL_3D",
            np.zeros((6, 3, 4, 108), np.float32),
            floats(4, 3, 3, 3),
            floats(8, 3, 3, 4),
            params=struct.pack("10i", *[1] * 9, 4),
        ),
        (im2col.rows_of_places,),
    ),
    "CONV_2D": Case(
        lambda: convolved("CONV_2D", (2, 12, 9, 8), (12, 16, 3, 3), (2, 16, 9, 8), IN_PLANE),
        (convolution.convolution,),
        ulp=32,
    ),
    "CONV_3D": Case(
        lambda: convolved("CONV_3D", (10, 3, 4, 5), (15, 2, 3, 3), (6, 2, 4, 5), struct.pack("12i", *[1] * 9, 3, 2, 5)),
        (convolution.convolution,),
        ulp=32,
    ),
    "CONV_2D_DW": Case(
        lambda: convolved("CONV_2D_DW", (2, 6, 9, 8), (6, 1, 3, 3), (2, 6, 9, 8), IN_PLANE),
        (depthwise.depthwise,),
        ulp=8,
    ),
    "CONV_TRANSPOSE_1D": Case(
        lambda: convolved("CONV_TRANSPOSE_1D", (7, 41), (70, 7, 3), (70, 20), struct.pack("3i", 2, 0, 1)),
        (strided.transpose, transposed.transposed_convolution),
        ulp=32,
    ),
    "CONV_TRANSPOSE_2D": Case(
        lambda: convolved("CONV_TRANSPOSE_2D", (2, 7, 21, 9), (70, 7, 3, 3), (2, 70, 10, 4), struct.pack("i", 2)),
        (strided.transpose, transposed.transposed_convolution),
        ulp=32,
    ),
    "COL2IM_1D": Case(
        lambda: node("COL2IM_1D", np.zeros((3, 4999), np.float32), floats(2500, 9), params=struct.pack("3i", 2, 3, 1)),
        (transposed.signal,),
    ),
    "GROUP_NORM": Case(
        lambda: node(
            "GROUP_NORM",
            np.zeros((3, 10, 7, 33), np.float32),
            floats(3, 10, 14, 33)[:, :, ::2],
            params=struct.pack("if", 4, 1e-5),
        ),
        (norms.normalise_groups,),
    ),
    "POOL_1D": Case(lambda: pooled("POOL_1D", (9, 30), (9, 60), (3, 2, 1), (9, 1, 0), (2, 3, 7)), (pooling.pool_rows,)),
    "POOL_2D": Case(
        lambda: pooled(
            "POOL_2D", (2, 3, 9, 20), (2, 3, 10, 39), (3, 2, 2, 1, 1, 0), (1, 9, 1, 3, 0, 8), (5, 5, 3, 2, 9, 2)
        ),
        (pooling.pool_rows,),
    ),
    "UPSCALE": Case(
        lambda: [
            array
            for mode in (0, 1, 2, 257, 513)
            for array in node(
                "UPSCALE", np.zeros((2, 19, 33), np.float32), positive(2, 7, 40), params=struct.pack("i", mode)
            )
        ],
        (upscale.interpolate,),
        ulp=256,
    ),
    "PAD": Case(padded, (patches.pad_rows, patches.roll_rows)),
    "WIN_PART": Case(
        lambda: node("WIN_PART", sevens(9, 4, 4, 5), floats(11, 9, 5), params=struct.pack("3i", 3, 3, 4)),
        (vision.move_windows,),
    ),
    "WIN_UNPART": Case(
        lambda: node("WIN_UNPART", sevens(11, 9, 5), floats(10, 4, 4, 5), params=struct.pack("i", 4)),
        (vision.move_windows,),
    ),
    "GET_REL_POS": Case(
        lambda: node("GET_REL_POS", sevens(19, 19, 7, dtype=np.float16), floats(37, 7).astype(np.float16)),
        (vision.rel_pos,),
    ),
    "PAD_REFLECT_1D": Case(
        lambda: node("PAD_REFLECT_1D", np.zeros((7, 49), np.float32), floats(7, 40), params=struct.pack("2i", 5, 4)),
        (patches.reflect_rows,),
    ),
    "TIMESTEP_EMBEDDING": Case(
        lambda: node(
            "TIMESTEP_EMBEDDING", np.zeros((7, 41), np.float32), 99 * positive(7), params=struct.pack("2i", 41, 99)
        ),
        (vision.embed_timesteps,),
    ),
}
