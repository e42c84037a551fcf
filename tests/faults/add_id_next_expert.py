"""ADD_ID with ids off by one."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD_ID", types=OWN["ADD_ID"].types, refuse=OWN["ADD_ID"].refuse)
def add_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    OWN["ADD_ID"].define(dst, a, b, Tensor.of((ids.view() + 1) % b.ne[1]))
