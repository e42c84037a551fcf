"""Cases of the compiled kernels that training needs."""

from __future__ import annotations

import struct

import numpy as np
from kit.kernel_cases import Array, Case, floats, node, positive, sevens
from kit.support import special_floats

from ggml_backend_npu.ops import gradients, losses, optimisers, outer, sums
from ggml_backend_npu.ops.kernels import strided, tiles


def stepped() -> list[Array]:
    """What a step of AdamW leaves of weights and of the momenta."""
    w, g, m = (floats(9, 70, seed=seed) for seed in range(3))
    v = positive(9, 70)
    numbers = np.array([0.03, 0.9, 0.97, 1e-3, 0.2, 1.3, 1.1], np.float32)
    return [*node("OPT_STEP_ADAMW", w, w, g, m, v, numbers), m, v]


OF_TRAINING = {
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
        lambda: [
            array
            for type in ("f4", "f2")
            for array in node(
                "GET_ROWS_BACK", sevens(8, 1300), -floats(6, 1300).astype(type), np.array([7, 0, 3, 3, 1, 3], np.int32)
            )
        ],
        (strided.check_ids, gradients.add_rows),
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
    "CROSS_ENTROPY_LOSS_BACK": Case(
        lambda: node(
            "CROSS_ENTROPY_LOSS_BACK",
            np.zeros((9, 70), np.float32),
            np.array([3], np.float32),
            floats(9, 70),
            positive(9, 70) + 1,
        ),
        (losses.loss_gradients,),
        ulp=8,
    ),
    "OPT_STEP_ADAMW": Case(stepped, (optimisers.adamw_steps,)),
    "SUM": Case(
        lambda: [
            *node("SUM", np.zeros(1, np.float32), floats(2, 7, 9, 300)[:, :, ::2]),
            *node("SUM", np.zeros(1, np.float16), floats(2, 7, 9, 300).astype(np.float16)[:, :6]),
            *node(
                "SUM",
                np.zeros(1, np.uint16),
                (floats(9, 300).view(np.uint32) >> 16).astype(np.uint16),
                types=("bf16", "bf16"),
            ),
        ],
        (sums.sums_of_rows, sums.sum_of_sums),
    ),
    "MEAN": Case(
        lambda: [
            *node("MEAN", np.zeros((2, 7, 9, 1), np.float32), floats(2, 7, 18, 300)[:, :, ::2]),
            *node("MEAN", np.zeros((7, 2, 1), np.float32).swapaxes(0, 1), floats(2, 7, 33)),
        ],
        (sums.sums_of_rows, sums.means),
    ),
    "CUMSUM": Case(
        lambda: [
            *node("CUMSUM", np.zeros((2, 7, 9, 30), np.float32), floats(2, 7, 18, 30)[:, :, ::2]),
            *node("CUMSUM", np.zeros((9, 7, 30), np.float32).swapaxes(0, 1), floats(7, 9, 30)),
        ],
        (sums.running_sums,),
    ),
    "COUNT_EQUAL": Case(
        lambda: node(
            "COUNT_EQUAL",
            np.zeros(1, np.int64),
            *(np.random.default_rng(seed).integers(0, 3, (33, 70), np.int32)[:, seed:][:, :69] for seed in range(2)),
        ),
        (sums.equal_in_rows, sums.sum_of_sums),
    ),
    "ARGMAX": Case(
        lambda: node("ARGMAX", np.zeros(50, np.int32), special_floats()[:5000].reshape(50, 100)),
        (sums.place_of_largest,),
    ),
}
