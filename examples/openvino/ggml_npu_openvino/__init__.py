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
from .numbers import raised

# arithmetic in float32 as it is written: by default a CPU may multiply in bfloat16, and round x to 8 bits
_EXACT = {"EXECUTION_MODE_HINT": "ACCURACY", "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": "NO"}


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
        if self.chip == "CPU":  # generated code for runs of nodes: its time grows with the square of their number
            self._settings["SNIPPETS_MODE"] = "DISABLE"
        self._calls = self.chip == "CPU"  # no other plugin calls the host
        self._keeps = not self._calls or os.environ.get("OV_KEEP", "0") != "0"
        self._rounds = self._calls and os.environ.get("OV_ROUND", "1") != "0"
        self.description = f"{name} by OpenVINO {ov.__version__.split('-')[0]}"
        self.memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def alloc(self, size: int) -> Memory:
        """Allocates a buffer of `size` bytes, set to 0."""
        return Memory(size)

    def copy_in(self, handle: Memory, offset: int, data: Any) -> None:
        """Copies bytes from the host."""
        handle.forget()
        handle.bytes[offset : offset + data.size] = data

    def copy_out(self, handle: Memory, offset: int, out: Any) -> None:
        """Copies bytes to the host."""
        out[:] = handle.bytes[offset : offset + out.size]

    def fill(self, handle: Memory, offset: int, size: int, value: int) -> None:
        """Sets bytes of a buffer to one value."""
        handle.forget()
        handle.bytes[offset : offset + size] = value

    def refusal(self, node: Node) -> str | None:
        """Returns why the device does not take a node, None if it does."""
        return refusal(node)

    def compile(self, graph: Graph) -> Program:
        """Returns the program of a graph, for any places of its roots."""
        built = Built(graph, calls=self._calls, keeps=self._keeps, rounds=self._rounds)
        for node in graph.nodes:
            KERNELS[node.op][0](built, node)
        given, writes, written = [*built.parameters], built.writes, {graph.root_of(node.dst) for node in graph.nodes}
        request = self._core.compile_model(built.model(), self.chip, self._settings).create_infer_request()
        lock = Lock()  # a program may be called for several contexts

        def run(places: list[tuple[Memory, int]], _: object = built.copies) -> None:
            with lock, np.errstate(all="ignore"):  # of float32 that is rounded to float16
                arrays = [each.array(*places[each.root]) for each in given]  # which tensors do not keep
                for number, array in enumerate(arrays):
                    request.set_input_tensor(number, ov.Tensor(array, ov.Shape(array.shape), given[number].type))
                request.infer(share_outputs=True)
                if raised:
                    raise raised.pop()
                for memory in {places[root][0] for root in written}:
                    memory.forget()
                for write in writes:
                    write.put(*places[write.root], request)

        return run
