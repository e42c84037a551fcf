"""One node of the IR computed on any device that ggml has: the inverse of `ggml.convert`.

The tensors are made again in a ggml context of their own, and tensors that overlap in the node's memory also overlap on
the device: each group of overlapping tensors is one tensor there, and the others are views of it. A device that reads
host memory computes in place; any other device gets copies, and the output's group is copied back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from types import TracebackType
from typing import NamedTuple

from ggml_backend_npu.ggml import aborts, convert, structs
from ggml_backend_npu.ggml.guard import interrupts_wait
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir import PARAMS_BYTES, Graph, Node, Tensor
from ggml_backend_npu.ir.sharing import Group, sharing
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.registration import failures_of
from ggml_backend_npu.registry.entry import KernelError
from quant.kernels.processor import processors

_ALIGNMENT = 64  # at least what ggml's CPU needs of a buffer
_GRAPH_SIZE = 32  # one node, its sources and their groups
_LIMIT = 1 << 62
_PLACE = (structs.BUFFER_AT, structs.DATA_AT, structs.EXTRA_AT)  # of a ggml_tensor: where it lies

# they call a function of the program that made the node
_CALLBACKS = frozenset({"CUSTOM", "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3"})

# how many sources ggml's CPU reads, without checking that they exist, for ops that this backend does not have; 1 for
# any other op
_N_SOURCES = {"FLASH_ATTN_BACK": 4}


class Replica:
    """A ggml device that computes nodes whose tensors lie in our memory. A context manager.

        with Replica(ggml, "CPU") as cpu:
            reason = cpu.refusal(node)
            cpu.compute(node)

    device   its name, if ggml has registered it; or its ggml_backend_dev_t
    threads  of a device that takes a number of them, as ggml's CPU does; 0 = all cores

    Afterwards `in_host_memory` says whether it computes in the host's memory.

    Raises KernelError for a device that ggml does not have.
    """

    def __init__(self, ggml: Ggml, device: str | int, *, threads: int = 0) -> None:
        self._ggml = ggml
        by_name = ggml.ggml_backend_dev_by_name
        self._device = device if isinstance(device, int) else by_name(os.fsencode(device).split(b"\0")[0])
        if self._device is None:
            raise KernelError(f"no device {device!r}; ggml has: {' '.join(_devices(ggml))}")
        self.name: str = ggml.ggml_backend_dev_name(self._device).decode()
        self._failures = failures_of(self.name)
        self.in_host_memory = bool(
            ggml.ggml_backend_dev_supports_buft(self._device, ggml.ggml_backend_cpu_buffer_type())
        )
        self._constant: set[tuple[int, int]] = set()  # spans that hold the same each time
        self._sent: dict[bytes, _Sent] = {}  # which of them lie on the device, by root
        self._has_room = True  # for more than a node
        self._buffers: dict[int, int] = {}  # of the device, in which the other groups of a node lie, by place
        self._backend = ggml.ggml_backend_dev_init(self._device, None)
        if not self._backend:
            raise KernelError(f"device {self.name} cannot be opened")
        registry = ggml.ggml_backend_dev_backend_reg(self._device)
        set_threads = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if set_threads:
            structs.SetThreads(set_threads)(self._backend, threads or processors())

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        self._ggml.ggml_backend_free(self._backend)

    def keeps(self, tensor: Tensor) -> bool:
        """Takes a tensor, a model's weight, to hold the same until `forget`: a device that computes in memory of its
        own is sent it once, as long as no more is kept there than stays free. Returns whether it is such a device: one
        that cannot change what lies in the host's."""
        if self.in_host_memory:
            return False
        self._constant.add((tensor.address, tensor.nbytes))
        return True

    def forget(self) -> None:
        """Takes nothing to hold the same any more: the device may have changed it, or it may lie there no longer."""
        self._constant.clear()
        for sent in self._sent.values():
            sent.free(self._ggml)
        self._sent.clear()

    def _let_go(self) -> None:
        """Frees all that is kept of the device's memory."""
        self.forget()
        for buffer in self._buffers.values():
            self._ggml.ggml_backend_buffer_free(buffer)
        self._buffers.clear()

    def refusal(self, node: Node) -> str | None:
        """Why the device does not take the node, in a few words; None where it does."""
        reason = _fault(self._ggml, node)
        if reason is not None or node.dst.n_elements == 0:
            return reason
        with self._made(node) as made:
            return self._refusal(made)

    def _refusal(self, made: Made) -> str | None:
        with self._failures.told_by_the_caller():
            taken = self._ggml.ggml_backend_dev_supports_op(self._device, made.node)
            return None if taken else self._failures.message or "not supported"

    def compute(self, node: Node) -> None:
        """Computes the node into its output's memory. Raises KernelError where the device refuses it, or fails."""
        try:
            self._compute(node)
        except _NoMemoryError:
            if not self._sent and not self._buffers:
                raise
            self._has_room = False
            self._let_go()
            self._compute(node)

    def _compute(self, node: Node) -> None:
        reason = _fault(self._ggml, node)
        if reason is None and node.dst.n_elements == 0:
            return
        with ExitStack() as stack:
            if reason is None:
                made = stack.enter_context(self._made(node))
                reason = self._refusal(made)
            if reason is not None:
                raise KernelError(f"{node}: device {self.name} does not take it: {reason}")
            bring_back = (self._in_place if self.in_host_memory else self._on_device)(made, stack)
            graph = self._ggml.ggml_new_graph_custom(made.context, _GRAPH_SIZE, False)
            self._ggml.ggml_build_forward_expand(graph, made.node)
            with self._failures.told_by_the_caller(), interrupts_wait(self._failures):
                status = self._ggml.ggml_backend_graph_compute(self._backend, graph)
                failure = self._failures.message
            if status != structs.STATUS_SUCCESS:
                raise KernelError(failure or f"{node}: device {self.name} failed: status {status}")
            bring_back()

    def compute_graph(self, graph: Graph) -> None:
        """Computes a graph's nodes in order, one by one. Raises KernelError as `compute` does."""
        for node in graph.nodes:
            self.compute(node)

    @contextmanager
    def _made(self, node: Node) -> Iterator[Made]:
        """The node and its sources as ggml tensors, without memory."""
        ggml = self._ggml
        n_tensors = 2 * (structs.N_SRC + 1)
        size = n_tensors * ggml.ggml_tensor_overhead() + ggml.ggml_graph_overhead_custom(_GRAPH_SIZE, False)
        context = ggml.ggml_init(structs.InitParams(size + 4096, None, True))
        try:
            yield Made(ggml, context, node)
        finally:
            ggml.ggml_free(context)

    def _in_place(self, made: Made, stack: ExitStack) -> Callable[[], None]:
        """Places the tensors where the IR's lie. Returns what is to be done after the computation: nothing."""
        for group, members in made.groups.items():
            base = group.begin & -_ALIGNMENT
            buffer = self._ggml.ggml_backend_cpu_buffer_from_ptr(base, group.end - base)
            stack.callback(self._ggml.ggml_backend_buffer_free, buffer)
            for tensor, offset in members:
                set_pointer(tensor + structs.BUFFER_AT, buffer)
                set_pointer(tensor + structs.DATA_AT, group.begin + offset)
        return lambda: None

    def _on_device(self, made: Made, stack: ExitStack) -> Callable[[], None]:
        """Copies the groups to the device's memory. Returns the function that copies the output's group back."""
        ggml, back = self._ggml, made.group_of_node
        copied = [group for group in made.groups if group is back or not self._is_there(made, group)]
        with self._failures.told_by_the_caller():
            for place, group in enumerate(copied):
                if all(tensor.codec.block_size == 1 for tensor in group.tensors):
                    self._place(made.root(group), place)
            # what is left lies in a buffer of its own: a device may have blocks in another layout, by their address
            buffer = ggml.ggml_backend_alloc_ctx_tensors(made.context, self._backend)
            if buffer:
                stack.callback(ggml.ggml_backend_buffer_free, buffer)
            elif not all(map(convert.buffer_of, map(made.root, made.groups))):
                raise _NoMemoryError(self.name, sum(group.size for group in copied))
            else:
                for members in made.groups.values():
                    for tensor, _ in members[1:]:
                        ggml.ggml_backend_view_init(tensor)
        for group in copied:
            ggml.ggml_backend_tensor_set(made.root(group), group.begin, 0, group.size)
        return lambda: ggml.ggml_backend_tensor_get(made.root(back), back.begin, 0, back.size)

    def _place(self, tensor: int, place: int) -> None:
        """Places a tensor in the buffer of the device in which that of this place of the last node lay, or in a larger
        one."""
        ggml, kind = self._ggml, self._ggml.ggml_backend_get_default_buffer_type(self._backend)
        size, buffer = int(ggml.ggml_backend_buft_get_alloc_size(kind, tensor)), self._buffers.pop(place, 0)
        if buffer and ggml.ggml_backend_buffer_get_size(buffer) < size:
            ggml.ggml_backend_buffer_free(buffer)
            buffer = 0
        buffer = buffer or ggml.ggml_backend_buft_alloc_buffer(kind, size)
        if not buffer:
            raise _NoMemoryError(self.name, size)
        self._buffers[place] = buffer
        ggml.ggml_backend_tensor_alloc(buffer, tensor, ggml.ggml_backend_buffer_get_base(buffer))

    def _is_there(self, made: Made, group: Group) -> bool:
        """Whether a group lies on the device, where it was or is sent now; then its root is placed there."""
        if (group.begin, group.size) not in self._constant:
            return False
        root = made.root(group)
        key = group.begin.to_bytes(8, "little") + ctypes.string_at(root, structs.OP_AT)
        sent = self._sent.get(key) or self._send(root, group)
        if sent is None:
            return False
        self._sent[key] = sent
        for at in _PLACE:
            ctypes.memmove(root + at, sent.tensor + at, 8)
        return True

    def _send(self, root: int, group: Group) -> _Sent | None:
        """Sends a group to the device, to stay there; None if more would be kept than stays free."""
        ggml, free = self._ggml, ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(self._device, free, ctypes.c_size_t())
        kept = sum(sent.size for sent in self._sent.values())
        if not self._has_room or kept + group.size > free.value - group.size:
            return None
        context = ggml.ggml_init(structs.InitParams(2 * ggml.ggml_tensor_overhead(), None, True))
        tensor = ggml.ggml_new_tensor(context, 0, 1, (ctypes.c_int64 * 1)(1))
        ctypes.memmove(tensor, root, structs.TENSOR.size)
        with self._failures.told_by_the_caller():
            buffer = ggml.ggml_backend_alloc_ctx_tensors(context, self._backend)
        if not buffer:
            ggml.ggml_free(context)
            return None
        ggml.ggml_backend_tensor_set(tensor, group.begin, 0, group.size)
        return _Sent(context, buffer, tensor, group.size)


