"""Nodes on paper whose kernels are wrong, and what a diagnosis says of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from kit.nodes import src as given
from kit.paper import Paper, Results, define, results
from kit.support import Placement
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor
from graph_runner.diagnosis import diagnose
from graph_runner.judging import noise

BINARY = ["add", "sub", "mul", "div"]
SHAPES = [((32, 5, 3, 1), 4), ((64, 7, 2, 2), 3), ((96, 4, 4, 2), 4)]


def found(node: Node, kernel: Callable[[Node], None], right: Callable[[Node], None] = define) -> str | None:
    made = results(node, kernel, right)
    return said(node, made)


def said(node: Node, made: Results) -> str | None:
    return diagnose(node, made.expected, made.actual, made.before, made.outside)


def floats(paper: Paper, ne: tuple[int, ...], place: Placement | None = None, type: str = "f32") -> Tensor:
    def fill(n: int) -> NDArray[Any]:
        return quant.quantize(paper.rng.standard_normal(n).astype(np.float32), type)

    return (place or Placement()).put(paper, type, (*ne, *[1] * (4 - len(ne))), fill)


def ints(paper: Paper, values: Any, place: Placement | None = None, dtype: type = np.int32) -> Tensor:
    array: NDArray[Any] = np.array(values, dtype)
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return (place or Placement()).hold(paper, array.dtype.name.replace("int", "i"), array, 0)


def ids_of(paper: Paper, ne: tuple[int, ...], n: int, place: Placement | None = None, dtype: type = np.int32) -> Tensor:
    """n different ids of each matrix."""
    order = paper.rng.permuted(np.tile(np.arange(ne[1]), (ne[3] * ne[2], 1)), axis=1)[:, :n]
    return ints(paper, order.reshape(1, ne[3], ne[2], n), place, dtype)


# kernels


def altered(index: int, **changes: Any) -> Callable[[Node], None]:
    """The right kernel with another source."""

    def kernel(node: Node) -> None:
        src = [*node.src]
        src[index] = replace(given(node, index), **changes)
        define(replace(node, src=tuple(src)))

    return kernel


def multiplied(node: Node, values: NDArray[Any] | None = None) -> None:
    node.dst.view()[...] = noise.exact(node) if values is None else values


# nodes, blocks


def soft_max(paper: Paper, ne: tuple[int, ...] = (12, 5, 4, 2), scale: float = 0.25, bias: float = 8.0) -> Node:
    mask = floats(paper, (ne[0], ne[1], 1, ne[3]))
    mask.view()[..., ::5] = -np.inf
    return paper.op("soft_max", floats(paper, ne), mask, floats(paper, (ne[2],)), params=struct.pack("2f", scale, bias))


def rope(paper: Paper, **changes: Any) -> Node:
    p = {"mode": 0, "base": 5000.0, "scale": 0.5} | changes
    params = struct.pack("5i6f5i", 0, 16, p["mode"], 0, 512, p["base"], p["scale"], 0, 1, 32, 1, 0, 0, 0, 0, 0)
    return paper.op("rope", floats(paper, (24, 3, 5)), ints(paper, [0, 3, 9, 2, 7]), floats(paper, (8,)), params=params)


def swap(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    blocks = blocks.copy()
    blocks[..., 2:] = (blocks[..., 2:] << 4) | (blocks[..., 2:] >> 4)
    return blocks
