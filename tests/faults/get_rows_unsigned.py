"""GET_ROWS that takes the quants of q8_0 to be unsigned."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, src, ids)
    if src.type == "q8_0":
        blocks = src.view()[0, 0, ids.view().reshape(-1)]
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        dst.view()[0, 0] = (scales * blocks[..., 2:]).reshape(dst.ne[1], -1)
