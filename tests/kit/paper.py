"""Nodes without ggml: what recipes build in a Scene, over arrays; and what right and wrong kernels make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from kit.nodes import dims
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ir import Dims
from ggml_backend_npu.ops import OWN
from quant import codec

GUARD, CANARY = 4096, 0xA5


class Paper:
    """In place of a Scene: tensors are IR tensors, `op` gives a node."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.roots: list[tuple[Tensor, NDArray[Any]]] = []

    def root(self, type: str, ne: tuple[int, ...], data: NDArray[Any]) -> Tensor:
        kind = codec(type)
        data = np.ascontiguousarray(data)
        whole = dims((*ne, *[1] * (4 - len(ne))))
        nb = dims(np.cumprod([kind.block_bytes, whole[0] // kind.block_size, *whole[1:3]]))
        tensor = Tensor("", type, whole, nb, Memory.of(data.reshape(-1).view(np.uint8)))
        self.roots.append((tensor, data))
        return tensor

    def view(self, source: Tensor, ne: Dims, nb: tuple[int, int, int], offset: int = 0) -> Tensor:
        return replace(source, ne=ne, nb=(source.nb[0], *nb), offset=source.offset + offset)

    def permute(self, source: Tensor, axes: Dims) -> Tensor:
        ne, nb = [0] * 4, [0] * 4
        for i, axis in enumerate(axes):
            ne[axis], nb[axis] = source.ne[i], source.nb[i]
        return replace(source, ne=dims(ne), nb=dims(nb))

    def fresh(self, type: str, ne: tuple[int, ...]) -> Tensor:
        """A contiguous tensor of what lay there before: any finite values."""
        n = prod(ne) // codec(type).block_size
        if type in ("f32", "f16"):
            return self.root(type, ne, self.rng.standard_normal(n).astype(codec(type).dtype))
        return self.root(type, ne, self.rng.integers(0, 60, (n, codec(type).block_bytes), dtype=np.uint8))

    def op(self, function: str, *sources: Any, params: bytes = b"") -> Node:
        name = function.upper()
        if name == "GET_ROWS":
            src, ids = sources
            return Node(name, self.fresh("i32" if src.type == "i32" else "f32", (src.ne[0], *ids.ne[:3])), sources)
        if name == "SET_ROWS":
            dst, src, ids = sources
            return Node(name, dst, (src, ids, dst))
        if name == "CPY":
            return Node(name, sources[1], sources)
        ne, type = sources[0].ne, "i32" if name == "ARGSORT" else sources[0].type
        if name == "SUM_ROWS":
            ne = (1, *ne[1:])
        return Node(name, self.fresh(type, ne), sources, params)


@dataclass(frozen=True)
class Results:
    """Of one node: the right one, that of a kernel, what lay there before, and whether bytes around it were written."""

    expected: Tensor
    actual: Tensor
    before: Tensor
    outside: bool


def copy_of(tensor: Tensor) -> Tensor:
    """The tensor over a copy of its span, between guards."""
    buffer = np.full(tensor.nbytes + 2 * GUARD, CANARY, np.uint8)
    buffer[GUARD : GUARD + tensor.nbytes] = tensor.memory.bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    return replace(tensor, memory=Memory.of(buffer), offset=GUARD)


def define(node: Node) -> None:
    """Computes the node by the backend's own definition."""
    op = OWN[node.op]
    sources = (*node.src, *(None,) * op.n_src)[: op.n_src]
    op.define(node.dst, *sources, **op.keywords(node))


def results(node: Node, kernel: Callable[[Node], None], right: Callable[[Node], None] = define) -> Results:
    """What the right kernel and another one make of a node."""
    before, expected, actual = (copy_of(node.dst) for _ in range(3))
    right(replace(node, dst=expected))
    kernel(replace(node, dst=actual))
    around = actual.memory.bytes()
    guards = np.concatenate([around[:GUARD], around[GUARD + actual.nbytes :]])
    return Results(expected, actual, before, bool((guards != CANARY).any()))
