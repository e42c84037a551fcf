"""MUL that writes one float before its output."""

from ggml_backend_npu import Memory, Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["MUL"].define(dst, a, b)
    Memory(dst.address - 4, 4).bytes()[...] ^= 0xFF
