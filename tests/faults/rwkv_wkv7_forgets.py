"""RWKV_WKV7 that begins every time with a state of zeros."""

import numpy as np

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN


@op("RWKV_WKV7", types=OWN["RWKV_WKV7"].types, refuse=OWN["RWKV_WKV7"].refuse)
def rwkv_wkv7(dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    zeros = Tensor.of(np.zeros_like(state.view()))
    OWN["RWKV_WKV7"].bind(Node("RWKV_WKV7", dst, (r, w, k, v, a, b, zeros)))()
