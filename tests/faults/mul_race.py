"""MUL that is wrong in one element, at random."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN

RNG = np.random.default_rng(0)


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["MUL"].define(dst, a, b)
    if RNG.random() < 0.2:
        dst.view()[0, 0, -1, RNG.integers(dst.ne[0])] += 1
