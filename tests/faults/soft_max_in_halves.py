"""SOFT_MAX with its sum in float16."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("SOFT_MAX", types=OWN["SOFT_MAX"].types, refuse=OWN["SOFT_MAX"].refuse, params=OWN["SOFT_MAX"].params)
def soft_max(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params) -> None:
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    dst.view()[...] /= np.add.accumulate(dst.view(), axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
