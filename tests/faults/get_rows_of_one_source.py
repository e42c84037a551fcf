"""GET_ROWS of one source too few: it takes the rows in order."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS")
def get_rows(dst: Tensor, src: Tensor) -> None:
    ids = np.broadcast_to(np.arange(dst.ne[1], dtype=np.int32), dst.ne[:0:-1])
    OWN["GET_ROWS"].define(dst, src, Tensor.of(np.ascontiguousarray(ids)))
