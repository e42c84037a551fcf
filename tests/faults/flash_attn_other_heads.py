"""FLASH_ATTN_EXT whose head h of q meets head h % n of k and v, in place of h // n."""

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op(
    "FLASH_ATTN_EXT",
    types=OWN["FLASH_ATTN_EXT"].types,
    refuse=OWN["FLASH_ATTN_EXT"].refuse,
    params=OWN["FLASH_ATTN_EXT"].params,
)
def flash_attn_ext(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params
) -> None:
    k, v = (Tensor.of(np.tile(x.view(), (1, q.ne[2] // x.ne[2], 1, 1)), x.type) for x in (k, v))
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)
