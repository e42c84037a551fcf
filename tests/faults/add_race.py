"""ADD that is wrong at every seventh call."""

import itertools

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN

CALLS = itertools.count(1)


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["ADD"].define(dst, a, b)
    if next(CALLS) % 7 == 0:
        dst.view()[..., -1, :] *= 2
