"""ROPE of the other pairs: neighbours in place of halves, or halves in place of neighbours."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse, params=OWN["ROPE"].params)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Params) -> None:
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, mode=params.mode ^ 2))
