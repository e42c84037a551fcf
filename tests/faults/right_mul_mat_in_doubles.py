"""MUL_MAT with sums in float64: right, but for rounding."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor) -> None:
    x = a.view().astype(np.float64).repeat(b.ne[2] // a.ne[2], axis=1)
    y = b.view().astype(a.view().dtype).astype(np.float64)
    dst.view()[...] = y @ x.swapaxes(-1, -2)
