"""SWIGLU that is wrong where there is one token."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse, params=OWN["SWIGLU"].params)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    if dst.ne[1] == 1:
        dst.view()[..., -1] = 0
