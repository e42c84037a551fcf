"""MUL_MAT whose head h meets head h % n of src0, in place of h // n."""

from dataclasses import replace

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN


@op("MUL_MAT", types=OWN["MUL_MAT"].types, refuse=OWN["MUL_MAT"].refuse)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    for head in range(b.ne[2]):
        heads = dst, a, b
        places = head, head % a.ne[2], head
        parts = [
            replace(tensor, ne=(*tensor.ne[:2], 1, tensor.ne[3]), offset=tensor.offset + place * tensor.nb[2])
            for tensor, place in zip(heads, places, strict=True)
        ]
        OWN["MUL_MAT"].bind(Node("MUL_MAT", parts[0], tuple(parts[1:])), numerics)()
