"""SWIGLU that writes a float 8 KiB after its output."""

from ggml_backend_npu import Memory, Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse, params=OWN["SWIGLU"].params)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    Memory(dst.end + (8 << 10), 4).bytes()[...] ^= 0xFF
