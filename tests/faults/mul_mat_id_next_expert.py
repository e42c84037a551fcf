"""MUL_MAT_ID with ids off by one."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT_ID", types=OWN["MUL_MAT_ID"].types, refuse=OWN["MUL_MAT_ID"].refuse)
def mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    OWN["MUL_MAT_ID"].define(dst, a, b, Tensor.of((ids.view() + 1) % a.ne[2]), numerics)
