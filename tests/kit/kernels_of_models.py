"""Cases of the compiled kernels that language models need."""

from __future__ import annotations

import struct
from functools import partial

import numpy as np
import pytest
from kit.kernel_cases import Array, Case, floats, node, positive, sevens
from kit.support import choose, special_floats

import quant
from ggml_backend_npu import default_backend
from ggml_backend_npu.ops import delta_net, mamba, norms, rope, routing, rwkv, triangles
from ggml_backend_npu.ops.kernels import cells_fast, cells_in_halves, cells_many, products, softmax, strided, tiles

WEIGHTS = quant.quantize(np.abs(floats(3, 70, 64)), "q8_0")


def scanned(n_decays: int) -> list[Array]:
    """SSM_SCAN of 2 sequences of 5 tokens, 4 heads of 3 rows of 33 elements, and 2 states of each."""
    s, x, dt = positive(3, 4, 3, 33), positive(2, 5, 4, 3, seed=1), positive(2, 5, 4, seed=2)
    b, c = (positive(2, 5, 2, 33, seed=seed) for seed in (3, 4))
    decays, ids = -positive(4, n_decays, seed=5), np.array([2, 0], np.int32)
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
    """Sums of float32 that lose nothing to cancellation, and of float16 whose weights are all 1 or next to nothing;
    then of few rows, fast."""
    params = struct.pack("3fi", 0.125, 0.0, 0.0, 0)
    q, k, v, mask = floats(6, 70, 64), floats(2, 90, 64, seed=1), np.abs(floats(2, 90, 24, seed=2)), floats(70, 90)
    found = node("FLASH_ATTN_EXT", np.zeros((70, 6, 24), np.float32), q, k, v, mask.astype(np.float16), params=params)
    q, k = np.ones((6, 1, 64), np.float32), np.zeros((2, 600, 64), np.float16)
    k[..., 0] = np.random.default_rng(3).integers(-3, 4, (2, 600)) * 400
    v = np.random.default_rng(4).integers(-3, 4, (2, 600, 24)).astype(np.float16)
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, matmul="exact")
        for n_cells in (600, 90):
            cells = k[:, :n_cells], v[:, :n_cells]
            found += node("FLASH_ATTN_EXT", np.zeros((1, 6, 24), np.float32), q, *cells, params=params)
        choose(patch, matmul="fast")
        q, k, v = floats(6, 2, 64), floats(2, 90, 64, seed=1), np.abs(floats(2, 90, 80, seed=2))
        found += node("FLASH_ATTN_EXT", np.zeros((2, 6, 80), np.float32), q, k, v, params=params)
    return found


def masked(op: str) -> list[Array]:
    """Of more columns than rows and fewer, and in place."""
    of, in_place = struct.pack("i", 3), floats(2, 3, 11, 19)
    found = [node(op, sevens(2, 3, *size), floats(2, 3, *size), params=of) for size in ((11, 19), (19, 11))]
    return [*found[0], *found[1], *node(op, in_place, in_place, params=of)]


OF_MODELS = {
    "TRI": Case(
        lambda: [
            array
            for type in range(4)
            for array in node("TRI", sevens(2, 3, 19, 19), floats(2, 3, 19, 19), params=struct.pack("i", type))
        ],
        (triangles.keep_band,),
    ),
    "DIAG": Case(lambda: node("DIAG", sevens(2, 3, 19, 19), floats(2, 3, 1, 19)), (triangles.keep_band,)),
    **{op: Case(partial(masked, op), (triangles.keep_band,)) for op in ("DIAG_MASK_INF", "DIAG_MASK_ZERO")},
    **{name: each(name) for name in ("NORM", "RMS_NORM", "L2_NORM")},
    "GET_ROWS": Case(
        lambda: node(
            "GET_ROWS",
            np.zeros((5, 64), np.float32),
            floats(8, 64).astype(np.float16),
            np.array([7, 0, 3, 3, 1], np.int32),
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
            np.array([[4, 0], [1, 1], [2, 4]], np.int32),
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
            np.array([[0, 1], [1, 2], [2, 0], [2, 1], [0, 2]], np.int32),
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
    "GATED_DELTA_NET": Case(gated_delta_net, (delta_net.delta_net,), ulp=16),
    "FLASH_ATTN_EXT": Case(
        attended,
        (
            cells_many.attend,
            cells_many.mark_masks,
            cells_in_halves.attend_in_halves,
            cells_in_halves.join_parts,
            cells_fast.attend_few,
        ),
        ulp=16,
    ),
    **{op: Case(partial(rotated, op), (rope.rotate,), ulp=64) for op in ("ROPE", "ROPE_BACK")},
}
