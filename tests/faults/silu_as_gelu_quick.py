"""SILU as x / (1 + e ** (-1.702 x))."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SILU", types=OWN["SILU"].types, refuse=OWN["SILU"].refuse)
def silu(dst: Tensor, x: Tensor) -> None:
    dst.view()[...] = x.view() / (1 + np.exp(np.float32(-1.702) * x.view()))
