"""SWIGLU that writes a float 8 KiB after its output."""

from ggml_backend_npu import Memory, Node, Tensor, op
from ggml_backend_npu.ops import OWN


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params))()
    Memory(dst.end + (8 << 10), 4).bytes()[...] ^= 0xFF
