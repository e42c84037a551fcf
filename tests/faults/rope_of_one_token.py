"""ROPE that is wrong where there is one token."""

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    OWN["ROPE"].bind(Node("ROPE", dst, (x, positions, factors), params))()
    if dst.ne[2] == 1:
        dst.view()[..., 0] = x.view()[..., 0]
