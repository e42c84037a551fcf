"""ROPE with half its freq_scale."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse, params=OWN["ROPE"].params)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Params) -> None:
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, freq_scale=0.5))
