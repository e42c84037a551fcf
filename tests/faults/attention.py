"""Faults of FLASH_ATTN_EXT."""

from dataclasses import replace

import numpy as np
from kit.diffs import FLASH_ON, QUANTISED
from kit.faults import PACKING, fault

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn
from ggml_backend_npu.registry.entry import Call


@fault("FLASH_ATTN_EXT", settings=FLASH_ON, never=("takes index 0",), says="leaves out src3 (the mask)")
def flash_attn_without_mask(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT without its mask."""
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, None, sinks, params=params)


@fault("FLASH_ATTN_EXT", model="gpt-oss", settings=FLASH_ON, never=("mask",), says="leaves out src4 (the sinks)")
def flash_attn_without_sinks(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT without its sinks."""
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, None, params=params)


@fault("FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask",), says="ignores the scale")
def flash_attn_without_scale(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT without its scale."""
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=replace(params, scale=1.0))


@fault("FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask", "permutes"), says="of src1 and src2, not h // ")
def flash_attn_other_heads(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT whose head h of q meets head h % n of k and v, in place of h // n."""
    k, v = (Tensor.of(np.tile(x.view(), (1, q.ne[2] // x.ne[2], 1, 1)), x.type) for x in (k, v))
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)


@fault("FLASH_ATTN_EXT", settings=FLASH_ON, never=("mask",))
def flash_attn_heads_reversed(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT that writes the heads in the wrong order."""
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)
    dst.view()[...] = dst.view()[:, :, ::-1].copy()


@fault("FLASH_ATTN_EXT", "packed", settings=QUANTISED, options=PACKING)
def flash_attn_not_packed(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> None:
    """FLASH_ATTN_EXT that takes packed k to be blocks."""
    OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)


@flash_attn_not_packed.compiled
def prepare(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, params: FlashAttn
) -> Call | None:
    blocks = replace(k, packed=None)
    return OWN["FLASH_ATTN_EXT"].bind(Node("FLASH_ATTN_EXT", dst, (q, blocks, v, mask, sinks), params.packed))
