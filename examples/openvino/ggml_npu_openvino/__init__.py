"""OpenVINO as a device of ggml: a split of a graph becomes one model, compiled once for each topology."""

from __future__ import annotations

import os
from threading import Lock
from typing import Any

import numpy as np

from ggml_backend_npu import Device, DeviceError, Graph, Node, Program

try:
    import openvino as ov
except ImportError as error:
    raise DeviceError(f"openvino cannot be imported ({error}): pip install openvino") from None

from .built import Built
from .kernels import KERNELS, refusal
from .memory import Memory

# arithmetic in float32 as it is written: by default a CPU may multiply in bfloat16, and round x to 8 bits
_EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
    "KV_CACHE_PRECISION": "f32",
    "PERFORMANCE_HINT": "LATENCY",
    "ENABLE_CPU_PINNING": "NO",
}


class OpenVINO(Device):
    """The device that OV_DEVICE names; without it the CPU. Buffers are host memory, which models share."""

    name, type, ops, constants = "OPENVINO0", "gpu", tuple(KERNELS), False
    largest = (1 << 31) - 1  # indices are int32

    def open(self) -> None:
        """Finds the device. Raises DeviceError if OpenVINO does not know it, or it is not there."""
        self.chip = os.environ.get("OV_DEVICE", "CPU")
        self._core = ov.Core()
        try:
            known = self._core.get_property(self.chip, "SUPPORTED_PROPERTIES")
            name = self._core.get_property(self.chip, "FULL_DEVICE_NAME")
        except RuntimeError as error:
            raise DeviceError(f"OV_DEVICE {self.chip!r}: {str(error).strip().splitlines()[-1]}") from None
        self._settings = {key: value for key, value in _EXACT.items() if key in known}
        self.description = f"{name} by OpenVINO {ov.__version__.split('-')[0]}"
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def alloc(self, size: int) -> Memory:
        """Allocates a buffer of `size` bytes, set to 0."""
        return Memory(size)

    def free(self, handle: Memory) -> None:
        """Frees the bytes, after programs have let go of them."""
        for program in list(handle.users):
            program.let_go()

    def copy_in(self, handle: Memory, offset: int, data: Any) -> None:
        """Copies bytes from the host."""
        handle.forget()
        handle.bytes[offset : offset + data.size] = data

    def copy_out(self, handle: Memory, offset: int, out: Any) -> None:
        """Copies bytes to the host."""
        out[:] = handle.bytes[offset : offset + out.size]

    def refusal(self, node: Node) -> str | None:
        """Returns why the device does not take a node, None if it does."""
        return refusal(node)

    def compile(self, graph: Graph) -> Program:
        """Returns the program of a graph, for any places of its roots."""
        built = Built(graph)
        for node in graph.nodes:
            KERNELS[node.op][0](built, node)
        written = {graph.root_of(node.dst) for node in graph.nodes}
        return _Program(self._core.compile_model(built.model(), self.chip, self._settings), built, written)


class _Program:
    """A compiled model, and its request, which shares the memory of the last places."""

    def __init__(self, compiled: Any, built: Built, written: set[int]) -> None:
        self._compiled, self._given, self._writes, self._written = compiled, [*built.parameters], built.writes, written
        self._lock = Lock()
        self._request: Any = None
        self._places: list[tuple[Memory, int]] = []
        self._copies: dict[int, int] = {}  # parameters that do not share memory, with the versions of what they hold
        self._targets: list[Any] = []
        self._arrays: dict[int, Any] = {}  # a tensor of openvino does not keep the array whose memory it shares

    def __call__(self, places: list[tuple[Memory, int]]) -> None:
        with self._lock:
            written = {places[root][0] for root in self._written}
            for memory in written:
                memory.is_fixed = False
            if self._places != places:
                self._bind(places)
            for number, version in self._copies.items():
                memory = places[self._given[number].root][0]
                if version != memory.version or not memory.is_fixed:
                    self._give(number)
            self._request.infer(share_outputs=True)
            for memory in written:
                memory.forget()
            with np.errstate(all="ignore"):  # of float32 that is rounded to float16
                for write, target in zip(self._writes, self._targets, strict=True):
                    write.put(target, lambda number: self._request.get_output_tensor(number).data)

    def let_go(self) -> None:
        """Forgets the places of the last run."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        for memory, _ in self._places:
            memory.users.discard(self)
        self._request, self._places, self._copies, self._targets, self._arrays = None, [], {}, [], {}

    def _bind(self, places: list[tuple[Memory, int]]) -> None:
        self._forget()
        self._places, self._request = places, self._compiled.create_infer_request()
        for memory, _ in places:
            memory.users.add(self)
        for number in range(len(self._given)):
            self._give(number)
        for write in self._writes:
            memory, start = places[write.root]
            self._targets.append(memory.view(start, write.tensor, write.dtype))

    def _give(self, number: int) -> None:
        memory, start = self._places[self._given[number].root]
        array = self._arrays[number] = self._given[number].array(memory, start)
        if not np.may_share_memory(array, memory.bytes):
            self._copies[number] = memory.version
        self._request.set_input_tensor(number, ov.Tensor(array, shared_memory=True))
