"""Whether ggml's CPU computes with float16 itself, as builds for AVX512-FP16 do, and for NEON with float16. No feature
of ggml's tells where."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.numerics import spread

_STEPS = {"AVX512": 128, "NEON": 32}  # elements: GGML_F16_STEP where these vectors are of float16; by feature of ggml
_APART = 128  # elements: more than a vector of float16 has
_CELLS = 8  # of a query: a weight may be as good as float16
_ROWS = 4  # that it multiplies together if there are enough columns
_BYTES = 1 << 20  # of a context


def step(ggml: Ggml) -> int:
    """`Numerics.halves` of a ggml, as its own attention shows it: elements of a row that are alike give other results
    if some are computed as float16, and others, too few for that, in float32."""
    step = next((step for feature, step in _STEPS.items() if feature in ggml.features), 0)
    if not step:
        return 0
    values = spread(_CELLS * step).reshape(_CELLS, step).astype(np.float16)
    v = np.concatenate([values, values[:, :-1]], axis=1)
    k = np.repeat(np.arange(_CELLS, 0, -1)[:, None], 32, axis=1).astype(np.float16)  # each has a weight of its own
    found = _computed(
        ggml, "ggml_flash_attn_ext", "ctttt fff", [np.full((1, 32), 0.01, np.float32), k, v], None, 1.0, 0.0, 0.0
    )
    return 0 if np.array_equal(found[: step - 1], found[step:]) else step


def adds(ggml: Ggml, n_columns: int) -> bool:
    """Whether a ggml adds products of float16 as float16 when it multiplies a matrix with so many columns: 2048 + 1 + 1
    is then 2048."""
    rows = np.zeros((_ROWS, 3 * _APART), np.float16)
    rows[:, ::_APART] = 2048, 1, 1
    found = _computed(ggml, "ggml_mul_mat", "ctt", [rows, np.ones((n_columns, 3 * _APART), np.float32)])
    return bool((found != 2050).any())


def _computed(
    ggml: Ggml, function: str, signature: str, sources: Sequence[NDArray[np.float32] | NDArray[np.float16]], *rest: Any
) -> NDArray[np.float32]:
    """What a function of ggml's makes of its sources on the CPU, and of the arguments that follow: dst, flat."""
    context = ggml.ggml_init(structs.InitParams(_BYTES, None, False))
    try:
        tensors = [_tensor(ggml, context, each) for each in sources]
        node = ggml.typed(function, signature)(context, *tensors, *rest)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, node)
        ggml.ggml_graph_compute_with_ctx(context, graph, 1)
        return np.frombuffer(ctypes.string_at(convert.data_of(node), ggml.ggml_nbytes(node)), np.float32)
    finally:
        ggml.ggml_free(context)


def _tensor(ggml: Ggml, context: int, values: NDArray[np.float32] | NDArray[np.float16]) -> int:
    """A tensor of a context that holds rows of values."""
    number = next(number for number, info in ggml.types.items() if info.name == f"f{8 * values.itemsize}")
    ne = (ctypes.c_int64 * 2)(*values.shape[::-1])
    tensor: int = ggml.ggml_new_tensor(context, number, 2, ne)
    ctypes.memmove(convert.data_of(tensor), values.tobytes(), values.nbytes)
    return tensor