class _NoMemoryError(KernelError):
    """The device has no memory for so many bytes."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(f"device {name} has no memory for {size} bytes")


class _Sent(NamedTuple):
    """A tensor that lies on the device until it is freed: its ggml_context, its buffer, its address, its bytes."""

    context: int
    buffer: int
    tensor: int
    size: int

    def free(self, ggml: Ggml) -> None:
        ggml.ggml_backend_buffer_free(self.buffer)
        ggml.ggml_free(self.context)


def compute(ggml: Ggml, device_name: str, node: Node) -> None:
    """Computes one node on a device, by `Replica.compute`. Raises KernelError."""
    with Replica(ggml, device_name) as replica:
        replica.compute(node)


class Made:
    """A node's tensors in a context.

    of      the node
    groups  the tensors of each group, with their offsets: first the root, whose memory the others lie in
    """

    def __init__(self, ggml: Ggml, context: int, node: Node) -> None:
        self._ggml, self.context, self.of = ggml, context, node
        self.groups: dict[Group, list[tuple[int, int]]] = {}
        self.node = 0
        self._sources: dict[Tensor, int] = {}
        self._dst = dst = replace(node.dst)  # a copy: a source may be the same object
        sources = list(dict.fromkeys(source for source in node.src if source is not None))
        for group in sharing([*(source for source in sources if source.nbytes), dst]):
            self.groups[group] = self._tensors(group)
        self.group_of_node = next(group for group in self.groups if dst in group)
        for tensor in sources:
            if tensor.nbytes == 0:  # nothing of it is read; it lies where the output does
                self.groups[self.group_of_node].append((self._new(tensor, self.root(self.group_of_node)), 0))
        op, function = ggml.op_numbers[node.op]
        params = node.params if function is None else function.to_bytes(4, "little") + node.params[4:]
        addresses = [self._sources[source] if source is not None else 0 for source in node.src]
        addresses += [0] * (structs.N_SRC - len(addresses))
        fields = structs.OPERATION.pack(op, params, structs.FLAG_COMPUTE, *addresses)
        ctypes.memmove(self.node + structs.OP_AT, fields, len(fields))

    def tensor(self, source: Tensor) -> int:
        """The address of a source's tensor."""
        return self._sources[source]

    def root(self, group: Group) -> int:
        """The tensor whose memory the others of the group lie in."""
        return self.groups[group][0][0]

    def _tensors(self, group: Group) -> list[tuple[int, int]]:
        begin, end = group.begin, group.end
        whole = next((t for t in group.tensors if t.address == begin and t.end == end and t.is_contiguous()), None)
        if whole is not None:
            root = self._new(whole)
        else:
            ne = (ctypes.c_int64 * 1)(group.size)
            root = int(self._ggml.ggml_new_tensor(self.context, self._ggml.type_numbers["i8"], 1, ne))
        views = [(tensor, tensor.address - begin) for tensor in group.tensors if tensor is not whole]
        return [(root, 0), *((self._new(tensor, root, offset), offset) for tensor, offset in views)]

    def _new(self, tensor: Tensor, root: int = 0, offset: int = 0) -> int:
        """A new tensor; a view where a root is given."""
        address = int(self._ggml.ggml_new_tensor(self.context, 0, 1, (ctypes.c_int64 * 1)(1)))
        type, name = self._ggml.type_numbers[tensor.type], tensor.name.encode()[: structs.NAME_BYTES - 1]
        nowhere = 0
        fields = structs.TENSOR.pack(
            type, nowhere, *tensor.ne, *tensor.nb, 0, b"", 0, *[0] * structs.N_SRC, root, offset, nowhere, name, 0
        )
        ctypes.memmove(address, fields, len(fields))
        if tensor is self._dst:
            self.node = address
        else:
            self._sources[tensor] = address
        return address


