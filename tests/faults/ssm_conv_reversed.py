"""SSM_CONV with its weights in the other order."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SSM_CONV", types=OWN["SSM_CONV"].types, refuse=OWN["SSM_CONV"].refuse)
def ssm_conv(dst: Tensor, x: Tensor, weights: Tensor) -> None:
    OWN["SSM_CONV"].define(dst, x, Tensor.of(np.ascontiguousarray(weights.view()[..., ::-1])))
