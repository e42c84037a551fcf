"""ARGSORT in the other order."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("ARGSORT", types=OWN["ARGSORT"].types, refuse=OWN["ARGSORT"].refuse, params=OWN["ARGSORT"].params)
def argsort(dst: Tensor, x: Tensor, params: Params) -> None:
    OWN["ARGSORT"].define(dst, x, params=replace(params, order=1 - params.order))
