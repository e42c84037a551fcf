"""A `Backend` as ggml sees it: registry, device and backend, as tables of callbacks (ggml-backend-impl.h)."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ggml_backend_npu.backend import NO_KERNEL
from ggml_backend_npu.backend.backend import AnyBackend
from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.device.memory import OpaqueQueue
from ggml_backend_npu.ggml import convert, structs
from ggml_backend_npu.ggml.graph_read import GraphReader
from ggml_backend_npu.ggml.guard import Failures, guarded, stopped_by_interrupts
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ir.buffer import Buffer
from ggml_backend_npu.ir.packed import Packed
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin import answers, repeats
from ggml_backend_npu.plugin.buffers import Buffers
from ggml_backend_npu.plugin.contexts import Context, Statistics
from ggml_backend_npu.plugin.fallback import Fallback
from ggml_backend_npu.plugin.forms import Forms
from ggml_backend_npu.plugin.handed import Handed, compute_handed
from ggml_backend_npu.plugin.queues import Queue
from ggml_backend_npu.plugin.repeats import Repeats
from ggml_backend_npu.registry.entry import KernelError
from quant.errors import say
from quant.kernels import threads
from quant.kernels.threads import POOL, Team

_DEVICE_TYPES = {"accel": structs.DEVICE_TYPE_ACCEL, "gpu": structs.DEVICE_TYPE_GPU}
# when llama.cpp makes a context, it looks on which device these would run; if that is not their layer's device, it
# computes them by some hundred nodes of other ops, in another graph than on the CPU
PROBED = frozenset(("DSV4_HC_PRE", "DSV4_HC_COMB", "DSV4_HC_POST"))


class Plugin:
    """A backend that can be registered with ggml: a device with the backend's name. It must live as long as ggml has
    its addresses: for ever, once it is registered.

    contexts  each live ggml_backend, by address
    claims    while a llama.cpp context is made: those ops of PROBED that supports_op says yes to; else None
    refusals  by op, why supports_op refused its last node
    broken    message of the last kernel that raised an error while it was asked about a node
    handed    called with the address of each graph; the context that it returns is entered while the graph is computed,
              one node after the other, and what that gives is called before each node
    run       runs a plan of the graph at an address, in place of `Plan.run`; None: nothing does
    """

    def __init__(self, ggml: Ggml, backend: AnyBackend) -> None:
        threads.limited(1)  # raises where GGML_NPU_THREADS is not a number
        backend.options.check()
        if backend.team is POOL:
            backend.team = Team(ggml.openmp)
        self.ggml, self.backend = ggml, backend
        self.failures = Failures()
        self.statistics = Statistics(self._settle, self.failures)
        self.contexts: dict[int, Context] = {}
        self.claims: frozenset[str] | None = None
        self.refusals: dict[str, str] = {}
        self._told: set[tuple[str, str]] = set()
        self.broken: str | None = None
        self.handed: Callable[[int], AbstractContextManager[Handed]] | None = None
        self.run: Callable[[Plan, int], None] | None = None
        self._read = GraphReader(ggml)
        self._supports_op = answers.Asked(self.supports_op)
        is_host = _address_of(ggml.ggml_backend_buft_is_host)
        self._answers = answers.Answers(_address_of(self._supports_op), is_host, backend.version_at, self._read)
        self._halted: str | None = None
        self._is_watched = False
        self._fallback = Fallback(ggml, backend)
        self.memory = backend.memory()
        self._strings = {x: ctypes.create_string_buffer(x.encode()) for x in (backend.name, backend.description)}
        self._guid = (ctypes.c_uint8 * 16)(*b"ggml-backend-npu")
        self.device_type = _DEVICE_TYPES[backend.options.device_type]
        self._set_n_threads = structs.SetThreads(self.set_n_threads)
        self._graph_compute = structs.GraphCompute(self.graph_compute)
        self._graph_repeated = repeats.Repeated(self.graph_repeated)
        self.device = ggml.layout["ggml_backend_device"](context=self._answers.address)
        self._queue: Queue | None = None
        self._make_buffers()
        self._backend_table = self._table_of_backends()
        self.device.iface = self._table_of_device()
        self.registry = self._registry()
        self.device.reg = ctypes.addressof(self.registry)

    def _make_buffers(self) -> None:
        """Has ggml allocate buffers in the device's own memory, and queue work, if it has either."""
        if self.memory is None:
            return
        name = ctypes.addressof(self._strings[self.backend.name])
        self._buffers = Buffers(self.ggml, self.memory, self.failures, name, self.handle)
        self._answers.buffer_type = self._buffers.type_address
        if isinstance(self.memory, OpaqueQueue):
            self._queue = Queue(self.ggml, self.memory, self._buffers, self.failures)

    def _table_of_backends(self) -> ctypes.Structure:
        """ggml_backend_i."""
        slots: dict[str, Callable[..., Any]] = {}
        if self.memory is not None and self.memory.works_later:
            slots["synchronize"] = self.synchronize
        return structs.fill(
            self.ggml.layout["ggml_backend_i"],
            get_name=self.get_name,
            free=self.free,
            graph_compute=repeats.graph_compute.address,
            **slots | (self._queue.of_backend() if self._queue is not None else {}),
        )

    def _table_of_device(self) -> ctypes.Structure:
        """ggml_backend_device_i."""
        return structs.fill(
            self.ggml.layout["ggml_backend_device_i"],
            get_name=self.get_name,
            get_description=self.get_description,
            get_memory=self.get_memory,
            get_type=self.get_type,
            get_props=self.get_props,
            init_backend=self.init_backend,
            get_buffer_type=self.get_buffer_type,
            buffer_from_host_ptr=self.buffer_from_host_ptr,
            supports_op=answers.supports_op.address,
            supports_buft=answers.supports_buft.address,
            **(self._queue.of_device() if self._queue is not None else {}),
        )

    def _registry(self) -> Any:
        """ggml_backend_reg, of this device alone."""
        layout = self.ggml.layout
        return layout["ggml_backend_reg"](
            api_version=layout.api_version,
            iface=structs.fill(
                layout["ggml_backend_reg_i"],
                get_name=self.get_name,
                get_device_count=self.get_device_count,
                get_device=self.get_device,
                get_proc_address=self.get_proc_address,
            ),
        )

    @property
    def handle(self) -> int:
        """Its ggml_backend_dev_t."""
        return ctypes.addressof(self.device)

    # registry and device

    @guarded(None)
    def get_name(self, _: int) -> int:
        """get_name of ggml_backend_reg_i, ggml_backend_device_i and ggml_backend_i: the backend's name; NULL on
        error."""
        return ctypes.addressof(self._strings[self.backend.name])

    @guarded(None)
    def get_description(self, _: int) -> int:
        """ggml_backend_device_i.get_description: address of the backend's description; NULL on error."""
        return ctypes.addressof(self._strings[self.backend.description])

    @guarded(0)
    def get_device_count(self, _: int) -> int:
        """ggml_backend_reg_i.get_device_count: 1; 0 on error."""
        return 1

    @guarded(None)
    def get_device(self, _: int, index: int) -> int | None:
        """ggml_backend_reg_i.get_device: address of device 0; NULL for any other index, and on error."""
        return self.handle if index == 0 else None

    @guarded(None)
    def get_proc_address(self, _: int, name: bytes) -> int | None:
        """ggml_backend_reg_i.get_proc_address: for ggml_backend_set_n_threads; NULL for other names, and on error."""
        if name == b"ggml_backend_set_n_threads":
            return ctypes.cast(self._set_n_threads, ctypes.c_void_p).value
        return None

    @guarded(None)
    def set_n_threads(self, backend: int, count: int) -> None:
        """ggml_backend_set_n_threads: the threads of a ggml_backend, at least 1 and no more than GGML_NPU_THREADS."""
        self.contexts[backend].repeats.n_threads = threads.limited(max(1, count))

    @guarded(None)
    def get_memory(self, _: int, free: Any, total: Any) -> None:
        """ggml_backend_device_i.get_memory: free and total bytes of the device's own memory; 0 and 0 without one."""
        free[0], total[0] = (self.memory.free, self.memory.limit) if self.memory is not None else (0, 0)

    @guarded(structs.DEVICE_TYPE_ACCEL)
    def get_type(self, _: int) -> int:
        """ggml_backend_device_i.get_type: a ggml_backend_dev_type, GPU or ACCEL as in the options; ACCEL on error."""
        return self.device_type

    @guarded(None)
    def get_props(self, _: int, props: Any) -> None:
        """ggml_backend_device_i.get_props: fills a ggml_backend_dev_props.

        async and events are set only for a `QueuedDevice`, buffer_from_host_ptr and mmap_support only where the device
        uses host memory.
        """
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.get_memory(0, ctypes.pointer(free), ctypes.pointer(total))
        layout = self.ggml.layout
        props[0] = layout["ggml_backend_dev_props"](
            memory_free=free.value,
            memory_total=total.value,
            name=ctypes.addressof(self._strings[self.backend.name]),
            description=ctypes.addressof(self._strings[self.backend.description]),
            type=self.get_type(0),
            caps=layout.caps(
                **{"async": self._queue is not None},
                events=self._queue is not None,
                buffer_from_host_ptr=self.memory is None,
                mmap_support=self.memory is None,
            ),
        )

    @guarded(None)
    def init_backend(self, device: int, _: bytes) -> int:
        """ggml_backend_device_i.init_backend: a new ggml_backend, in `contexts` until `free`; NULL on error."""
        known = Repeats(_address_of(self._graph_compute), _address_of(self._graph_repeated), self.backend)
        backend = self.ggml.layout["ggml_backend"](
            guid=ctypes.addressof(self._guid), iface=self._backend_table, device=device, context=known.address
        )
        address = ctypes.addressof(backend)
        forms = Forms(self.ggml, self.backend, self._read)
        self.contexts[address] = Context(backend, Statistics(self._settle, self.failures), known, forms)
        return address

    @property
    def registry_address(self) -> int:
        """Address of its ggml_backend_reg."""
        return ctypes.addressof(self.registry)

    @property
    def buffer_type(self) -> int | None:
        """Address of the buffer type of the device's own memory; None where it uses host memory."""
        return self._buffers.type_address if self.memory is not None else None

    @guarded(None)
    def get_buffer_type(self, _: int) -> int | None:
        """ggml_backend_device_i.get_buffer_type: the device's own, or the CPU's in host memory; NULL on error."""
        if self.memory is not None:
            return self.buffer_type
        address: int | None = self.ggml.ggml_backend_cpu_buffer_type()
        return address

    @guarded(None)
    def buffer_from_host_ptr(self, _: int, address: int, size: int, max_tensor_size: int) -> int | None:
        """ggml_backend_device_i.buffer_from_host_ptr: a CPU buffer over `size` bytes of host memory; NULL on error."""
        buffer: int | None = self.ggml.ggml_backend_cpu_buffer_from_ptr(address, size)
        return buffer

    @guarded(False)
    def supports_op(self, _: int, node: int) -> bool:
        """ggml_backend_device_i.supports_op: whether the device computes a node; False on error.

        Always True for ops that compute nothing (VIEW, RESHAPE, ...), and for a node that writes into a tensor in the
        device's memory. `refusals` keeps the reason where the op's kernel or its output's place is the reason.
        """
        op = convert.op_name(self.ggml, node)
        if not convert.computes(op):
            return True
        if self._holds(node):
            return True  # ggml aborts where no device takes it; here it fails in graph_compute, which says why
        if self.claims is not None and op in PROBED:
            return op in self.claims
        if not self.backend.offers(op):
            number, function = self.ggml.op_numbers[op]
            if self.memory is None and function is None and op not in PROBED:
                self._answers.leave(number, self.backend.version)
            return False
        reason = self._refusal(op, node) or self._elsewhere(node)
        if reason is not None:
            self.refusals[op] = reason
            self._tell(op, reason)
        elif self.memory is None and op in OWN.keys() - PROBED and self.backend.ops.get(op) is OWN[op]:
            self._answers.learn(node, self.backend.version)
        return reason is None

    def _tell(self, op: str, reason: str) -> None:
        """Says on stderr, with GGML_NPU_VERBOSE, why a node is refused: each reason of an op once."""
        if os.environ.get("GGML_NPU_VERBOSE") and (op, reason) not in self._told:
            self._told.add((op, reason))
            say(f"{self.backend.name} refuses {op}: {reason}")

    def _refusal(self, op: str, node: int) -> str | None:
        try:
            return self.backend.refusal(convert.node(self.ggml, node)) if op in self.backend.op_names else NO_KERNEL
        except KernelError as error:
            self.broken = str(error)
            raise

    def _elsewhere(self, node: int) -> str | None:
        """Why a node's output would not lie in the device's memory: it is a view of a tensor that another device
        computes. ggml copies a split's inputs before the split begins, and so before the node would write to the
        view."""
        root = convert.view_source_of(node)
        if self.memory is None or root == 0:
            return None
        op = convert.op_name(self.ggml, root)
        taken = not convert.computes(op) or (self.backend.offers(op) and self._refusal(op, root) is None)
        return None if taken else f"writes into what {op} gives, which the device does not compute"

    def _holds(self, node: int) -> bool:
        """Whether a node's output is a view of a tensor in the device's memory."""
        root = convert.view_source_of(node)
        return self.memory is not None and root != 0 and self._buffers.holds(root)

    # backend

    @guarded(None)
    def free(self, backend: int) -> None:
        """ggml_backend_i.free: forgets a ggml_backend, its plans and its repeated graphs."""
        self._settle()
        self.contexts.pop(backend, None)

    @guarded(structs.STATUS_FAILED)
    @stopped_by_interrupts
    def graph_compute(self, backend: int, graph: int) -> int:
        """Computes a graph that `repeats.graph_compute` does not know; the Python side of ggml_backend_i.graph_compute.

        Returns GGML_STATUS_SUCCESS, or GGML_STATUS_FAILED where the device is halted, a copy failed before, or a node
        fails; `failures` has the message.
        """
        if self._halted is not None:
            raise KernelError(self._halted)
        self._refuse_what_is_lost()
        context = self.contexts[backend]
        team = context.team
        with team.working():
            if context.instead is not None:
                context.instead(graph)
                return structs.STATUS_SUCCESS
            if self.handed is not None or self.backend.options.fallback == "cpu":
                computed = self._computed_by_nodes(graph)
                for statistics in (self.statistics, context.statistics):
                    statistics.add_nodes(computed)
                return structs.STATUS_SUCCESS
            read = self._read(graph)
            bound = context.forms.plan(read, self.packed, team, comes_again=self._is_watched)
            times = context.repeats.times
            if times is not None:
                times.run(bound, read.filled, self._finish)
            elif self.run is not None:
                self.run(bound, graph)
            else:
                bound.run()
        self._settle()
        for statistics in (self.statistics, context.statistics):
            statistics.add(bound)
        if read.n_nodes and not self._is_watched:
            context.repeats.learn(bound, read, fuses=not self.backend.fusible.isdisjoint(bound.counts))
        return structs.STATUS_SUCCESS

    def _computed_by_nodes(self, graph: int) -> Counter[str]:
        """Computes a graph node by node: each is handed to somebody, or the CPU takes some. Returns how many of each op
        the backend has computed."""
        if self.handed is None:
            return self._fallback.compute(graph)
        with self.handed(graph) as handed:
            return compute_handed(handed, graph, self.ggml, self.backend, self.packed)

    @guarded(structs.STATUS_FAILED)
    @stopped_by_interrupts
    def graph_repeated(self, backend: int, repeat: int) -> int:
        """Computes, in Python, a graph that `repeats.graph_compute` knows. Returns GGML_STATUS_SUCCESS or
        GGML_STATUS_FAILED."""
        self._refuse_what_is_lost()
        repeats = self.contexts[backend].repeats
        known, times = repeats.at(repeat), repeats.times
        with repeats.team.working():
            if times is None:
                known.plan.run()
            else:
                times.run(known.plan, known.filled, self._finish)
        return structs.STATUS_SUCCESS

    @guarded(None)
    def synchronize(self, _: int) -> None:
        """ggml_backend_i.synchronize: waits for the device. An error makes the next graph fail."""
        assert self.memory is not None
        with self._buffers.settles():
            self.memory.synchronize()

    def _finish(self) -> None:
        """Waits for a device that does later what it is asked for."""
        if self.memory is not None and self.memory.works_later:
            with self._buffers.settles():
                self.memory.synchronize()

    @property
    def lost(self) -> str | None:
        """Message of a copy or of queued work that failed without a status in which to report it, or None."""
        return self._buffers.lost if self.memory is not None else None

    @lost.setter
    def lost(self, reason: str | None) -> None:
        """Sets or clears the message; without effect where the device uses host memory."""
        if self.memory is not None:
            self._buffers.lost = reason

    def _refuse_what_is_lost(self) -> None:
        """Raises KernelError once after a copy failed, and as long as a buffer does not hold what it was set to."""
        if self.memory is not None:
            lost, self.lost = self.lost, None
            if lost is not None:
                raise KernelError(lost)
            self.memory.check()

    def bytes_at(self, address: int, size: int) -> Any:
        """The bytes of a span, wherever it lies: in the device's memory, in its own layout, or in the host's."""
        buffer = self.packed(address)
        if isinstance(buffer, Buffer):
            return buffer.read(address - buffer.address, size)
        return convert.bytes_at(address, size)

    def _settle(self) -> None:
        """Counts the graphs that ran without Python."""
        for context in list(self.contexts.values()):
            for bound, runs in context.repeats.counted():
                for statistics in (self.statistics, context.statistics):
                    statistics.add(bound, runs)

    @property
    def halted(self) -> str | None:
        """Why the device fails every graph instead of computing it; None: it computes."""
        return self._halted

    @halted.setter
    def halted(self, reason: str | None) -> None:
        """Halts the device, or lets it go on; known graphs are forgotten, so that the next one comes to Python."""
        if reason != self._halted:
            self._halted = reason
            self._forget_repeats()

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at each graph: all of them come to Python."""
        return self._is_watched

    @is_watched.setter
    def is_watched(self, watched: bool) -> None:
        """Has all graphs come to Python, or no longer those that are known."""
        self._is_watched = watched
        self._forget_repeats()

    def _forget_repeats(self) -> None:
        for context in self.contexts.values():
            context.repeats.forget()

    def packed(self, address: int, _: int = 0) -> Packed | Buffer | None:
        """What the bytes at an address lie in, in the device's own memory; None in the host's."""
        return self.memory.packed(address) if self.memory is not None else None

    def forget_plans(self) -> None:
        """Drops all plans; called after the engine changed, as plans hold what they were made with."""
        for context in list(self.contexts.values()):
            context.forms.forget()
            context.repeats.forget()


def _address_of(callback: Any) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value or 0
