"""Nodes that come again and again, step by step: one that has not changed is not converted twice."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.convert import PackedAt, Read, Storage
from ggml_backend_npu.ggml.graph_read import N_SRC, ROW, SRC, VIEW_SRC, int64s
from ggml_backend_npu.ggml.lib import Ggml
from quant.kernels.jit import callback, copy, inlined
from quant.kernels.late import types

_MOST_KNOWN = 8192
_WHOLE = structs.TENSOR.size // 8  # words of a tensor, with its name
_MOST_WORDS = 1 + (1 + N_SRC) * (_WHOLE + ROW)


@inlined
def _put(tensor: int, words: int, into: int) -> Any:
    """Copies the first words of a tensor. Returns where the next ones go."""
    copy(tensor, into, types.int64(8 * words))
    return types.int64(into + 8 * words)


@callback(types.int64(types.int64, types.int64))
def _gather(node: int, into: int) -> Any:
    """Copies all that the conversion of a node depends on: the node, its sources, and what these are views of. Returns
    how many bytes."""
    int64s(into, 1)[0] = node
    end = _put(node, _WHOLE, types.int64(into + 8))
    words = int64s(node, _WHOLE)
    for k in range(N_SRC):
        if words[SRC + k] != 0:
            end = _put(words[SRC + k], _WHOLE, end)
    if words[VIEW_SRC] != 0:
        end = _put(words[VIEW_SRC], ROW, end)
    for k in range(N_SRC):
        if words[SRC + k] != 0:
            root = int64s(words[SRC + k], _WHOLE)[VIEW_SRC]
            if root != 0:
                end = _put(root, ROW, end)
    return end - into


class Reader:
    """Reads nodes of a ggml.

    packed  finds what a tensor's data lies in: see `convert.tensor`
    """

    def __init__(self, ggml: Ggml, packed: PackedAt = convert.nowhere) -> None:
        self._ggml, self._packed = ggml, packed
        self._known: dict[bytes, Read] = {}
        self._words = np.empty(_MOST_WORDS, np.int64)
        self._into = self._words.ctypes.data

    def forget(self) -> None:
        """Forgets all nodes; called after tensors moved, when other tensors are packed."""
        self._known.clear()

    def __call__(self, address: int) -> Read:
        """The node at an address."""
        key = ctypes.string_at(self._into, _gather(address, self._into))
        read = self._known.get(key)
        if read is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            read = self._known[key] = Read(
                address,
                convert.node(self._ggml, address, self._packed),
                tuple(convert.roots(self._ggml, address)),
                convert.view_source_of(address),
                self._storage(address),
                tuple(self._storage(source) if source else None for source in convert.sources_of(address)),
            )
        return read

    def _storage(self, address: int) -> Storage:
        address = convert.view_source_of(address) or address
        buffer = convert.buffer_of(address)
        usage = self._ggml.ggml_backend_buffer_get_usage(buffer) if buffer else 0
        found = convert.tensor(self._ggml, address, packed=self._packed)
        is_leaf = convert.is_leaf(address)
        is_set = is_leaf and usage == structs.USAGE_COMPUTE
        return Storage(address, found, buffer, is_set, usage == structs.USAGE_WEIGHTS, is_leaf)
