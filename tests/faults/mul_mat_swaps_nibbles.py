"""MUL_MAT of q4_0 weights with the two nibbles of each byte swapped."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    if a.type == "q4_0":
        blocks = a.view().copy()
        blocks[..., 2:] = blocks[..., 2:] << 4 | blocks[..., 2:] >> 4
        a = Tensor.of(blocks.reshape(*blocks.shape[:3], -1), "q4_0")
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
