"""NORM without its eps."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("NORM", types=OWN["NORM"].types, refuse=OWN["NORM"].refuse, params=OWN["NORM"].params)
def norm(dst: Tensor, x: Tensor, params: Params) -> None:
    OWN["NORM"].define(dst, x, params=replace(params, eps=0.0))
