"""MUL_MAT that adds to what its output holds."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.matmul import MulMat


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    before = dst.view().copy()
    OWN["MUL_MAT"].define(dst, a, b, MulMat(), numerics)
    dst.view()[...] += before
