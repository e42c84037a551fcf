"""Every compiled kernel beside its definition: one that nobody compares fails here."""

from __future__ import annotations

import importlib
import pkgutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import assert_same_bytes, in_pieces, recorded_works, special_floats

import ggml_backend_npu
import quant
from ggml_backend_npu import Node, Op, Tensor, default_backend
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.documents.infiniop import TensorDescriptor, TopKSoftmax
from ggml_backend_npu.documents.rwkv import token_shift
from ggml_backend_npu.ops import (
    OWN,
    cells,
    convolution,
    delta_net,
    depthwise,
    elements,
    elementwise,
    gradients,
    groups,
    hadamard,
    im2col,
    losses,
    mamba,
    norms,
    optimisers,
    outer,
    patches,
    pooling,
    products,
    rope,
    routing,
    rwkv,
    softmax,
    strided,
    sums,
    tiles,
    transposed,
    triangles,
    unary,
    upscale,
    vision,
)
from ggml_backend_npu.ops import token_shift as shifts
from quant import runs
from quant.kernels import threads
from quant.kernels.jit import CFunction, compiled

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """run  gives outputs, by whatever engine is in force
    kernels  that it has run
    define   gives the same without a kernel; None: `run` does, by the reference engine
    ulp      of a float32 output
    """

    run: Callable[[], list[Array]]
    kernels: tuple[CFunction, ...]
    define: Callable[[], list[Array]] | None = None
    ulp: int = 0


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> Array:
    """Below 1, so that sums of products cancel nothing: every order of them is within some ulp."""
    return np.random.default_rng(seed).random(shape, np.float32)


def node(op: str, dst: Array, *src: Array, params: bytes = b"", types: tuple[str | None, ...] = ()) -> list[Array]:
    """What the kernel of an op leaves in dst."""
    types = (*types, *(None,) * 8)
    sources = tuple(Tensor.of(array, type) for array, type in zip(src, types[1:], strict=False))
    default_backend().bind(Node(op, Tensor.of(dst, types[0]), sources, params))()
    return [dst]


WEIGHTS = quant.quantize(np.abs(floats(3, 70, 64)), "q8_0")


def scanned(n_decays: int) -> list[Array]:
    """SSM_SCAN of 2 sequences of 5 tokens, 4 heads of 3 rows of 33 elements, and 2 states of each."""
    s, x, dt = positive(3, 4, 3, 33), positive(2, 5, 4, 3, seed=1), positive(2, 5, 4, seed=2)
    b, c = (positive(2, 5, 2, 33, seed=seed) for seed in (3, 4))
    decays, ids = -positive(4, n_decays, seed=5), np.int32([2, 0])
    n_states = 1 if n_decays > 1 else 2
    dst = np.zeros(120 + n_states * 792, np.float32)
    return node("SSM_SCAN", dst, s, x, dt, decays, b, c, ids, params=struct.pack("i", n_states))


HEADS = [positive(6, 3, 40, seed=seed) for seed in range(6)]  # of 2 sequences of 3 tokens
HEADS_STATE, HEADS_DST = positive(2, 4800, seed=6), np.zeros((86, 120), np.float32)


def gated_delta_net() -> list[Array]:
    """Of 2 sequences of 5 tokens, 4 heads of 40, and 3 states of each."""
    q, k = (positive(2, 5, 2, 40, seed=seed) for seed in range(2))
    v, g, beta = (positive(2, 5, 4, n, seed=n) for n in (40, 40, 1))
    dst = np.zeros((10 + 240, 160), np.float32)
    sources = q, k / 1000, v + 1, -g, beta, positive(2, 4, 40, 40, seed=3)
    return node("GATED_DELTA_NET", dst, *sources, params=struct.pack("i", 3))


NUMBERS = {  # op_params, where they are not zeros
    "SCALE": struct.pack("2f", 0.5, 0.0),
    "CLAMP": struct.pack("2f", -0.5, 0.5),
    "SWIGLU_OAI": struct.pack("2i2f", 0, 0, 1.702, 1.0),
    "SWIGLU_CLAMP": struct.pack("2i2f", 0, 0, 0.0, 1.0),
    "LEAKY_RELU": struct.pack("f", 0.1),
    "XIELU": struct.pack("i4f", 0, 0.8, 0.9, 0.5, -1e-6),
    **{name: struct.pack("f", 1e-5) for name in ("NORM", "RMS_NORM", "L2_NORM")},
}
ROUNDED = {"SILU": 4, "SWIGLU": 4}  # in units in the last place; others are equal


