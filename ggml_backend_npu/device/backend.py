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
from ggml_backend_npu.ir import Graph, Node, Tensor
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.sharing import Group, sharing, viewed
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
        buffers: dict[Group, Buffer] = {}
        try:
            for group in sharing(tensors, viewed):
                buffers[group] = _allocated(memory, group.size)
                memory.write(buffers[group].address, group.memory.bytes())
            moved = {id(t): _there(t, group, buffer) for group, buffer in buffers.items() for t in group.tensors}
            src = tuple(moved.get(id(t), t) if t is not None else None for t in node.src)
            there = replace(node, dst=moved[id(node.dst)], src=src)
            Plan(((node, self.bind(there)),), Counter(), Counter()).run()
            memory.synchronize()
            for group, buffer in buffers.items():
                now, before = memory.read(buffer.address, group.size), group.memory.bytes()
                if node.dst in group:
                    before[:] = now
                elif not np.array_equal(now, before):
                    raise KernelError("writes to a source, which it is only to read")
        finally:
            for buffer in buffers.values():
                memory.release(buffer)

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


def _allocated(memory: OpaqueMemory, size: int) -> Buffer:
    buffer = memory.allocate(size)
    if buffer is None:
        raise KernelError(f"{memory.device.name}: alloc of {size} bytes: {memory.free} are free")
    return buffer


def _there(tensor: Tensor, group: Group, buffer: Buffer) -> Tensor:
    """A tensor of a group, in the buffer that holds a copy of the group."""
    moved = buffer.address + tensor.memory.address - group.begin
    return replace(tensor, memory=replace(tensor.memory, address=moved, owner=None), buffer=buffer)
