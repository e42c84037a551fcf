"""SOFT_MAX that takes each row's maximum after it has written the row before: wrong in place."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SOFT_MAX", types=OWN["SOFT_MAX"].types, refuse=OWN["SOFT_MAX"].refuse, params=OWN["SOFT_MAX"].params)
def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    if dst.overlaps(x):
        dst.view()[..., 1:, :] *= np.exp(dst.view()[..., :-1, :].max(-1, keepdims=True))
