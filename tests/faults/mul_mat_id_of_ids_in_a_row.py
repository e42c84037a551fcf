"""MUL_MAT_ID that reads its ids as if they were contiguous."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT_ID", types=OWN["MUL_MAT_ID"].types, refuse=OWN["MUL_MAT_ID"].refuse)
def mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    nb = (4, 4 * ids.ne[0], 4 * ids.n_elements, 4 * ids.n_elements)
    OWN["MUL_MAT_ID"].define(dst, a, b, replace(ids, nb=nb), numerics)
