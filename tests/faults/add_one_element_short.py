"""ADD that leaves out the last element."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    last = dst.view()[-1, -1, -1, -1].copy()
    OWN["ADD"].define(dst, a, b)
    dst.view()[-1, -1, -1, -1] = last
