"""A `Device` as a `Backend`: it compiles graphs, and computes nodes in its own memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.backend.options import DeviceError, Options
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.device.checked import CheckedMemory
from ggml_backend_npu.device.checked_queue import CheckedQueue
from ggml_backend_npu.device.device import Device, Place, Program, QueuedDevice
from ggml_backend_npu.device.faults import Checks
from ggml_backend_npu.device.files import load_devices
from ggml_backend_npu.device.memory import OpaqueMemory, OpaqueQueue
from ggml_backend_npu.ggml import modes
from ggml_backend_npu.ir import Graph, Memory, Node, Tensor, overlapping
from ggml_backend_npu.registry.calls import KernelError, UserCode, calling
from ggml_backend_npu.registry.entry import Call

_MOST_PROGRAMS = 1024


class DeviceBackend(AnyBackend):
    """What a device computes. `plan` compiles a whole graph.

    checks  of each call that concerns the device's memory, from the time `memory` is called; None: none is checked
    """

    def __init__(self, device: Device, options: Options | None = None) -> None:
        own = Options(memory="device", memory_limit=device.memory, device_type=device.type, ops="all", fusion="off")
        super().__init__(device.name, options=options or own)
        self.device, self.description = device, device.description
        self.checks: Checks | None = None
        self._programs: dict[Any, Program] = {}
        self._own: OpaqueMemory | None = None

    @staticmethod
    @cache
    def of(device: Device) -> DeviceBackend:
        """The backend that a device is registered as; always the same one for a device."""
        return DeviceBackend(device)

    def like(self, *, options: Options | None = None) -> DeviceBackend:
        """A backend of the same device, with the same or other options."""
        return DeviceBackend(self.device, options or self.options)

    def memory(self) -> OpaqueMemory:
        """The device's memory. Opens the device the first time, which may raise DeviceError."""
        if not self.device.is_open:
            before = modes.modes()
            try:
                with calling(self.name, "open"):
                    self.device.open()
                    modes.put_back(before)  # an SDK's library may change them when it is loaded
            except KernelError as error:
                raise error.__cause__ if isinstance(error.__cause__, DeviceError) else DeviceError(str(error)) from None
            self.device.is_open = True
        self.description = self.device.description  # `open` may set it
        if isinstance(self.device, QueuedDevice):
            return OpaqueQueue(self.device) if self.checks is None else CheckedQueue(self.device, self.checks)
        return OpaqueMemory(self.device) if self.checks is None else CheckedMemory(self.device, self.checks)

    @property
    def op_names(self) -> Collection[str]:
        """The device's ops, and those of `ops`."""
        return {*self.device.ops, *self.ops}

    def kernel_refusal(self, node: Node) -> str | None:
        """Why the device does not take the node. Raises KernelError if it cannot say."""
        if node.op in self.ops or node.op not in self.device.ops:  # coverage asks what another op would bring
            return super().kernel_refusal(node)
        with calling(self.name, f"refusal of {node}"):
            reason: object = self.device.refusal(node)  # a user's may return anything
        if reason is not None and not isinstance(reason, str):
            raise KernelError(f"{self.name}: refusal of {node}: must give a reason or None, and gave {reason!r}")
        return reason

    def bind(self, node: Node) -> Call:
        """The call that computes one node, compiled alone; its tensors lie in the device's memory. Raises
        KernelError."""
        self.check(node)
        return self._compiled(Graph((node,), ((None,) * len(node.src),), ((node.dst,),)))

    def plan(self, graph: Graph) -> Plan:
        """The graph's nodes as one program. Raises KernelError where the device does not take a node, or fails to
        compile."""
        graph = graph.without_empty()
        if not graph.nodes:
            return Plan((), Counter(), Counter())
        for node in graph.nodes:
            self.check(node)
        n_ops = Counter(node.op for node in graph.nodes)
        if any(tensor.buffer is None for tensor in graph.tensors()):
            return Plan(tuple((node, self._by_way_of_the_host(node)) for node in graph.nodes), n_ops, Counter())
        return Plan(((_Whole(self.name, graph), self._compiled(graph)),), n_ops, Counter())

    def compute(self, node: Node) -> None:
        """Computes a node whose tensors lie in host memory, over copies in the device's memory. Raises KernelError."""
        self.check(node)
        if self._own is None:
            self._own = self.memory()
        memory, tensors = self._own, [t for t in (node.dst, *node.src) if t is not None and t.nbytes]
        groups = [_Group(memory, _over_roots(group)) for group in overlapping(map(_root, tensors))]
        try:
            moved = {id(t): group.there(t) for t in tensors for group in groups if group.has(t)}
            src = tuple(moved.get(id(t), t) if t is not None else None for t in node.src)
            there = replace(node, dst=moved[id(node.dst)], src=src)
            Plan(((node, self.bind(there)),), Counter(), Counter()).run()
            memory.synchronize()
            for group in groups:
                group.take_back(writes=group.has(node.dst))
        finally:
            for group in groups:
                group.release()

    def _by_way_of_the_host(self, node: Node) -> Call:
        """The call that computes a node some of whose tensors lie in host memory. ggml leaves the tensor that a node
        writes into there, where the CPU computed it (SET_ROWS into a FILL)."""

        def run() -> None:
            src = tuple(tensor and tensor.unpacked() for tensor in node.src)
            here = replace(node, dst=node.dst.unpacked(), src=src)
            self.compute(here)
            node.dst.take(here.dst)

        return run

    def _compiled(self, graph: Graph) -> Call:
        if self.device.constants:
            return self._program(graph)
        shape = graph.topology()
        if shape not in self._programs:
            if len(self._programs) >= _MOST_PROGRAMS:
                self._programs.clear()
            self._programs[shape] = self._program(graph)
        places: list[Place] = [(root.buffer.handle, root.start) for root in graph.roots if root.buffer is not None]
        return partial(self._programs[shape], places)

    def _program(self, graph: Graph) -> Program:
        with calling(self.name, f"compile of {len(graph.nodes)} nodes"):
            program = self.device.compile(graph)
        if not callable(program):
            raise KernelError(f"{self.name}: compile returned {type(program).__name__}, not a function")

        def run(*places: list[Place]) -> None:
            if self.checks is not None:
                self.checks.changes += 1
            with UserCode():
                program(*places)

        return run


