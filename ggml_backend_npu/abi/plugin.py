"""The backend as ggml sees it: registry, device and backend, tables of callbacks in the order of ggml-backend-impl.h.

An exception never crosses into C: `_guarded` turns it into the callback's failure value and one line on stderr.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ggml_backend_npu.abi import codecs, convert, structs
from ggml_backend_npu.abi.lib import API_VERSION, Ggml
from ggml_backend_npu.ops import strided
from ggml_backend_npu.plan import Plan, plan
from ggml_backend_npu.registry import OPS
from ggml_backend_npu.threads import Threads

NAME = "NPU"
DESCRIPTION = "Python kernels (ggml-backend-npu)"
MAX_PLANS = 1024


@dataclass
class Statistics:
    """What the device has done since the process began, or since `reset`.

    computed  nodes computed, by op
    graphs    calls of graph_compute, each a split of a scheduler's graph
    error     message of the last node that failed, or None
    """

    computed: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    error: str | None = None

    def reset(self) -> None:
        self.computed.clear()
        self.graphs, self.error = 0, None


def _guarded(failure: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of callbacks: an exception becomes `failure`."""

    def guard(callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def call(self: Plugin, *arguments: Any) -> Any:
            try:
                return callback(self, *arguments)
            except KeyboardInterrupt:
                _thread.interrupt_main()
            except BaseException as error:
                self.statistics.error = str(error) or type(error).__name__
                print(f"ggml-npu: {self.statistics.error}", file=sys.stderr)
            return failure

        return call

    return guard


class Plugin:
    """The registered backend. Lives as long as the process: ggml keeps its addresses.

    active  whether the device takes nodes; while it is not, a scheduler leaves every node to the CPU
    """

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self.statistics = Statistics()
        self.active = True
        self._plans: dict[bytes, Plan] = {}
        self._backends: dict[int, structs.Backend] = {}
        self._strings = {text: ctypes.create_string_buffer(text.encode()) for text in (NAME, DESCRIPTION)}
        self._guid = (ctypes.c_uint8 * 16)(*b"ggml-backend-npu")
        self._set_n_threads = structs.SetThreads(self.set_n_threads)
        self._backend_table = _fill(
            structs.BackendTable, get_name=self.get_name, free=self.free, graph_compute=self.graph_compute
        )
        self.device = structs.Device(
            iface=_fill(
                structs.DeviceTable,
                get_name=self.get_name,
                get_description=self.get_description,
                get_memory=self.get_memory,
                get_type=self.get_type,
                get_props=self.get_props,
                init_backend=self.init_backend,
                get_buffer_type=self.get_buffer_type,
                buffer_from_host_ptr=self.buffer_from_host_ptr,
                supports_op=self.supports_op,
                supports_buft=self.supports_buft,
            )
        )
        self.registry = structs.Registry(
            api_version=API_VERSION,
            iface=_fill(
                structs.RegistryTable,
                get_name=self.get_name,
                get_device_count=self.get_device_count,
                get_device=self.get_device,
                get_proc_address=self.get_proc_address,
            ),
        )
        self.device.reg = ctypes.addressof(self.registry)

    # registry and device

    @_guarded(None)
    def get_name(self, _: int) -> int:
        return ctypes.addressof(self._strings[NAME])

    @_guarded(None)
    def get_description(self, _: int) -> int:
        return ctypes.addressof(self._strings[DESCRIPTION])

    @_guarded(0)
    def get_device_count(self, _: int) -> int:
        return 1

    @_guarded(None)
    def get_device(self, _: int, index: int) -> int | None:
        return ctypes.addressof(self.device) if index == 0 else None

    @_guarded(None)
    def get_proc_address(self, _: int, name: bytes) -> int | None:
        if name == b"ggml_backend_set_n_threads":
            return ctypes.cast(self._set_n_threads, ctypes.c_void_p).value
        return None

    @_guarded(None)
    def set_n_threads(self, _: int, count: int) -> None:
        Threads.count = max(1, count)

    @_guarded(None)
    def get_memory(self, _: int, free: Any, total: Any) -> None:
        free[0] = total[0] = 0

    @_guarded(structs.DEVICE_TYPE_ACCEL)
    def get_type(self, _: int) -> int:
        return structs.DEVICE_TYPE_ACCEL

    @_guarded(None)
    def get_props(self, _: int, props: Any) -> None:
        props[0] = structs.DeviceProps(
            name=ctypes.addressof(self._strings[NAME]),
            description=ctypes.addressof(self._strings[DESCRIPTION]),
            type=structs.DEVICE_TYPE_ACCEL,
            caps=structs.Caps(buffer_from_host_ptr=True, mmap_support=True),
        )

    @_guarded(None)
    def init_backend(self, device: int, _: bytes) -> int:
        backend = structs.Backend(guid=self._guid, iface=self._backend_table, device=device)
        address = ctypes.addressof(backend)
        self._backends[address] = backend
        return address

    @_guarded(None)
    def get_buffer_type(self, _: int) -> int | None:
        address: int | None = self.ggml.ggml_backend_cpu_buffer_type()
        return address

    @_guarded(None)
    def buffer_from_host_ptr(self, _: int, address: int, size: int, max_tensor_size: int) -> int | None:
        buffer: int | None = self.ggml.ggml_backend_cpu_buffer_from_ptr(address, size)
        return buffer

    @_guarded(False)
    def supports_buft(self, _: int, buffer_type: int) -> bool:
        return bool(self.ggml.ggml_backend_buft_is_host(buffer_type))

    @_guarded(False)
    def supports_op(self, _: int, node: int) -> bool:
        op = convert.op_name(self.ggml, node)
        if not convert.computes(op):
            return True
        return self.active and op in OPS and OPS.refusal(convert.node(self.ggml, node)) is None

    # backend

    @_guarded(None)
    def free(self, backend: int) -> None:
        self._backends.pop(backend, None)

    @_guarded(structs.STATUS_FAILED)
    def graph_compute(self, _: int, graph: int) -> int:
        key = convert.key(self.ggml, graph)
        bound = self._plans.get(key)
        if bound is None:
            bound = self._plan(key, graph)
        bound.run()
        self.statistics.computed.update(bound.counts)
        self.statistics.graphs += 1
        return structs.STATUS_SUCCESS

    def _plan(self, key: bytes, graph: int) -> Plan:
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan(convert.graph(self.ggml, graph), OPS)
        return self._plans[key]

    def forget_plans(self) -> None:
        """After an op was replaced: plans hold the kernels they were made with."""
        self._plans.clear()


def _fill(table: type[ctypes.Structure], **callbacks: Callable[..., Any]) -> ctypes.Structure:
    """A table with the given slots set, each by its prototype, the others NULL."""
    prototypes: dict[str, Any] = {name: kind for name, kind, *_ in table._fields_}
    return table(**{name: prototypes[name](callback) for name, callback in callbacks.items()})


def make(ggml: Ggml) -> Plugin:
    """Binds the numerics to this ggml, and registers the backend with it."""
    codecs.bind(ggml)
    strided.make_ready()
    plugin = Plugin(ggml)
    ggml.ggml_backend_register(ctypes.addressof(plugin.registry))
    return plugin
