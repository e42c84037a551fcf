"""An OpenCL device for ggml: explicit buffers, one in-order queue, kernels in OpenCL C."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from math import prod
from typing import Any

import numpy as np
import pyopencl as cl

from ggml_backend_npu import DeviceError, Graph, Node, Program, QueuedDevice, Tensor
from ggml_backend_npu.ops import OWN

TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_1", "i32", "i64")  # as the enumeration in kernels.cl
FLOATS, WEIGHTS, IDS = ("f32", "f16"), TYPES[:5], ("i32", "i64")
_TENSOR = np.dtype([("at", "<i8"), ("ne", "<i8", 4), ("nb", "<i8", 4), ("type", "<i4"), ("pad", "<i4")])
_NORMAL, _NEOX = 0, 2

Launch = tuple[cl.Kernel, int, list[Any]]  # a kernel with its arguments, how many work items, the arguments

# op -> types of its output, then of its sources; a source that may be left out is None
_TAKEN: dict[str, tuple[tuple[str, ...] | None, ...]] = {
    "ADD": (FLOATS, FLOATS, FLOATS),
    "MUL": (FLOATS, FLOATS, FLOATS),
    "SCALE": (("f32",), ("f32",)),
    "SWIGLU": (FLOATS, FLOATS, FLOATS),
    "CONT": (FLOATS, FLOATS),
    "DUP": (FLOATS, FLOATS),
    "CPY": (FLOATS, FLOATS, FLOATS),
    "GET_ROWS": (("f32",), WEIGHTS, ("i32",)),
    "SET_ROWS": (FLOATS, ("f32",), IDS, FLOATS),
    "RMS_NORM": (("f32",), ("f32",)),
    "SOFT_MAX": (("f32",), ("f32",), FLOATS),
    "ROPE": (FLOATS, FLOATS, ("i32",), ("f32",)),
    "MUL_MAT": (("f32",), WEIGHTS, ("f32",)),
}
_OPTIONAL = {("SWIGLU", 2), ("SOFT_MAX", 2), ("ROPE", 3), ("SET_ROWS", 3)}


def _compiling(chips: list[cl.Device]) -> tuple[cl.Device, cl.Context]:
    """Returns the first device whose compiler works, with a context of its own: an old PoCL does not know new
    processors. Raises DeviceError if there is none."""
    said = ""
    for chip in chips:
        context = cl.Context([chip])
        try:
            cl.Program(context, "kernel void nothing() {}").build()
        except cl.Error as error:
            said = f"{chip.name} of {chip.platform.version} compiles nothing: {error}"
        else:
            return chip, context
    raise DeviceError(" ".join(said.split()) or "OpenCL has no device")


class OpenCL(QueuedDevice):
    """The first device of any platform whose compiler works; a GPU is preferred to a CPU."""

    name, type, ops = "OPENCL0", "gpu", tuple(_TAKEN)

    def open(self) -> None:
        """Finds the device and makes its queue. Raises DeviceError if there is none."""
        try:
            found = [device for platform in cl.get_platforms() for device in platform.get_devices()]
        except cl.Error as error:
            raise DeviceError(f"OpenCL has no platform: {error}") from None
        chip, self._context = _compiling(sorted(found, key=lambda each: each.type != cl.device_type.GPU))
        self.description, self.memory, self.largest = chip.name, chip.global_mem_size, chip.max_mem_alloc_size
        self.alignment = max(64, chip.mem_base_addr_align // 8)
        self._queue = cl.CommandQueue(self._context)
        self._programs: dict[str, cl.Program] = {}
        self._kept: list[Any] = []  # host memory that the queue is yet to read or write

    # memory

    def alloc(self, size: int) -> cl.Buffer:
        """Allocates a buffer of `size` bytes."""
        return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, max(size, 1))

    def free(self, handle: cl.Buffer) -> None:
        """Releases a buffer after the queue is done."""
        self.synchronize()
        handle.release()

    def copy_in(self, handle: cl.Buffer, offset: int, data: Any) -> None:
        """Copies bytes from the host into a buffer and waits."""
        cl.enqueue_copy(self._queue, handle, data, dst_offset=offset, is_blocking=True)

    def copy_out(self, handle: cl.Buffer, offset: int, out: Any) -> None:
        """Copies bytes from a buffer to the host and waits."""
        cl.enqueue_copy(self._queue, out, handle, src_offset=offset, is_blocking=True)

    def copy_in_async(self, handle: cl.Buffer, offset: int, data: Any) -> None:
        """Queues a copy from the host; `data` is kept until `synchronize`."""
        self._kept.append(data)
        cl.enqueue_copy(self._queue, handle, data, dst_offset=offset, is_blocking=False)

    def copy_out_async(self, handle: cl.Buffer, offset: int, out: Any) -> None:
        """Queues a copy to the host; `out` is kept until `synchronize`."""
        self._kept.append(out)
        cl.enqueue_copy(self._queue, out, handle, src_offset=offset, is_blocking=False)

    def copy_async(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        """Queues a copy of `size` bytes between buffers."""
        cl.enqueue_copy(
            self._queue, target, source, src_offset=source_offset, dst_offset=target_offset, byte_count=size
        )

    def copy(self, source: cl.Buffer, source_offset: int, target: cl.Buffer, target_offset: int, size: int) -> None:
        """Copies `size` bytes between buffers and waits."""
        self.copy_async(source, source_offset, target, target_offset, size)
        self._queue.finish()

    def fill(self, handle: cl.Buffer, offset: int, size: int, value: int) -> None:
        """Sets `size` bytes of a buffer to one value and waits."""
        cl.enqueue_fill_buffer(self._queue, handle, np.uint8(value), offset, size).wait()

    # the queue

    def synchronize(self) -> None:
        """Waits until the queue is done."""
        self._queue.finish()
        self._kept.clear()

    def record(self) -> cl.Event:
        """Returns an event that happens when everything queued so far is done."""
        return cl.enqueue_marker(self._queue)

    def wait(self, event: cl.Event) -> None:
        """Makes the queue wait for an event."""
        cl.enqueue_barrier(self._queue, wait_for=[event])

    def wait_for(self, event: cl.Event) -> None:
        """Makes the host wait for an event."""
        event.wait()

    # nodes

    def refusal(self, node: Node) -> str | None:
        """Returns why the device does not take a node, None if it does."""
        for index, (tensor, types) in enumerate(zip((node.dst, *node.src), _TAKEN[node.op], strict=False)):
            if tensor is None and (node.op, index) not in _OPTIONAL:
                return f"source {index - 1} is left out"
            if tensor is not None and types is not None and tensor.type not in types:
                return f"type {tensor.type}"
        if len(node.src) >= len(_TAKEN[node.op]):
            return f"{len(node.src)} sources"
        return _REFUSALS.get(node.op, lambda node: None)(node)

    def compile(self, graph: Graph) -> Program:
        """Prepares the kernel launches of a graph. Returns the program that queues them."""
        launches = [launch for node in graph.nodes for launch in self._launches(node)]
        self._queue.finish()

        def run() -> None:
            for kernel, n, _ in launches:
                cl.enqueue_nd_range_kernel(self._queue, kernel, (n,), None)
            self._queue.flush()

        return run

    def _launches(self, node: Node) -> list[Launch]:
        """Returns the kernel launches that compute a node, in order."""
        dst, params = node.dst, OWN[node.op].params
        p: Any = params.of(node.params) if params is not None else None
        src = (*node.src, None, None, None)
        first, second, third = src[0], src[1], src[2]
        n, rows = prod(dst.ne), prod(dst.ne[1:])
        if node.op in ("CONT", "DUP", "CPY"):
            return [self._kernel("copy", n, dst, first)]
        if node.op == "SCALE":
            return [self._kernel("scale", n, dst, first, np.float32(p.scale), np.float32(p.bias))]
        if node.op == "RMS_NORM":
            return [self._kernel("rms_norm", rows, dst, first, np.float32(p.eps))]
        if node.op == "SWIGLU":
            gate, up = (0, 0) if second is not None else (0, dst.ne[0]) if not p.swapped else (dst.ne[0], 0)
            return [self._kernel("swiglu", n, dst, first, second or first, np.int64(gate), np.int64(up))]
        if node.op == "SOFT_MAX":
            masked = np.int32(second is not None)
            return [self._kernel("soft_max", rows, dst, first, second or first, masked, np.float32(p.scale))]
        if node.op == "SET_ROWS":
            assert first is not None
            return [self._kernel("set_rows", prod(first.ne), dst, first, second)]
        if node.op == "ROPE":
            step = np.float32(p.freq_base ** (-2 / p.n_dims))
            numbers = np.int32(third is not None), np.int32(p.n_dims), np.int32(p.mode == _NEOX), step
            scales = np.float32(p.freq_scale), np.float32(p.attn_factor)
            return [self._kernel("rope", n // 2, dst, first, second, third or second, *numbers, *scales)]
        if node.op == "MUL_MAT":
            assert first is not None
            assert second is not None
            blocks = -(-second.ne[0] // 32) * prod(second.ne[1:])
            rounded = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, 4 * (prod(second.ne) + blocks))
            kind = np.int32(TYPES.index(first.type))
            product = self._kernel("mul_mat", n, dst, first, (rounded, second), built=f"-DA={int(kind)}")
            return [self._kernel("round_columns", blocks, rounded, second, kind), product]
        return [self._kernel(node.op.lower(), n, dst, first, second)]

    def _kernel(self, name: str, n: int, *arguments: Any, built: str = "") -> Launch:
        kernel = cl.Kernel(self._program(built), name)
        flat: list[Any] = []
        for each in arguments:
            if isinstance(each, Tensor):
                assert each.buffer is not None
                flat += [each.buffer.handle, _described(each, each.start)]
            elif isinstance(each, tuple):
                flat += [each[0], _described(each[1], 0)]
            else:
                flat.append(each)
        kernel.set_args(*flat)
        return kernel, n, flat  # OpenCL's kernels do not keep their arguments

    def _program(self, options: str) -> cl.Program:
        if options not in self._programs:
            source = files(__name__).joinpath("kernels.cl").read_text()
            self._programs[options] = cl.Program(self._context, source).build([options] if options else [])
        return self._programs[options]


def _described(tensor: Tensor, start: int) -> Any:
    return np.array((start, tensor.ne, tensor.nb, TYPES.index(tensor.type), 0), _TENSOR)


def _repeats(node: Node) -> str | None:
    b = node.src[1]
    assert b is not None
    return None if all(n % m == 0 for n, m in zip(node.dst.ne, b.ne, strict=True)) else "does not repeat"


def _dense(tensor: Tensor | None) -> bool:
    return tensor is None or tensor.has_contiguous_rows()


def _matmul(node: Node) -> str | None:
    a, b = node.src[0], node.src[1]
    assert a is not None
    assert b is not None
    if not _dense(a) or a.nb[1] < a.nb[0]:
        return "rows of weights have gaps"
    return "batches do not repeat" if b.ne[2] % a.ne[2] or b.ne[3] % a.ne[3] else None


def _rope(node: Node) -> str | None:
    p: Any = OWN["ROPE"].params.of(node.params)  # type: ignore[union-attr]
    if p.mode not in (_NORMAL, _NEOX) or p.ext_factor or p.n_offs or node.dst.ne[3] != 1:
        return f"mode {p.mode}, ext_factor {p.ext_factor}"
    return None


def _softmax(node: Node) -> str | None:
    p: Any = OWN["SOFT_MAX"].params.of(node.params)  # type: ignore[union-attr]
    return "ALiBi" if p.max_bias else None


_REFUSALS: dict[str, Callable[[Node], str | None]] = {
    "ADD": _repeats,
    "MUL": _repeats,
    "MUL_MAT": _matmul,
    "ROPE": _rope,
    "SOFT_MAX": _softmax,
}
