"""FLASH_ATTN_EXT."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from kit.museum import LONG, exhibit

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn
from ggml_backend_npu.registry.mistakes import with_stride

ON = ("--flash-attn", "on")
CALLS = itertools.count(1)

Maybe = Tensor | None


def right(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:  # as ggml's CPU
    node = Node("FLASH_ATTN_EXT", dst, (q, k, v, mask, sinks), params.packed)
    OWN["FLASH_ATTN_EXT"].bind(node, codecs.bound())()


def weights(scores: np.ndarray, mask: Tensor, params: FlashAttn) -> np.ndarray:
    """The softmax of scores (sequences, heads, queries, cells)."""
    n_queries, n_cells = scores.shape[2:]
    scores = scores * params.scale + mask.view()[:, :, :n_queries, :n_cells].astype(np.float64)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = e / e.sum(-1, keepdims=True)
    return found


def for_heads(x: Tensor, q: Tensor) -> np.ndarray:
    """k or v, repeated for the heads of q."""
    return x.view().repeat(q.ne[2] // x.ne[2], axis=1)


@exhibit(
    "ikawrakow/ik_llama.cpp 1509", "ik_llama.cpp", "FLASH_ATTN_EXT",
    says="each sequence of src0 meet sequence 0 of src1", options=(*ON, "--sequences", 2),
)  # fmt: skip
def flash_attn_of_one_sequence(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """A kernel ignored ne[3]: one sequence alone was right. Here attention ignores that of K and V, and each sequence
    meets the cells of the first."""
    k, v = (replace(each, nb=with_stride(each.nb, 3, 0)) for each in (k, v))
    right(dst, q, k, v, mask, sinks, params)


@exhibit(
    "ggml-org/llama.cpp 19115", "CUDA", "FLASH_ATTN_EXT", says="meet head h // 4 of src1",
    model="shape-llama-9-3-64", options=ON,
)  # fmt: skip
def flash_attn_pads_groups_of_heads(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """Groups of query heads were padded to a power of two, and heads of Q met those of K and V by the padded size.
    So groups of 3, 5 or 6 heads were wrong."""
    padded = 1 << (q.ne[2] // k.ne[2] - 1).bit_length()
    heads = np.minimum(np.arange(q.ne[2]) // padded, k.ne[2] - 1)
    k, v = (Tensor.of(np.ascontiguousarray(each.view()[:, heads]), each.type) for each in (k, v))
    right(dst, q, k, v, mask, sinks, params)


@exhibit(
    "ggml-org/llama.cpp 12776", "Vulkan", "FLASH_ATTN_EXT", says="gives NaN in", model="gpt-oss", options=ON
)  # fmt: skip
def flash_attn_of_a_masked_tile(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """The running maximum began at -inf, so that a first tile whose cells are all masked gave -inf - -inf: NaN from the
    point on where a window has left it."""
    right(dst, q, k, v, mask, sinks, params)
    assert mask is not None
    is_masked = np.isneginf(mask.view()[0, 0, : q.ne[1], :8]).all(-1)
    dst.view()[:, is_masked] = np.nan


@exhibit(
    "ggml-org/llama.cpp 10232", "Metal", "FLASH_ATTN_EXT", says="gives NaN", model="louder llama", options=ON,
)  # fmt: skip
def flash_attn_adds_scores_in_halves(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """The kernel for one query added Q * K up in F16 in place of F32: garbage with Qwen2.5, where sums are larger than
    65504."""
    assert mask is not None
    queries, keys = q.view().astype(np.float16), for_heads(k, q)
    scores = np.zeros((*queries.shape[:3], k.ne[1]), np.float16)
    for i in range(q.ne[0]):
        scores += queries[..., i, None] * keys[:, :, None, :, i]
    found = weights(scores.astype(np.float64), mask, params) @ for_heads(v, q).astype(np.float64)
    dst.view()[...] = found.transpose(0, 2, 1, 3)


@exhibit(
    "ggml-org/llama.cpp 17746", "CUDA", "FLASH_ATTN_EXT", outcome="missed", options=ON,
    why="llama.cpp gives attention a V of F16, and ggml's CPU adds that up in F16 itself: the reference errs in that "
    "way. A quantised V, of which the CPU's sums are F32, and values that overflow would show it.",
)  # fmt: skip
def flash_attn_adds_values_in_halves(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """The sums of V were F16, and overflowed in one model. Below 65504 they are right within rounding."""
    assert mask is not None
    scores = q.view().astype(np.float64) @ for_heads(k, q).astype(np.float64).swapaxes(2, 3)
    part, values = weights(scores, mask, params), for_heads(v, q)
    largest = part.max(-1, keepdims=True)  # divided at the end
    total = np.zeros((*part.shape[:3], v.ne[0]), np.float16)
    for cell in range(k.ne[1]):
        total += ((part / largest)[..., cell, None] * values[:, :, None, cell]).astype(np.float16)
    dst.view()[...] = (total.astype(np.float64) * largest).transpose(0, 2, 1, 3)


@exhibit(
    "ggml-org/llama.cpp 17887", "Vulkan", "FLASH_ATTN_EXT", says="leaves out cells 8 to 15 of src1 and src2",
    options=(*ON, "-n", 4),
)  # fmt: skip
def flash_attn_race(dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn) -> None:
    """A data race in shared memory. Here a tile of cells is lost at each fifth call."""
    assert mask is not None
    if next(CALLS) % 5 == 0:
        kept = mask.view().copy()
        kept[..., 8:16] = -np.inf
        mask = Tensor.of(kept, "f16")
    right(dst, q, k, v, mask, sinks, params)


@exhibit(
    "ggml-org/llama.cpp 29034", "CPU", "FLASH_ATTN_EXT", outcome="missed", model="shape-gemma2-8-4-128", options=ON,
    why="llama.cpp's graphs always have a mask, which hides it. A case of test-backend-ops without one would show it.",
)  # fmt: skip
def flash_attn_caps_what_pads_a_tile(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """The soft cap made finite scores of the -inf that pads the last tile of cells, if there is no mask and the number
    of cells is no multiple of 64."""
    right(dst, q, k, v, mask, sinks, params)
    padding = -k.ne[1] % 64
    if params.logit_softcap and mask is None:
        dst.view()[...] *= k.ne[1] / (k.ne[1] + padding)


@exhibit(
    "ggml-org/llama.cpp 23610", "CUDA", "FLASH_ATTN_EXT", says=r"the offset of a row of src3 \(the mask\) in 15 bits",
    options=(*ON, "--prompt", LONG),
)  # fmt: skip
def flash_attn_offset_of_the_mask_overflows(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """The offset of a row of the mask overflowed 32 bits in long contexts. Here it has 15 bits."""
    assert mask is not None
    rows = np.arange(mask.ne[1]) % max(1, (1 << 15) // mask.nb[1])
    right(dst, q, k, v, Tensor.of(np.ascontiguousarray(mask.view()[:, :, rows]), "f16"), sinks, params)


@exhibit(
    "ggml-org/llama.cpp 8197", "all", "FLASH_ATTN_EXT", says="ignores the soft cap", model="shape-gemma2-8-4-128",
    options=ON,
)  # fmt: skip
def flash_attn_without_soft_cap(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Maybe, sinks: Maybe, params: FlashAttn
) -> None:
    """Attention did not cap Gemma 2's scores; with flash attention on it could not."""
    right(dst, q, k, v, mask, sinks, replace(params, logit_softcap=0.0))
