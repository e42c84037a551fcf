"""SWIGLU that is wrong at every second call."""

import itertools

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN

CALLS = itertools.count()


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params))()
    if next(CALLS) % 2:
        dst.view()[..., -1, 0] += 1
