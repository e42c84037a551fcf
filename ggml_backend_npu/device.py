"""What a device is: one class, with memory that the host cannot read, and a graph to compile. See docs/vendor.md."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend import NO_KERNEL
from ggml_backend_npu.ir import Graph, Node

Bytes = NDArray[np.uint8]
Place = tuple[Any, int]  # a handle, and an offset in bytes
Program = Callable[..., None]


class Device:
    """A device of ggml, made by subclassing. `ggml_backend_npu.register(MyNPU())` tells ggml of it.

    name, description  in ggml's list of devices; of several each has a name of its own: XNPU0, XNPU1
    type        "gpu": when n_gpu_layers or a model's device list says so, weights, caches and activations are on it;
                "accel": every context uses it at once, for weights alone
    memory      bytes in all; `alloc` is not asked for more
    alignment   of tensors in a buffer, in bytes, a power of two
    largest     bytes of a buffer at most; None: any
    ops         the ops that it may take, by ggml's names (`ggml_backend_npu.Node.op`)
    constants   whether places of tensors are constants of a program: it is called with nothing, and compiled for each
                place. Else it is called with a list of places (handle, offset), one for each of `Graph.roots`, and
                graphs that differ in nothing else are compiled once

    A handle is whatever `alloc` returns. A call that cannot be done raises: the graph fails, with one line that names
    the device, the call and its size. Calls come from the threads that ggml calls in, of one device one at a time or,
    of several contexts, together.
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
        """Finds the chip, once, before anything else. Raises DeviceError, which says in a line why there is none."""

    def alloc(self, size: int) -> Any:
        """Memory of so many bytes. Raises where there is none; then ggml does without, or tells the user."""
        raise NotImplementedError

    def free(self, handle: Any) -> None:
        """Gives memory back. What Python's own garbage collection frees needs nothing here."""

    def copy_in(self, handle: Any, offset: int, data: Bytes) -> None:
        """Copies bytes from the host; they are there when it returns. What is queued is not waited for: who calls has
        synchronised."""
        raise NotImplementedError

    def copy_out(self, handle: Any, offset: int, out: Bytes) -> None:
        """Copies bytes to the host, into `out`; else as `copy_in`."""
        raise NotImplementedError

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        """Copies bytes within the device; else as `copy_in`. By way of the host, where a device has nothing better."""
        data = np.empty(size, np.uint8)
        self.copy_out(source, source_offset, data)
        self.copy_in(target, target_offset, data)

    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        """Sets bytes to one value; else as `copy_in`. By way of the host, where a device has nothing better."""
        self.copy_in(handle, offset, np.full(size, value, np.uint8))

    def refusal(self, node: Node) -> str | None:
        """Why it does not take a node of one of its ops, in a few words; None where it does. Asked before the node has
        any memory. Another device then computes it."""
        return None if node.op in self.ops else NO_KERNEL

    def compile(self, graph: Graph) -> Program:
        """Makes a program of a graph: once for each, and called for each token. Tensors say where they lie:
        `tensor.buffer.handle`, `tensor.start`; the graph's nodes are in an order in which they may run."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Returns when all that was queued is done. Raises what went wrong in it."""


class QueuedDevice(Device):
    """A device that does things later: programs and the copies of this class go into one queue and are done in order.
    Arrays are valid until `synchronize`.

    ggml calls `synchronize` before it reads what was computed, and before it sets what is read.
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
        """An event that has happened when all is done that is in the queue now."""
        raise NotImplementedError

    def wait(self, event: Any) -> None:
        """What comes into the queue from now on is done after an event of this device's."""
        raise NotImplementedError

    def wait_for(self, event: Any) -> None:
        """Returns when an event has happened."""
        raise NotImplementedError
