"""DIV by a reciprocal in float16."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("DIV", types=OWN["DIV"].types, refuse=OWN["DIV"].refuse)
def div(dst: Tensor, a: Tensor, b: Tensor) -> None:
    dst.view()[...] = a.view() * (1 / b.view().astype(np.float16)).astype(np.float32)
