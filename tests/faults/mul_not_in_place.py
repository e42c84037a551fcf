"""MUL that repeats its second source and multiplies by the first: wrong where its output lies on that."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    if b.ne[0] > 1:
        OWN["MUL"].define(dst, a, b)
    else:
        dst.view()[...] = b.view()
        dst.view()[...] *= a.view()