def set_pointer(at: int, value: int) -> None:
    """Sets a pointer of a ggml_tensor."""
    ctypes.memmove(at, value.to_bytes(8, "little"), 8)


def _devices(ggml: Ggml) -> list[str]:
    handles = [ggml.ggml_backend_dev_get(index) for index in range(ggml.ggml_backend_dev_count())]
    return [ggml.ggml_backend_dev_name(handle).decode() for handle in handles]


def _fault(ggml: Ggml, node: Node) -> str | None:
    """Why no device of this ggml can be given the node: on tensors that are inconsistent, ggml ends the process."""
    if node.op not in ggml.op_numbers:
        return f"ggml {ggml.version} has no such op"
    if node.op in ggml.uncounted and not _keeps_one_state(node):
        return f"ggml {ggml.version} has no number of states"
    if not convert.computes(node.op):
        return "computes nothing"
    if node.op in _CALLBACKS:
        return "calls a function of the program that made it"
    if len(node.src) > structs.N_SRC or len(node.params) > PARAMS_BYTES:
        return f"{len(node.src)} sources and {len(node.params)} bytes of parameters"
    needed = OWN[node.op].n_required if node.op in OWN else _N_SOURCES.get(node.op, 1)
    if len(node.src) < needed or None in node.src[:needed]:
        return f"needs {needed} sources"
    if not node.dst.memory.writable:
        return "its output's memory may not be written"
    named = [("its output", node.dst), *((f"source {i}", tensor) for i, tensor in enumerate(node.src))]
    bad = (f"{role} {why}" for role, tensor in named if tensor is not None and (why := _bad(ggml, tensor)))
    return next(bad, None) or aborts.why(ggml, node)


def _keeps_one_state(node: Node) -> bool:
    return node.op == "SSM_SCAN" and node.params[:4] == b"\1\0\0\0"


def _bad(ggml: Ggml, tensor: Tensor) -> str | None:
    """What is inconsistent in a tensor; None where nothing is."""
    if tensor.type not in ggml.type_numbers:
        return f"has type {tensor.type}, which ggml {ggml.version} has not"
    if tensor.packed is not None:
        return "is packed"
    if tensor.buffer is not None:
        return "lies in a device's memory"
    if min(*tensor.ne, *tensor.nb, tensor.offset) < 0 or max(*tensor.ne, *tensor.nb, prod(tensor.ne)) >= _LIMIT:
        return f"has ne {list(tensor.ne)}, nb {list(tensor.nb)}, offset {tensor.offset}"
    if tensor.ne[0] % tensor.codec.block_size:
        return f"has rows of {tensor.ne[0]} elements, no whole {tensor.type} blocks"
    if tensor.offset + tensor.nbytes > tensor.memory.size:
        return f"ends at byte {tensor.offset + tensor.nbytes} of a memory of {tensor.memory.size}"
    return None
