"""GET_ROWS with ids off by one."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, src, Tensor.of(np.minimum(ids.view() + 1, src.ne[1] - 1)))
