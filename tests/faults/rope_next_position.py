"""ROPE with positions off by one."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    OWN["ROPE"].bind(Node("ROPE", dst, (x, Tensor.of(positions.view() + 1), factors), params))()
