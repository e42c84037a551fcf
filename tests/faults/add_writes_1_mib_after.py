"""ADD that writes a row 1 MiB after its output."""

from ggml_backend_npu import Memory, Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["ADD"].define(dst, a, b)
    Memory(dst.end + (1 << 20), dst.nb[1]).bytes()[...] ^= 0xFF