def each(name: str) -> Case:
    """An op whose output is as large as its source: of numbers above 0, below which some leave little."""
    n_src = min(default_backend().ops[name].n_src, 2)

    def run() -> list[Array]:
        sources = [np.abs(floats(9, 1500)), floats(9, 1500, seed=1)][:n_src]
        return node(name, np.zeros((9, 1500), np.float32), *sources, params=NUMBERS.get(name, bytes(16)))

    kernel = norms.normalise if name.endswith("NORM") else tiles.compute
    return Case(run, (kernel,), ulp=ROUNDED.get(name, 0))


def rotated(op: str) -> list[Array]:
    """By each mode's kind of pairs; of float16 too. Differences of products, which may lose some bits."""
    found = []
    for mode, n_positions, type in ((0, 1, np.float32), (2, 1, np.float16), (24, 4, np.float32)):
        x, positions = floats(2, 7, 3, 64).astype(type), np.arange(7 * n_positions, dtype=np.int32)
        numbers = (0, 32, mode, 0, 512, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, 8, 8, 8, 8, 0)
        found += node(op, np.zeros_like(x), x, positions, params=struct.pack("5i6f5i", *numbers))
    return found


def attended() -> list[Array]:
    """Sums of float32 that lose nothing to cancellation, and of float16 whose weights are all 1 or next to nothing."""
    params = struct.pack("3fi", 0.125, 0.0, 0.0, 0)
    q, k, v = floats(6, 70, 64), floats(2, 90, 64, seed=1), np.abs(floats(2, 90, 24, seed=2))
    found = node("FLASH_ATTN_EXT", np.zeros((70, 6, 24), np.float32), q, k, v, params=params)
    q, k = np.ones((6, 1, 64), np.float32), np.zeros((2, 600, 64), np.float16)
    k[..., 0] = np.random.default_rng(3).integers(-3, 4, (2, 600)) * 400
    v = np.random.default_rng(4).integers(-3, 4, (2, 600, 24)).astype(np.float16)
    for n_cells in (600, 90):
        cells = k[:, :n_cells], v[:, :n_cells]
        found += node("FLASH_ATTN_EXT", np.zeros((1, 6, 24), np.float32), q, *cells, params=params)
    return found


IN_PLANE = struct.pack("7i", *[1] * 7)


def convolved(op: str, dst: tuple[int, ...], kernel: tuple[int, ...], x: tuple[int, ...], params: bytes) -> list[Array]:
    """Of float32, and of kernels of float16."""
    found = []
    for type in (np.float32, np.float16):
        sources = tuple(Tensor.of(array) for array in (positive(*kernel).astype(type), positive(*x, seed=1)))
        found.append(np.zeros(dst, np.float32))
        OWN[op].bind(Node(op, Tensor.of(found[-1]), sources, params), replace(codecs.bound(), matmul="exact"))()
    return found


def stepped(op: str) -> list[Array]:
    """What a step leaves of weights, and of the momenta of AdamW."""
    w, g, m = (floats(9, 70, seed=seed) for seed in range(3))
    if op == "OPT_STEP_SGD":
        return node(op, w, w, g, np.float32([0.03, 0.2]))
    v = positive(9, 70)
    return [*node(op, w, w, g, m, v, np.float32([0.03, 0.9, 0.97, 1e-3, 0.2, 1.3, 1.1])), m, v]


EACH = (
    *unary.FUNCTIONS, "GELU", "GELU_QUICK", "XIELU", "LEAKY_RELU", "ADD", "SUB", "MUL", "DIV", "SCALE", "CLAMP",
    "SILU_BACK", "REGLU", "GEGLU", "GEGLU_QUICK", "GEGLU_ERF", "SWIGLU", "SWIGLU_OAI", "SWIGLU_CLAMP", "NORM",
    "RMS_NORM", "L2_NORM",
)  # fmt: skip

