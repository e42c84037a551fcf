"""MUL that is wrong at every third call in which its output lies on its first source."""

import itertools

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN

CALLS = itertools.count(1)


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    wrong = dst.overlaps(a) and next(CALLS) % 3 == 0
    OWN["MUL"].define(dst, a, b)
    if wrong:
        dst.view()[..., -1] += 1
