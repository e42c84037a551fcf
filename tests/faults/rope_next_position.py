"""ROPE with positions off by one."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse, params=OWN["ROPE"].params)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Params) -> None:
    OWN["ROPE"].bind(Node("ROPE", dst, (x, Tensor.of(positions.view() + 1), factors), params.packed))()
