"""What tests ask of nodes: a source that is there, the record of an op's parameters, sizes of four dimensions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Backend, Node, Tensor, default_backend
from ggml_backend_npu.ir import Dims
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call
from ggml_backend_npu.registry.params import Params


def src(node: Node, place: int = 0) -> Tensor:
    """A source that the node has."""
    found = node.src[place]
    assert found is not None
    return found


def record_of(op: str) -> type[Params]:
    """What an op's parameters are read as, which it has."""
    found = OWN[op].params
    assert found is not None
    return found


def dims(numbers: Iterable[int]) -> Dims:
    """Four numbers, as ne and nb are."""
    a, b, c, d = map(int, numbers)
    return a, b, c, d


def bind(node: Node) -> Call:
    """The call of the default backend's kernel that computes a node."""
    backend = default_backend()
    assert isinstance(backend, Backend)
    return backend.bind(node)


def multiplied(weights: NDArray[np.uint8], type: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the default backend's MUL_MAT gives of rows of blocks (rows, bytes) and columns (columns, k)."""
    y = np.full((len(x), len(weights)), 9, np.float32)
    bind(Node("MUL_MAT", Tensor.of(y), (Tensor.of(weights, type), Tensor.of(x))))()
    return y
