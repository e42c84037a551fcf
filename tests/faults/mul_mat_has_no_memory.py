"""MUL_MAT that asks for more memory than there is."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor) -> None:
    bytearray(1 << 60)
