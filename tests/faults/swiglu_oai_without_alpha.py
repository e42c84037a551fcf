"""SWIGLU_OAI with 1 in place of its alpha."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SWIGLU_OAI", types=OWN["SWIGLU_OAI"].types, refuse=OWN["SWIGLU_OAI"].refuse, params=OWN["SWIGLU_OAI"].params)
def swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    OWN["SWIGLU_OAI"].define(dst, a, b, params=replace(params, alpha=1.0))
