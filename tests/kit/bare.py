"""Nodes without memory: enough to ask who takes them."""

from __future__ import annotations

import struct
from math import prod

from kit.nodes import dims

from ggml_backend_npu import Memory, Node, Tensor
from quant import codec

ROW = (64, 4, 1, 1)


def tensor(type: str, ne: tuple[int, ...] = ROW, gap: int = 0) -> Tensor:
    """A tensor without memory, whose dimension `gap` has a gap after each of its elements, rows, ..."""
    of = codec(type)
    units = [of.block_bytes, ne[0] // of.block_size, *ne[1:3]]
    nb = [prod(units[: i + 1]) * (2 if gap and i >= gap - 1 else 1) for i in range(4)]
    return Tensor(type, type, dims(ne), dims(nb), Memory(0, 0))


def node(op: str, dst: str | Tensor, *src: str | Tensor | None, **params: int | float) -> Node:
    """A node over tensors, or over contiguous ones of types; i2 = 5: word 2 of its op_params is 5, f2: as a float."""
    tensors = [tensor(t) if isinstance(t, str) else t for t in (dst, *src)]
    assert tensors[0] is not None
    words = bytearray(64)
    for word, value in params.items():
        struct.pack_into(word[0], words, 4 * int(word[1:]), value)
    return Node(op, tensors[0], tuple(tensors[1:]), bytes(words))


STRIDED_F32, STRIDED_Q8 = tensor("f32", gap=2), tensor("q8_0", gap=2)
