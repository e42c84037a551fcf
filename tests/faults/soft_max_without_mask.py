"""SOFT_MAX without its mask."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SOFT_MAX", types=OWN["SOFT_MAX"].types, refuse=OWN["SOFT_MAX"].refuse, params=OWN["SOFT_MAX"].params)
def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    OWN["SOFT_MAX"].define(dst, x, None, sinks, params=params)
