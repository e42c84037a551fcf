"""PyTorch as a device of ggml: a graph becomes a list of torch calls on views of the device's bytes, made once."""

from __future__ import annotations

import os
import warnings
from collections.abc import Hashable
from typing import Any

from ggml_backend_npu import DeviceError, Graph, Node, Program, QueuedDevice

try:
    import torch
except ImportError as error:
    raise DeviceError(f"torch cannot be imported ({error}): pip install torch") from None

from .kernels import KERNELS, refusal
from .memory import Bound, Memory, Value

warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is only read


class Torch(QueuedDevice):
    """The device that TORCH_DEVICE names; without it the CPU."""

    name, type, ops = "TORCH0", "gpu", tuple(KERNELS)

    def open(self) -> None:
        """Finds the device. Raises DeviceError if torch does not know it, or it is not there."""
        name = os.environ.get("TORCH_DEVICE", "cpu")
        try:
            self._device = torch.device(name)
            torch.zeros(1, device=self._device).cpu()
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise DeviceError(f"TORCH_DEVICE {name!r}: {str(error).strip().splitlines()[0]}") from None
        torch.set_float32_matmul_precision("highest")
        self.description, self.memory = _described(self._device)
        keeps = os.environ.get("TORCH_KEEP", "0" if self._device.type == "cpu" else "1") != "0"
        self._room = self.memory // 2 if keeps else 0
        self._rounds = os.environ.get("TORCH_ROUND", "1") != "0"
        self._waits: list[Any] = []  # host memory that the queue is yet to read or write
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._holder: Any = (
            None  # the first graph that was captured: a pool of which no graph is left takes no other one
        )
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    # memory

    def alloc(self, size: int) -> Memory:
        """Allocates a buffer of `size` bytes, set to 0."""
        return Memory(size, self._device)

    def free(self, handle: Memory) -> None:
        """Gives back the room of what was kept. torch frees the bytes when nobody holds a view."""
        self._forget(handle)

    def copy_in(self, handle: Memory, offset: int, data: Any) -> None:
        """Copies bytes from the host into a buffer and waits."""
        self._forget(handle)
        handle.bytes[offset : offset + data.size].copy_(torch.from_numpy(data))

    def copy_out(self, handle: Memory, offset: int, out: Any) -> None:
        """Copies bytes from a buffer to the host and waits."""
        torch.from_numpy(out).copy_(handle.bytes[offset : offset + out.size])

    def copy(self, source: Memory, source_offset: int, target: Memory, target_offset: int, size: int) -> None:
        """Copies bytes between buffers and waits."""
        self.copy_async(source, source_offset, target, target_offset, size)
        self.synchronize()

    def fill(self, handle: Memory, offset: int, size: int, value: int) -> None:
        """Sets bytes of a buffer to one value and waits."""
        self._forget(handle)
        handle.bytes[offset : offset + size].fill_(value)
        self.synchronize()

    def copy_in_async(self, handle: Memory, offset: int, data: Any) -> None:
        """Queues a copy from the host; `data` is kept until `synchronize`."""
        self._forget(handle)
        self._waits.append(data)
        handle.bytes[offset : offset + data.size].copy_(torch.from_numpy(data), non_blocking=True)

    def copy_out_async(self, handle: Memory, offset: int, out: Any) -> None:
        """Queues a copy to the host; `out` is kept until `synchronize`."""
        self._waits.append(out)
        torch.from_numpy(out).copy_(handle.bytes[offset : offset + out.size], non_blocking=True)

    def copy_async(self, source: Memory, source_offset: int, target: Memory, target_offset: int, size: int) -> None:
        """Queues a copy of bytes between buffers, or within one."""
        self._forget(target)
        given = source.bytes[source_offset : source_offset + size]
        target.bytes[target_offset : target_offset + size].copy_(given.clone() if source is target else given)

    def _forget(self, handle: Memory) -> None:
        self._room += sum(kept.nbytes for kept in handle.kept.values())
        handle.forget()

    # the queue: the device's current stream. A CPU has none: calls return when they are done

    def synchronize(self) -> None:
        """Waits until the queue is done."""
        self.wait_for(self.record())
        self._waits.clear()

    def record(self) -> Any:
        """Returns an event that happens when everything queued so far is done."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    def wait(self, event: Any) -> None:
        """Makes the queue wait for an event."""
        if event is not None:
            event.wait()

    def wait_for(self, event: Any) -> None:
        """Makes the host wait for an event."""
        if event is not None:
            event.synchronize()

    # nodes

    def refusal(self, node: Node) -> str | None:
        """Returns why the device does not take a node, None if it does."""
        return refusal(node)

    def compile(self, graph: Graph) -> Program:
        """Binds the nodes of a graph to calls of torch, and captures them if the device is CUDA's."""
        for node in graph.nodes:
            assert node.dst.buffer is not None
            memory: Memory = node.dst.buffer.handle
            memory.is_fixed = False
            self._forget(memory)
        return _Program(self, graph)

    def bind(self, graph: Graph) -> Bound:
        """Returns the calls of a graph. Weights are kept while there is room."""
        found = Bound(self._kept, self._rounds)
        for node in graph.nodes:
            found.add(node, KERNELS[node.op])
        return found

    def _kept(self, memory: Memory, key: Hashable, size: int, make: Value) -> Any:
        if key not in memory.kept:
            if not memory.is_fixed or size > self._room:
                return None
            memory.kept[key] = make()
            self._room -= memory.kept[key].nbytes
        return memory.kept[key]

    def captured(self, bound: Bound) -> Any:
        """Returns a CUDA graph of the calls; None if CUDA cannot capture them."""
        if self._side is None:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._side):
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    bound.run()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            warnings.warn(f"CUDA captures no graph of {len(bound.calls)} calls: {error}", stacklevel=1)
            return None
        self._holder = self._holder or graph
        return graph


class _Program:
    """A graph's calls. The first run makes them one by one; the second captures them, if the device can."""

    def __init__(self, device: Torch, graph: Graph) -> None:
        self._device, self._graph = device, graph
        self._bind()

    def _bind(self) -> None:
        self._bound, self._captured, self._runs = self._device.bind(self._graph), None, 0

    @torch.no_grad()
    def __call__(self) -> None:
        if not self._bound.is_right():
            self._bind()
        self._runs += 1
        if self._runs == 2:
            self._captured = self._device.captured(self._bound)
        if self._captured is not None:
            self._captured.replay()
        else:
            self._bound.run()


def _described(device: torch.device) -> tuple[str, int]:
    """Returns a device's description, and its memory in bytes."""
    name, size = str(device), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        found = module.get_device_properties(device)
        name, size = getattr(found, "name", name), getattr(found, "total_memory", size)
    return f"{name} by torch {torch.__version__}", size
