"""Small graphs built and computed through ggml's own API, on any of its devices: one op at a time, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.guard import interrupts_wait
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.registration import failures_of

_CONTEXT_BYTES = 1 << 22


class Builder:
    """A ggml context with tensors on one device, computed there. Raises ValueError for a device that ggml does not
    have.

        with Builder(ggml, "NPU") as build:
            table = build.tensor("q8_0", (64, 10))
            ids = build.tensor("i32", (3,))
            rows = build.op("get_rows", table, ids)
            build.set(table, blocks)
            build.set(ids, np.array([1, 5, 5], np.int32))
            status = build.compute(rows)
            result = build.get(rows)

    Tensors are addresses; `inputs` are those that `tensor` made. Memory is allocated at the first `set` or `compute`:
    make all tensors and ops before that. Every tensor that is not a view has its own bytes, so that a write outside a
    view shows in `get` of the view's root; see `graph` for results that share memory.
    """

    def __init__(self, ggml: Ggml, device: str) -> None:
        self.ggml = ggml
        handle = ggml.ggml_backend_dev_by_name(device.encode())
        if handle is None:
            raise ValueError(f"unknown device {device!r}")
        self._device, self.failures = handle, failures_of(device)
        self._backend = ggml.ggml_backend_dev_init(handle, None)
        self._context = ggml.ggml_init(structs.InitParams(_CONTEXT_BYTES, None, True))
        self.inputs: list[int] = []
        self._buffer: int | None = None
        self._allocator: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._buffer is not None:
            self.ggml.ggml_backend_buffer_free(self._buffer)
        if self._allocator is not None:
            self.ggml.ggml_gallocr_free(self._allocator)
        self.ggml.ggml_free(self._context)
        self.ggml.ggml_backend_free(self._backend)

    def tensor(self, type: str, ne: tuple[int, ...]) -> int:
        """A new contiguous tensor of ne, up to 4 dimensions, fastest first."""
        dims = (ctypes.c_int64 * 4)(*ne, *[1] * (4 - len(ne)))
        self.inputs.append(int(self.ggml.ggml_new_tensor(self._context, self.ggml.type_numbers[type], 4, dims)))
        return self.inputs[-1]

    def view(self, source: int, ne: tuple[int, int, int, int], nb: tuple[int, int, int], offset: int = 0) -> int:
        """ggml_view_4d: nb1..nb3 and offset in bytes; nb0 is the type's size."""
        return int(self.ggml.ggml_view_4d(self._context, source, *ne, *nb, offset))

    def permute(self, source: int, axes: tuple[int, int, int, int]) -> int:
        """ggml_permute: dimension i of the source becomes dimension axes[i]."""
        return int(self.ggml.ggml_permute(self._context, source, *axes))

    def function(self, name: str) -> Any:
        """ggml_<name>, typed as the op that it makes or changes says. Raises AttributeError."""
        name = f"ggml_{name}"
        kinds = next((op.functions[name] for op in OWN.values() if name in op.functions), None)
        return getattr(self.ggml, name) if kinds is None else self.ggml.typed(name, kinds)

    def op(self, function: str, *arguments: Any) -> int:
        """Calls ggml_<function>(context, *arguments), and returns the node."""
        return int(self.function(function)(self._context, *arguments))

    def supported(self, node: int) -> bool:
        """ggml_backend_dev_supports_op: whether the device takes the node."""
        return bool(self.ggml.ggml_backend_dev_supports_op(self._device, node))

    def _allocate(self) -> None:
        if self._buffer is None and self._allocator is None:
            self._buffer = self.ggml.ggml_backend_alloc_ctx_tensors(self._context, self._backend)

    def is_allocated(self, tensor: int) -> bool:
        """Whether a tensor has memory: in a `graph`, a tensor that is not used has none."""
        return convert.data_of(tensor) != 0

    def nbytes(self, tensor: int) -> int:
        """ggml_nbytes of a tensor."""
        return int(self.ggml.ggml_nbytes(tensor))

    def set(self, tensor: int, data: NDArray[Any]) -> None:
        """Sets all bytes of a tensor. Raises ValueError where the array has another number of bytes."""
        self._allocate()
        data = np.ascontiguousarray(data)
        if data.nbytes != self.nbytes(tensor):
            raise ValueError(f"data of {data.nbytes} bytes: the tensor has {self.nbytes(tensor)}")
        if data.nbytes:
            self.ggml.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def get(self, tensor: int) -> NDArray[np.uint8]:
        """All bytes of a tensor, including the gaps of a view."""
        data = np.empty(self.nbytes(tensor), np.uint8)
        if data.nbytes:
            self.ggml.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, data.nbytes)
        return data

    def compute(self, *nodes: int) -> int:
        """Computes the nodes and what they depend on; returns ggml's status (0 = success, -1 = failed)."""
        return self.run(self.graph_of(*nodes))

    def graph_of(self, *nodes: int) -> int:
        """The graph that computes the nodes, each in memory of its own; `run` computes it, as often as wanted."""
        self._allocate()
        return self._expanded(nodes)

    def graph(self, *outputs: int) -> int:
        """The graph that computes the outputs, with memory shared as in llama.cpp: a result may lie where an earlier
        one was that nobody reads any more. Use it in place of `compute`, before any `set`; `run` computes it, as often
        as wanted. Raises MemoryError."""
        for tensor in (*self.inputs, *outputs):  # else the last reader of an input may overwrite it
            self.ggml.ggml_set_output(tensor)
        graph = self._expanded(outputs)
        self._allocator = self.ggml.ggml_gallocr_new(self.ggml.ggml_backend_get_default_buffer_type(self._backend))
        if not self.ggml.ggml_gallocr_alloc_graph(self._allocator, graph):
            raise MemoryError(f"no memory for a graph of {self.ggml.ggml_graph_n_nodes(graph)} nodes")
        return graph

    def _expanded(self, nodes: tuple[int, ...]) -> int:
        graph = int(self.ggml.ggml_new_graph(self._context))
        for node in nodes:
            self.ggml.ggml_build_forward_expand(graph, node)
        return graph

    def run(self, graph: int) -> int:
        """Computes a graph; returns ggml's status."""
        with interrupts_wait(self.failures):
            return int(self.ggml.ggml_backend_graph_compute(self._backend, graph))

    def job(self, graph: int) -> Callable[[], int]:
        """`run` of the graph without its handling of Ctrl-C, which takes longer than a small graph: for measurements,
        which have `interrupts_wait` around them."""
        return partial(self.ggml.ggml_backend_graph_compute, self._backend, graph)

    def use_threads(self, count: int) -> None:
        """Sets how many threads the device may use."""
        registry = self.ggml.ggml_backend_dev_backend_reg(self._device)
        function = self.ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        structs.SetThreads(function)(self._backend, count)

    def as_tensor(self, tensor: int) -> Tensor:
        """The tensor as an `ir.Tensor`."""
        return convert.tensor(self.ggml, tensor, writable=True)

    def as_node(self, node: int) -> Node:
        """The node as an `ir.Node`."""
        return convert.node(self.ggml, node)
