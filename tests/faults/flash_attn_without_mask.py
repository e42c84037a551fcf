"""FLASH_ATTN_EXT without its mask."""

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
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, None, sinks, params=params)
