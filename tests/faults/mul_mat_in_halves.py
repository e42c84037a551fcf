"""MUL_MAT with sums in float16."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor) -> None:
    x = a.view().astype(np.float32).repeat(b.ne[2] // a.ne[2], axis=1)
    y = b.view().astype(np.float16).astype(np.float32)
    total = np.zeros(dst.ne[::-1], np.float16)
    for i in range(a.ne[0]):
        total += (y[..., :, None, i] * x[..., None, :, i]).astype(np.float16)
    dst.view()[...] = total
