"""Faults of MUL_MAT, and one that only rounds."""

from dataclasses import replace

import numpy as np
from kit.faults import fault, named
from kit.nodes import src

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.matmul import MulMat

WEIGHTS: dict[object, np.ndarray] = {}


@fault("MUL_MAT", says="gives nothing but numbers of f16")
def mul_mat_in_halves(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL_MAT with sums in float16."""
    x = a.view().astype(np.float32).repeat(b.ne[2] // a.ne[2], axis=1)
    y = b.view().astype(np.float16).astype(np.float32)
    total = np.zeros(dst.ne[::-1], np.float16)
    for i in range(a.ne[0]):
        total += (y[..., :, None, i] * x[..., None, :, i]).astype(np.float16)
    dst.view()[...] = total


@fault("MUL_MAT", at=lambda node: 1 < src(node).ne[2] < src(node, 1).ne[2], says="repeats src0 as a whole")
def mul_mat_other_heads(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT whose head h meets head h % n of src0, in place of h // n."""
    for head in range(b.ne[2]):
        heads = dst, a, b
        places = head, head % a.ne[2], head
        parts = [
            replace(tensor, ne=(*tensor.ne[:2], 1, tensor.ne[3]), offset=tensor.offset + place * tensor.nb[2])
            for tensor, place in zip(heads, places, strict=True)
        ]
        OWN["MUL_MAT"].bind(Node("MUL_MAT", parts[0], tuple(parts[1:])), numerics)()


@fault("MUL_MAT", at=lambda node: node.dst.ne[0] == 354, never=("writes nothing",))
def mul_mat_whole_tiles(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT that writes whole tiles of 64 rows, and nothing of what is left."""
    done = dst.ne[0] // 64 * 64
    if done == 0:
        OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
    else:
        rows = replace(a, ne=(a.ne[0], done, *a.ne[2:]))
        part = replace(dst, ne=(done, *dst.ne[1:]))
        OWN["MUL_MAT"].bind(Node("MUL_MAT", part, (rows, b)), numerics)()


@fault("MUL_MAT", never=("writes nothing", "leaves out"))
def mul_mat_accumulates(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT that adds to what its output holds."""
    before = dst.view().copy()
    OWN["MUL_MAT"].define(dst, a, b, MulMat(), numerics)
    dst.view()[...] += before


@fault("MUL_MAT", model="llama-q4_0")
def mul_mat_swaps_nibbles(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT of q4_0 weights with the two nibbles of each byte swapped."""
    if a.type == "q4_0":
        blocks = a.view().copy()
        blocks[..., 2:] = blocks[..., 2:] << 4 | blocks[..., 2:] >> 4
        a = Tensor.of(blocks.reshape(*blocks.shape[:3], -1), "q4_0")
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()


@fault("MUL_MAT", model="llama-q8_0", never=("permutes",))
def mul_mat_one_scale_a_row(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT of q8_0 weights with the first scale of each row for all its blocks."""
    if a.type == "q8_0":
        blocks = a.view().copy()
        blocks[..., :2] = blocks[..., :1, :2]
        a = Tensor.of(blocks.reshape(*blocks.shape[:3], -1), "q8_0")
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()


@fault("MUL_MAT", "sources", rounded=False)
def mul_mat_rounds_its_source(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT that rounds its float source to bfloat16 in place, after it has read it."""
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (a, b)), numerics)()
    Memory(b.address, b.nbytes).bytes().view(np.uint32)[...] &= 0xFFFF0000


@fault("MUL_MAT", "runs", at=named("kq-0"), step=1, repeat=8, rounded=False, alone=False)
def mul_mat_planned_by_name(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> None:
    """MUL_MAT that widens its weights once for each name of its output and shape of theirs."""
    key = dst.name, a.ne
    WEIGHTS.setdefault(key, a.view().copy())
    OWN["MUL_MAT"].bind(Node("MUL_MAT", dst, (Tensor.of(WEIGHTS[key]), b)), numerics)()


@fault("MUL_MAT", "ends", failure=("MemoryError",), rounded=False)
def mul_mat_has_no_memory(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL_MAT that asks for more memory than there is."""
    bytearray(1 << 60)


@fault("MUL_MAT", "right")
def right_mul_mat_in_doubles(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """MUL_MAT with sums in float64: right, but for rounding."""
    x = a.view().astype(np.float64).repeat(b.ne[2] // a.ne[2], axis=1)
    y = b.view().astype(a.view().dtype).astype(np.float64)
    dst.view()[...] = y @ x.swapaxes(-1, -2)
