"""MUL_MAT."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
from kit.museum import LONG, exhibit

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.mistakes import following


def right(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()


def in_halves(a: Tensor, b: Tensor) -> np.ndarray:
    """The product, added up in F16."""
    x = a.view().astype(np.float16).repeat(b.ne[2] // a.ne[2], axis=1)
    y = b.view().astype(np.float16)
    total = np.zeros((*y.shape[:3], a.ne[1]), np.float16)
    for i in range(a.ne[0]):
        total += y[..., :, None, i] * x[..., None, :, i]
    return total


@exhibit("ggml-org/llama.cpp 11920", "CPU (ARM)", "MUL_MAT", says="nothing but numbers of f16")
def mul_mat_adds_in_halves(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """With fp16fml, dot products of F16 were added up in F16: random tokens where sums were larger than 65504."""
    dst.view()[...] = in_halves(a, b)


@exhibit("ggml-org/llama.cpp 7805", "CUDA", "MUL_MAT", says="gives .*Inf", model="louder llama")
def mul_mat_scores_overflow(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """Q * K of Qwen2 overflowed F16: infinities, and NaN after the softmax."""
    if a.ne[2] > 1 and "kq" in dst.name:
        dst.view()[...] = in_halves(a, b)
    else:
        right(dst, a, b, numerics)


@exhibit("ggml-org/llama.cpp 16875", "OpenCL", "MUL_MAT", says="does not write elements 320 to 353")
def mul_mat_of_whole_tiles(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """Where sizes are no multiple of a tile, its rest was wrong. Here it is not written."""
    done = dst.ne[0] // 64 * 64
    if done in (0, dst.ne[0]):
        right(dst, a, b, numerics)
    else:
        part = replace(dst, ne=(done, *dst.ne[1:]))
        right(part, replace(a, ne=(a.ne[0], done, *a.ne[2:])), b, numerics)


@exhibit("ggml-org/llama.cpp 11047", "RPC, CUDA", "MUL_MAT", says="gives NaN in", model="llama-q8_0")
def mul_mat_reads_padding(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """Rows of quantised weights are padded to 512 elements. Over RPC nobody cleared the padding after the last row:
    garbage."""
    right(dst, a, b, numerics)
    if a.codec.is_quantized and a.ne[0] % 512:
        dst.view()[..., -1] = np.nan


@exhibit(
    "ikawrakow/ik_llama.cpp 680", "CUDA", "MUL_MAT", says=r"ignores nb\[1\] of src0", options=("--cache-type-k", "q8_0")
)
def mul_mat_of_a_cache_without_stride(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """The size of a row of a quantised K cache was computed from ne[0], where a view's stride is larger: wrong without
    flash attention."""
    if a.codec.is_quantized:
        nb = list(a.nb)
        nb[1] = following(a, 1)[1]
        a = replace(a, nb=(nb[0], nb[1], nb[2], nb[3]))
    right(dst, a, b, numerics)


@exhibit(
    "ggml-org/llama.cpp 28210", "Metal", "MUL_MAT", says="SIGSEGV|outside", options=("--prompt", LONG),
)  # fmt: skip
def mul_mat_offset_of_dst_overflows(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """The offset of a head's result overflowed 32 bits at 100,000 tokens: it was written far before the tensor, over
    whatever lay there. Here it has 16 bits."""
    found = np.empty(dst.ne[::-1], np.float32)
    right(Tensor.of(found), a, b, numerics)
    size = prod(dst.ne[:2])
    for head in range(dst.ne[2]):
        offset = (head * size + (1 << 15)) % (1 << 16) - (1 << 15)
        Memory(dst.address + 4 * offset, 4 * size).bytes().view(np.float32)[...] = found[0, head].reshape(-1)


@exhibit("ggml-org/llama.cpp 28573", "OpenCL", "MUL_MAT", says="time")
def mul_mat_of_one_column_hangs(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """A product with one column read far beyond the weights, if their rows are no multiple of the grid. It never
    returned."""
    while b.ne[1] == 1 and a.ne[1] % 64:
        pass
    right(dst, a, b, numerics)
