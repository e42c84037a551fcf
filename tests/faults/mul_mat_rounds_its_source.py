"""MUL_MAT that rounds its float source to bfloat16 in place, after it has read it."""

import numpy as np

from ggml_backend_npu import Memory, Node, Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
    Memory(b.address, b.nbytes).bytes().view(np.uint32)[...] &= 0xFFFF0000
