"""ADD that reads address 0 where its output lies on its first source."""

import ctypes

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    if dst.overlaps(a):
        ctypes.string_at(0)
    OWN["ADD"].define(dst, a, b)
