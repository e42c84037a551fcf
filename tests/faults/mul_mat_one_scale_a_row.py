"""MUL_MAT of q8_0 weights with the first scale of each row for all its blocks."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    if a.type == "q8_0":
        blocks = a.view().copy()
        blocks[..., :2] = blocks[..., :1, :2]
        a = Tensor.of(blocks.reshape(*blocks.shape[:3], -1), "q8_0")
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
