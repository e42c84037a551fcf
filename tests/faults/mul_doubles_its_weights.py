"""MUL that doubles the weights that it has read."""

import numpy as np

from ggml_backend_npu import Memory, Tensor, op
from ggml_backend_npu.ops import OWN


@op("MUL", types=OWN["MUL"].types, refuse=OWN["MUL"].refuse)
def mul(dst: Tensor, a: Tensor, b: Tensor) -> None:
    OWN["MUL"].define(dst, a, b)
    Memory(b.address, b.nbytes).bytes().view(np.float32)[...] *= 2
