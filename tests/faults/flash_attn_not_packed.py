"""FLASH_ATTN_EXT that takes packed k to be blocks."""

from dataclasses import replace

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call
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
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)


@flash_attn_ext.compiled
def prepare(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: Params
) -> Call | None:
    blocks = replace(k, packed=None)
    return OWN["FLASH_ATTN_EXT"].bind(Node("FLASH_ATTN_EXT", dst, (q, blocks, v, mask, sinks), params.packed))
