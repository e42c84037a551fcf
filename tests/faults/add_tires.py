"""ADD that adds nothing from its eleventh call on."""

import itertools

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN

CALLS = itertools.count(1)


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    if next(CALLS) <= 10:
        OWN["ADD"].define(dst, a, b)
    else:
        dst.view()[...] = a.view()
