"""Faults of SSM_CONV and RWKV_WKV7."""

import numpy as np
from kit.faults import fault

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN


@fault("SSM_CONV", model="mamba")
def ssm_conv_reversed(dst: Tensor, x: Tensor, weights: Tensor) -> None:
    """SSM_CONV with its weights in the other order."""
    OWN["SSM_CONV"].define(dst, x, Tensor.of(np.ascontiguousarray(weights.view()[..., ::-1])))


@fault("RWKV_WKV7", "runs", step=1, model="rwkv7")
def rwkv_wkv7_forgets(
    dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> None:
    """RWKV_WKV7 that begins every time with a state of zeros."""
    zeros = Tensor.of(np.zeros_like(state.view()))
    OWN["RWKV_WKV7"].bind(Node("RWKV_WKV7", dst, (r, w, k, v, a, b, zeros)))()
