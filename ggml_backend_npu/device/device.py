"""A device as one class: memory that the host cannot read, and a graph to compile. See docs/vendor.md."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend import NO_KERNEL

if TYPE_CHECKING:
    from ggml_backend_npu.ir import Graph, Node

Bytes = NDArray[np.uint8]
Place = tuple[Any, int]  # a handle, and an offset in bytes
Program = Callable[..., None]


class Device:
    """A device of ggml, made by subclassing. `ggml_backend_npu.register(MyNPU())` tells ggml of it.

    name, description  in ggml's list of devices; each of several devices needs its own name: XNPU0, XNPU1
    type       "gpu": weights, caches and activations are on it when n_gpu_layers or a model's device list says so;
               "accel": every context uses it at once, for weights alone
    memory     bytes in all; `alloc` is never asked for more
    alignment  of tensors in a buffer, in bytes, a power of two
    largest    the largest buffer, in bytes; None: any size
    ops        the ops that it may take, by ggml's names (`ggml_backend_npu.Node.op`)
    constants  whether the places of tensors are constants of a program. If so, a program is called without arguments,
               and a graph is compiled again for new places. If not, a program is called with a list of places (handle,
               offset), one for each of `Graph.roots`, and graphs that differ only in these are compiled once

    A handle is whatever `alloc` returns. A call that cannot be done raises: then the graph fails, with one line that
    names the device, the call and its size. Calls come from the threads that ggml calls in: one at a time for one
    context, and possibly at the same time for several contexts.
    """

    name: str = "XNPU0"
    description: str = "a device in Python"
    type: Literal["gpu", "accel"] = "gpu"
    memory: int = 8 << 30
    alignment: int = 64
    largest: int | None = None
    ops: Collection[str] = ()
    constants: bool = True

    is_open: bool = False  # set by who calls `open`

    def open(self) -> None:
        """Finds the chip; called once, before anything else. Raises DeviceError, which says in one line why there is
        none."""

    def alloc(self, size: int) -> Any:
        """Allocates `size` bytes and returns a handle. Raises where there is no memory; then ggml does without, or
        tells the user."""
        raise NotImplementedError

    def free(self, handle: Any) -> None:
        """Frees the memory of a handle. Not needed where Python's own garbage collection frees it."""

    def copy_in(self, handle: Any, offset: int, data: Bytes) -> None:
        """Copies bytes from the host; they are there when it returns. It need not wait for what is queued: the caller
        has synchronised."""
        raise NotImplementedError

    def copy_out(self, handle: Any, offset: int, out: Bytes) -> None:
        """Copies bytes to the host, into `out`; otherwise as `copy_in`."""
        raise NotImplementedError

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        """Copies bytes within the device; otherwise as `copy_in`. Default: by way of the host."""
        data = np.empty(size, np.uint8)
        self.copy_out(source, source_offset, data)
        self.copy_in(target, target_offset, data)

    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        """Sets bytes to one value; otherwise as `copy_in`. Default: by way of the host."""
        self.copy_in(handle, offset, np.full(size, value, np.uint8))

    def refusal(self, node: Node) -> str | None:
        """Why it does not take a node of one of its ops, in a few words; None where it takes it. It is asked before the
        node has any memory. Another device computes a refused node."""
        return None if node.op in self.ops else NO_KERNEL

    def compile(self, graph: Graph) -> Program:
        """Makes a program of a graph: once for each graph; the program is then called for each token.

        Tensors say where they lie: `tensor.buffer.handle`, `tensor.start`. The nodes are in an order in which they may
        run.
        """
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when everything that was queued is done. Raises what went wrong in it."""


class QueuedDevice(Device):
    """A device that works later: programs and the copies of this class go into one queue, and are done in order. Arrays
    are valid until `synchronize`.

    ggml calls `synchronize` before it reads results, and before it sets what is read.
    """

    def copy_in_async(self, handle: Any, offset: int, data: Bytes) -> None:
        """As `copy_in`, in the queue."""
        raise NotImplementedError

    def copy_out_async(self, handle: Any, offset: int, out: Bytes) -> None:
        """As `copy_out`, in the queue."""
        raise NotImplementedError

    def copy_async(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        """As `copy`, in the queue."""
        raise NotImplementedError

    def record(self) -> Any:
        """An event that happens when everything that is in the queue now is done."""
        raise NotImplementedError

    def wait(self, event: Any) -> None:
        """Makes everything that is queued from now on wait for an event of this device."""
        raise NotImplementedError

    def wait_for(self, event: Any) -> None:
        """Returns when an event has happened."""
        raise NotImplementedError
