"""A case of a compiled kernel beside its definition, and arrays for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kit.nodes import bind
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from quant.kernels.jit import CFunction

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """run  gives outputs, by whatever engine is in force
    kernels  that it has run
    define   gives the same without a kernel; None: `run` does, by the reference engine
    ulp      of a float32 output
    names    what each output is of, for a message
    """

    run: Callable[[], list[Array]]
    kernels: tuple[CFunction, ...]
    define: Callable[[], list[Array]] | None = None
    ulp: int = 0
    names: Callable[[], list[str]] | None = None


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def positive(*shape: int, seed: int = 0) -> Array:
    """Below 1, so that sums of products cancel nothing: every order of them is within some ulp."""
    return np.random.default_rng(seed).random(shape, np.float32)


def sevens(*shape: int, dtype: Any = np.float32) -> Array:
    """A dst of which every element has to be written."""
    return np.full(shape, 7, dtype)


def node(op: str, dst: Array, *src: Array, params: bytes = b"", types: tuple[str | None, ...] = ()) -> list[Array]:
    """What the kernel of an op leaves in dst."""
    types = (*types, *(None,) * 8)
    sources = tuple(Tensor.of(array, type) for array, type in zip(src, types[1:], strict=False))
    bind(Node(op, Tensor.of(dst, types[0]), sources, params))()
    return [dst]
