"""SWIGLU with gate and up swapped."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    OWN["SWIGLU"].define(dst, b, a, params=params)