@cache
def backends_of(name: str) -> list[DeviceBackend]:
    """The backends of the devices that a file registers, or an entry point. Raises DeviceError."""
    return [DeviceBackend.of(device) for device in load_devices(name)]


def checks_of(backend: AnyBackend) -> Checks | None:
    """Has every call looked at that concerns the memory of a backend's device, from the time its `memory` is called;
    None if no `Device` computes. Returns what the checks find."""
    if isinstance(backend, DeviceBackend):
        backend.checks = Checks()
        return backend.checks
    return None


@dataclass(frozen=True)
class _Whole:
    """A graph, as messages name it."""

    device: str
    graph: Graph

    def __str__(self) -> str:
        nodes = self.graph.nodes
        if len(nodes) == 1:
            return f"{self.device}: {nodes[0]}"
        return f"{self.device}: graph of {len(nodes)} nodes, {nodes[0]} to {nodes[-1]}"


class _Group:
    """Overlapping tensors in host memory, copied into one buffer."""

    def __init__(self, memory: OpaqueMemory, span: Memory) -> None:
        self._memory, self._span = memory, span
        buffer = memory.allocate(span.size)
        if buffer is None:
            raise KernelError(f"{memory.device.name}: alloc of {span.size} bytes: {memory.free} are free")
        self._buffer = buffer
        memory.write(buffer.address, span.bytes())

    def has(self, tensor: Tensor) -> bool:
        return self._span.address <= tensor.address < self._span.address + self._span.size

    def there(self, tensor: Tensor) -> Tensor:
        """A tensor of the group, in the buffer."""
        moved = self._buffer.address + tensor.memory.address - self._span.address
        return replace(tensor, memory=replace(tensor.memory, address=moved, owner=None), buffer=self._buffer)

    def take_back(self, *, writes: bool) -> None:
        """Copies the group back, where the node may write to it. Raises KernelError where the node has written to a
        group that it may only read."""
        now = self._memory.read(self._buffer.address, self._span.size)
        if writes:
            self._span.bytes()[:] = now
        elif not np.array_equal(now, self._span.bytes()):
            raise KernelError("writes to a source, which it is only to read")

    def release(self) -> None:
        self._memory.release(self._buffer)


def _root(tensor: Tensor) -> Tensor:
    """All the memory that a tensor is a view of, as a tensor of bytes; the tensor's own span where it does not lie in
    that memory."""
    inside = tensor.offset >= 0 and tensor.offset + tensor.nbytes <= tensor.memory.size
    size, address = (tensor.memory.size, tensor.memory.address) if inside else (tensor.nbytes, tensor.address)
    memory = Memory(address, size, tensor.memory.writable, tensor.memory.owner)
    return Tensor(tensor.name, "i8", (size, 1, 1, 1), (1, size, size, size), memory)


def _over_roots(group: list[Tensor]) -> Memory:
    begin, end = min(t.address for t in group), max(t.end for t in group)
    return Memory(begin, end - begin, any(t.memory.writable for t in group), [t.memory for t in group])
