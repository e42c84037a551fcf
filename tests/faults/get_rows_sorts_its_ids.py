"""GET_ROWS that puts its ids in order, in their own memory."""

import numpy as np

from ggml_backend_npu import Memory, Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, src, ids)
    if ids.is_contiguous():
        Memory(ids.address, ids.nbytes).bytes().view(np.int32).sort()
