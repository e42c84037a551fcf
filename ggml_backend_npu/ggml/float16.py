"""Whether ggml's CPU computes with float16 itself, as builds for AVX512-FP16 do. No feature of ggml's tells."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.lib import Ggml

_STEP = 128  # elements: GGML_F16_STEP with AVX512-FP16
_BYTES = 1 << 20  # of a context


def step(ggml: Ggml) -> int:
    """`Numerics.halves` of a ggml, as its own attention shows it: elements of a row that are alike give other results
    if some are computed as float16, and others, too few for that, in float32."""
    if "AVX512" not in ggml.features:
        return 0
    values = np.random.default_rng(0).standard_normal((2, _STEP)).astype(np.float16)
    v = np.concatenate([values, values[:, :-1]], axis=1)
    k = np.repeat(np.array([[1], [2]], np.float16), 32, axis=1)
    found = _attention(ggml, np.full((1, 32), 0.01, np.float32), k, v)
    return 0 if np.array_equal(found[: _STEP - 1], found[_STEP:]) else _STEP


def _attention(
    ggml: Ggml, q: NDArray[np.float32], k: NDArray[np.float16], v: NDArray[np.float16]
) -> NDArray[np.float32]:
    """ggml_flash_attn_ext on the CPU, of one query: the row of dst."""
    context = ggml.ggml_init(structs.InitParams(_BYTES, None, False))
    try:
        tensors = [_tensor(ggml, context, each) for each in (q, k, v)]
        node = ggml.typed("ggml_flash_attn_ext", "ctttt fff")(context, *tensors, None, 1.0, 0.0, 0.0)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, node)
        ggml.ggml_graph_compute_with_ctx(context, graph, 1)
        return np.frombuffer(ctypes.string_at(convert.data_of(node), 4 * v.shape[1]), np.float32)
    finally:
        ggml.ggml_free(context)


def _tensor(ggml: Ggml, context: int, values: NDArray[np.float32] | NDArray[np.float16]) -> int:
    """A tensor of a context that holds rows of values."""
    number = next(number for number, info in ggml.types.items() if info.name == f"f{8 * values.itemsize}")
    ne = (ctypes.c_int64 * 2)(*values.shape[::-1])
    tensor: int = ggml.ggml_new_tensor(context, number, 2, ne)
    ctypes.memmove(convert.data_of(tensor), values.tobytes(), values.nbytes)
    return tensor