OF_OPS = {
    **{name: each(name) for name in EACH},
    "GET_ROWS": Case(
        lambda: node(
            "GET_ROWS", np.zeros((5, 64), np.float32), floats(8, 64).astype(np.float16), np.int32([7, 0, 3, 3, 1])
        ),
        (strided.check_ids, strided.walk),
    ),
    "SET_ROWS": Case(
        lambda: node("SET_ROWS", np.zeros((9, 65), np.float16), floats(4, 65), np.array([7, 0, 3, 8])),
        (strided.check_ids, strided.walk),
    ),
    "CPY": Case(lambda: node("CPY", np.zeros((8, 68), np.uint8), floats(8, 64), types=("q8_0", None)), (strided.walk,)),
    "DUP": Case(
        lambda: node("DUP", np.zeros((3, 37), np.int16), np.arange(111, dtype=np.int16).reshape(3, 37)), (strided.walk,)
    ),
    "CONT": Case(lambda: node("CONT", np.zeros((70, 33), np.float32), floats(33, 70).T), (strided.transpose,)),
    "REPEAT": Case(
        lambda: node("REPEAT", np.zeros((4, 6, 2, 70), np.float32), floats(2, 3, 2, 35)[:, :, :1]), (strided.repeat,)
    ),
    "CONCAT": Case(
        lambda: node(
            "CONCAT",
            np.zeros((33, 70, 5), np.float32),
            floats(33, 70, 3),
            floats(33, 2, 70).swapaxes(1, 2),
            params=bytes(4),
        ),
        (strided.walk, strided.transpose),
    ),
    "SUM_ROWS": Case(
        lambda: node("SUM_ROWS", np.zeros((3, 5, 1), np.float32), floats(37, 5, 6).T[::2]), (routing.sum_of_rows,)
    ),
    "ARGSORT": Case(
        lambda: [
            *node("ARGSORT", np.zeros((5, 300), np.int32), floats(5, 300).round(1), params=struct.pack("i", 1)),
            *node("ARGSORT", np.zeros((3, 5), np.int32), special_floats()[:15].reshape(5, 3).T, params=bytes(4)),
        ],
        (routing.sort,),
    ),
    "TOP_K": Case(
        lambda: [
            *node("TOP_K", np.zeros((5, 7), np.int32), floats(5, 300).round(1)),
            *node("TOP_K", np.zeros((3, 1), np.int32), special_floats()[:15].reshape(5, 3).T),
        ],
        (routing.sort,),
    ),
    "FILL": Case(
        lambda: node(
            "FILL", np.zeros((3, 37), np.float16), floats(3, 37).astype(np.float16), params=struct.pack("2f", 0.1, 0)
        ),
        (tiles.compute,),
    ),
    "ARANGE": Case(
        lambda: node("ARANGE", np.zeros(70, np.float32), params=struct.pack("3f", -3.7, 3.3, 0.1)),
        (elementwise.progression,),
    ),
    "SOFT_MAX": Case(
        lambda: node("SOFT_MAX", np.zeros((6, 300), np.float32), floats(6, 300), params=struct.pack("2f", 0.5, 0.0)),
        (softmax.softmax,),
        ulp=6,
    ),
    "ADD_ID": Case(
        lambda: node(
            "ADD_ID",
            np.zeros((3, 2, 37), np.float32),
            floats(3, 2, 37),
            floats(5, 37, seed=1),
            np.int32([[4, 0], [1, 1], [2, 4]]),
        ),
        (strided.check_ids, tiles.compute),
    ),
    "MUL_MAT": Case(
        lambda: node(
            "MUL_MAT", np.zeros((3, 70), np.float32), WEIGHTS[0], np.abs(floats(3, 64)), types=("f32", "q8_0", None)
        ),
        (products.products,),
        ulp=8,
    ),
    "MUL_MAT_ID": Case(
        lambda: node(
            "MUL_MAT_ID",
            np.zeros((5, 2, 70), np.float32),
            WEIGHTS,
            np.abs(floats(5, 1, 64)),
            np.int32([[0, 1], [1, 2], [2, 0], [2, 1], [0, 2]]),
            types=("f32", "q8_0", None, None),
        ),
        (strided.check_ids, products.products),
        ulp=8,
    ),
    "SSM_CONV": Case(
        lambda: node("SSM_CONV", np.zeros((2, 7, 37), np.float32), positive(2, 37, 10), positive(37, 4, seed=1)),
        (mamba.convolve,),
        ulp=4,
    ),
    "SSM_SCAN": Case(lambda: scanned(33), (mamba.scan,), ulp=16),
    "RWKV_WKV6": Case(
        lambda: node("RWKV_WKV6", HEADS_DST.copy(), *HEADS[:3], positive(3, 40), HEADS[3], HEADS_STATE),
        (rwkv.gated_attention,),
        ulp=16,
    ),
    "RWKV_WKV7": Case(lambda: node("RWKV_WKV7", HEADS_DST.copy(), *HEADS, HEADS_STATE), (rwkv.wkv7,), ulp=16),
    "GATED_LINEAR_ATTN": Case(
        lambda: node("GATED_LINEAR_ATTN", HEADS_DST.copy(), *HEADS[:4], HEADS_STATE, params=struct.pack("f", 0.3)),
        (rwkv.gated_attention,),
        ulp=16,
    ),
    "SOLVE_TRI": Case(
        lambda: node(
            "SOLVE_TRI",
            np.zeros((3, 20, 9), np.float32),
            positive(3, 20, 20) - 1 + 20 * np.eye(20, dtype=np.float32),
            positive(3, 20, 9, seed=1),
        ),
        (triangles.solve,),
        ulp=16,
    ),
    "SET": Case(
        lambda: node(
            "SET",
            np.zeros((9, 40), np.float32),
            floats(9, 40),
            floats(4, 30, seed=1),
            params=struct.pack("5i", 320, 320, 320, 168, 0),
        ),
        (strided.walk,),
    ),
    "ACC": Case(
        lambda: node(
            "ACC",
            np.zeros((9, 40), np.float32),
            floats(9, 40),
            floats(4, 30, seed=1),
            params=struct.pack("5i", 320, 320, 320, 168, 0),
        ),
        (strided.walk, tiles.compute),
    ),
    "ADD1": Case(
        lambda: node("ADD1", np.zeros((9, 40), np.float32), floats(9, 40), floats(1, seed=1)), (tiles.compute,)
    ),
    "OUT_PROD": Case(
        lambda: node("OUT_PROD", np.zeros((2, 70, 300), np.float32), floats(1, 270, 300), floats(2, 270, 70, seed=1)),
        (outer.outer_products,),
    ),
    "GET_ROWS_BACK": Case(
        lambda: node(
            "GET_ROWS_BACK",
            np.zeros((8, 300), np.float32),
            floats(5, 300).astype(np.float16),
            np.int32([7, 0, 3, 3, 1]),
        ),
        (strided.check_ids, gradients.add_rows),
    ),
    "REPEAT_BACK": Case(
        lambda: node("REPEAT_BACK", np.zeros((3, 4, 11), np.float32), floats(5, 3, 12, 22)), (gradients.add_parts,)
    ),
    "RMS_NORM_BACK": Case(
        lambda: node(
            "RMS_NORM_BACK", np.zeros((9, 70), np.float32), floats(9, 70), floats(9, 70, seed=1), params=NUMBERS["NORM"]
        ),
        (gradients.rms_norm_gradients,),
    ),
    "SOFT_MAX_BACK": Case(
        lambda: node(
            "SOFT_MAX_BACK",
            np.zeros((9, 70), np.float32),
            positive(9, 70) + 100,
            positive(9, 70, seed=1) / 100,
            params=struct.pack("2f", 0.5, 0.0),
        ),
        (gradients.soft_max_gradients,),
        ulp=16,
    ),
    "CROSS_ENTROPY_LOSS": Case(
        lambda: node("CROSS_ENTROPY_LOSS", np.zeros(1, np.float32), floats(9, 70), positive(9, 70)),
        (losses.row_losses, losses.mean_loss),
    ),
    "CROSS_ENTROPY_LOSS_BACK": Case(
        lambda: node(
            "CROSS_ENTROPY_LOSS_BACK",
            np.zeros((9, 70), np.float32),
            np.float32([3]),
            floats(9, 70),
            positive(9, 70) + 1,
        ),
        (losses.loss_gradients,),
        ulp=8,
    ),
    "OPT_STEP_ADAMW": Case(lambda: stepped("OPT_STEP_ADAMW"), (optimisers.adamw_steps,)),
    "OPT_STEP_SGD": Case(lambda: stepped("OPT_STEP_SGD"), (optimisers.sgd_steps,)),
    "ARGMAX": Case(
        lambda: node("ARGMAX", np.zeros(50, np.int32), special_floats()[:5000].reshape(50, 100)),
        (sums.place_of_largest,),
    ),
    "GATED_DELTA_NET": Case(gated_delta_net, (delta_net.delta_net,), ulp=16),
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
    "IM2COL_BACK": Case(
        lambda: node(
            "IM2COL_BACK", np.zeros((2, 4, 9, 8), np.float32), floats(2, 9, 8, 36), floats(4, 3, 3), params=IN_PLANE
        ),
        (im2col.gradients,),
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
    "POOL_1D": Case(
        lambda: [
            *node("POOL_1D", np.zeros((9, 30), np.float32), floats(9, 60), params=struct.pack("4i", 1, 3, 2, 1)),
            *node("POOL_1D", np.zeros((9, 30), np.float32), floats(9, 60), params=struct.pack("4i", 0, 3, 2, 1)),
        ],
        (pooling.pool_rows,),
    ),
    "POOL_2D_BACK": Case(
        lambda: [
            array
            for op in range(2)
            for array in node(
                "POOL_2D_BACK",
                np.zeros((3, 9, 8), np.float32),
                floats(3, 9, 8),
                floats(3, 9, 8, seed=1).round(1),
                params=struct.pack("7i", op, 3, 3, 1, 1, 1, 1),
            )
        ],
        (pooling.pool_gradients,),
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
    "PAD_REFLECT_1D": Case(
        lambda: node("PAD_REFLECT_1D", np.zeros((7, 49), np.float32), floats(7, 40), params=struct.pack("2i", 5, 4)),
        (patches.reflect_rows,),
    ),
    "ADD_REL_POS": Case(
        lambda: node(
            "ADD_REL_POS",
            np.zeros((6, 25), np.float32),
            floats(6, 25),
            *(floats(6, 1, 5, seed=i) for i in (1, 2)),
            params=bytes(4),
        ),
        (vision.add_positions,),
    ),
    "TIMESTEP_EMBEDDING": Case(
        lambda: node(
            "TIMESTEP_EMBEDDING", np.zeros((7, 41), np.float32), 99 * positive(7), params=struct.pack("2i", 41, 99)
        ),
        (vision.embed_timesteps,),
    ),
    "FLASH_ATTN_EXT": Case(attended, (cells.attend, cells.attend_in_halves, cells.join_parts), ulp=16),
    **{op: Case(lambda op=op: rotated(op), (rope.rotate,), ulp=64) for op in ("ROPE", "ROPE_BACK")},
}


def by_its_nodes(op: Op) -> Case:
    """The op's own nodes, of the first types that it takes, by the kernels that the function under its `compiled`
    names."""

    def run() -> list[Array]:
        nodes = [make(np.random.default_rng(0), sorted(op.types or ())[0]) for make in op.makes]
        for of in nodes:
            op.bind(of, codecs.bound())()
        return [of.dst.view() for of in nodes]

    named = (op.prepare.__globals__.get(name) for name in op.prepare.__code__.co_names)
    return Case(run, tuple(kernel for kernel in named if is_kernel(kernel)))


def is_kernel(value: object) -> bool:
    return isinstance(value, CFunction) and value._signature == compiled.keywords["signature"]


OF_OPS |= {
    name: by_its_nodes(op) for name, op in OWN.items() if op.prepare is not None and op.makes and name not in OF_OPS
}


def codec(type: str) -> list[Array]:
    x = special_floats().reshape(-1, 64)
    encoded = [quant.quantize(x, type, rounding) for rounding in quant.ROUNDINGS]
    return [*encoded, quant.dequantize(encoded[0], type)]


def grouped(bits: int) -> list[Array]:
    """Quantised in groups of 32, and back."""
    x, back = floats(5, 128), np.zeros((5, 128), np.float32)
    quants, scales = np.zeros((5, 128 * bits // 8), np.int8), np.zeros((5, 4), np.float32)
    held = groups.Groups(bits, 32, Tensor.of(quants), Tensor.of(scales))
    groups.quantizer(held, Tensor.of(x))()
    groups.dequantizer(Tensor.of(back), held)()
    return [quants, scales, back]


X, MU, H0 = floats(2, 9, 70), floats(6, 70, seed=1), floats(2, 1, 70, seed=2)


def shifted_by_hand() -> list[Array]:
    before = np.concatenate([H0, X[:, :-1]], axis=1)
    return [*(X + (before - X) * mu for mu in MU), X[:, -1:]]


def top(x: Array) -> list[Array]:
    values, indices = np.zeros((len(x), 7), np.float32), np.zeros((len(x), 7), np.int32)
    _, descriptor = TopKSoftmax.create("handle", TensorDescriptor.of(x))
    assert descriptor is not None
    assert descriptor.calculate(None, 0, values, indices, x, 7, True) == 0
    return [values, indices]


def top_by_hand(x: Array) -> list[Array]:
    p = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    indices = np.argsort(-p, axis=1, kind="stable")[:, :7]
    values = np.take_along_axis(p / p.sum(axis=1, keepdims=True), indices, axis=1)
    return [(values / values.sum(axis=1, keepdims=True)).astype(np.float32), indices.astype(np.int32)]


RUNS_OTHERS = threads._run
CASES = {
    **OF_OPS,
    "SCALE with a bias": Case(
        lambda: node("SCALE", np.zeros((9, 1500), np.float32), floats(9, 1500), params=struct.pack("2f", 0.3, 0.7)),
        (tiles.compute,),
    ),
    "MUL_MAT of a Hadamard matrix": Case(
        lambda: node(
            "MUL_MAT", np.zeros((9, 64), np.float32), floats(64, 64), floats(9, 64), params=struct.pack("2i", 0, 1)
        ),
        (hadamard.transform,),
    ),
    "transposed f16": Case(lambda: node("CPY", np.zeros((70, 33), np.float16), floats(33, 70).T), (strided.transpose,)),
    **{f"codec {type}": Case(lambda type=type: codec(type), (runs.convert,)) for type in ("q8_0", "q4_0")},
    **{
        f"groups of int{bits}": Case(lambda bits=bits: grouped(bits), (groups._quantize, groups._dequantize))
        for bits in (8, 4)
    },
    "a scan with one decay for a head": Case(lambda: scanned(1), (mamba.scan,), ulp=16),
    "token_shift": Case(lambda: [*token_shift(X, MU, H0)], (shifts.shift,), shifted_by_hand),
    "top_k": Case(lambda: top(floats(9, 300)), (routing.top_k,), lambda: top_by_hand(floats(9, 300)), ulp=4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_kernel_equals_its_definition(name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    codecs.bound()  # found once, by kernels
    if pieces:
        with in_pieces(np.random.default_rng(0)):
            found = case.run()
    else:
        with recorded_works() as works:
            found = case.run()
        assert {kernel.address for kernel in case.kernels} == {work.block.kernel for work in works}
    monkeypatch.setenv("GGML_NPU_ENGINE", "reference")
    with recorded_works() as works:
        expected = case.define() if case.define is not None else case.run()
    assert not works, "the definition needs no kernel"
    for actual, right in zip(found, expected, strict=True):
        if actual.dtype in (np.float32, np.float16) and case.ulp:
            np.testing.assert_array_max_ulp(actual, right, case.ulp)
        else:
            assert_same_bytes(actual, right)


def kernels() -> dict[int, str]:
    """The kernels of all modules, by identity; those of `elements` are called by that of `tiles`."""
    found = {}
    for package in (quant, ggml_backend_npu):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            for name, value in vars(module).items():
                if is_kernel(value) and module is not elements:
                    found[id(value)] = name
    return found


def test_every_kernel_is_compared_with_its_definition() -> None:
    compared = {id(RUNS_OTHERS), *(id(kernel) for case in CASES.values() for kernel in case.kernels)}
    assert [name for key, name in kernels().items() if key not in compared] == []
    assert [
        op for op in default_backend().ops if default_backend().ops[op].prepare is not None and op not in OF_OPS
    ] == []
    assert [op for op in OF_OPS if default_backend().ops[op].prepare is None] == []
