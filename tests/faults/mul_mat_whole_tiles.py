"""MUL_MAT that writes whole tiles of 64 rows, and nothing of what is left."""

from dataclasses import replace

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    done = dst.ne[0] // 64 * 64
    if done == 0:
        OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
    else:
        rows = replace(a, ne=(a.ne[0], done, *a.ne[2:]))
        part = replace(dst, ne=(done, *dst.ne[1:]))
        OWN["MUL_MAT"].bind(Node("MUL_MAT", part, (rows, b)), numerics)()
