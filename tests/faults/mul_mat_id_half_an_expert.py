"""MUL_MAT_ID with half the stride between experts."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT_ID", types=OWN["MUL_MAT_ID"].types, refuse=OWN["MUL_MAT_ID"].refuse)
def mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    OWN["MUL_MAT_ID"].define(dst, replace(a, nb=(*a.nb[:2], a.nb[2] // 2, a.nb[3])), b, ids, numerics)
