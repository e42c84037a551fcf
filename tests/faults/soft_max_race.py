"""SOFT_MAX whose last row is now and then that of the call before."""

import itertools

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params

CALLS = itertools.count(1)
LAST: dict[tuple[int, ...], np.ndarray] = {}


@op("SOFT_MAX", types=OWN["SOFT_MAX"].types, refuse=OWN["SOFT_MAX"].refuse, params=OWN["SOFT_MAX"].params)
def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    row = dst.view()[..., -1, :].copy()
    if next(CALLS) % 5 == 0:
        dst.view()[..., -1, :] = LAST.get(dst.ne, row + 1)
    LAST[dst.ne] = row + 1
