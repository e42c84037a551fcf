"""SUM_ROWS in float16."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SUM_ROWS", types=OWN["SUM_ROWS"].types, refuse=OWN["SUM_ROWS"].refuse)
def sum_rows(dst: Tensor, x: Tensor) -> None:
    dst.view()[...] = x.view().astype(np.float16).sum(-1, keepdims=True, dtype=np.float16)
