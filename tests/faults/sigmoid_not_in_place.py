"""SIGMOID in two passes, of which the second reads the source again: wrong in place."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SIGMOID", types=OWN["SIGMOID"].types, refuse=OWN["SIGMOID"].refuse)
def sigmoid(dst: Tensor, x: Tensor) -> None:
    OWN["SIGMOID"].define(dst, x)
    dst.view()[...] = np.where(x.view() < 0, dst.view(), np.maximum(dst.view(), 0.5))
