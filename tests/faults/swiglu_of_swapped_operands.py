"""SWIGLU with gate and up swapped."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse, params=OWN["SWIGLU"].params)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    OWN["SWIGLU"].define(dst, b, a, params=params)
