"""Finds the layout of a live ggml: which words its own functions call and read, in structs of which each word is known.

ggml is given a struct that is full of functions of ours; which of them it calls says where it has the slot. No function
of ggml's is called through a table before all of ggml's functions agree with that table: a layout that does not fit is
refused and does not crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, Structure, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

from ggml_backend_npu.ggml import structs
from ggml_backend_npu.ggml.layouts.layout import Layout

Ggml = Any  # `lib.Ggml`, which asks these functions where its parts are

_WORD = ctypes.sizeof(c_void_p)
_N_WORDS = 48  # more than any of the structs has
_MEMORY = 1 << 20  # bytes of a context


class Reading(NamedTuple):
    """A ggml function, and the part of a struct that it calls or reads.

    part  a slot of the struct's table, or a field
    """

    struct: str
    part: str
    function: str
    arguments: tuple[Any, ...]


class Words(Structure):
    """A struct that is full of our functions, or their table, as an argument."""

    _fields_ = [("words", c_void_p * _N_WORDS)]


class _Bench:
    """Structs whose words are our functions, and tensors, to call ggml's functions with."""

    def __init__(self, ggml: Ggml, layout: Layout, tensors: tuple[int, int]) -> None:
        self._ggml, self._layout = ggml, layout
        self._called: list[int] = []
        scratch = ctypes.create_string_buffer(1 << 9)
        self._result = (ctypes.addressof(scratch) | 0xFF) + 2  # not NULL, true, and large
        recorder = CFUNCTYPE(c_void_p)
        functions = [recorder(self._recording(number)) for number in range(_N_WORDS)]
        self._words = [ctypes.cast(function, c_void_p).value or 0 for function in functions]
        self._kept = scratch, functions
        self._structs = {name: Words((c_void_p * _N_WORDS)(*self._words)) for name in layout.structs}
        at = {name: ctypes.addressof(struct) for name, struct in self._structs.items()}
        c_int.from_address(at["ggml_backend_reg"]).value = layout.api_version
        self._context = ctypes.addressof(scratch)
        table = self._structs["ggml_backend_buffer"]
        self._buffer = int(
            self._call("ggml_backend_buffer_init", at["ggml_backend_buffer_type"], table, self._context, 8)
        )
        self._event = (c_void_p * 2)(at["ggml_backend_device"], None)
        self._at, self._tensors = at, tensors
        for tensor in tensors:
            ctypes.memmove(tensor + structs.BUFFER_AT, self._buffer.to_bytes(_WORD, "little"), _WORD)

    def _recording(self, number: int) -> Callable[[], int]:
        def record() -> int:
            self._called.append(number)
            return self._result

        return record

    def _call(self, name: str, *arguments: Any) -> int:
        function = self._ggml.library[name]
        function.restype = c_void_p
        given = [argument if isinstance(argument, Structure) else c_void_p(argument) for argument in arguments]
        return function(*given) or 0

    def readings(self) -> Iterator[Reading]:
        """All readings."""
        reg, device, backend, buft = (
            self._at[f"ggml_backend{name}"] for name in ("_reg", "_device", "", "_buffer_type")
        )
        buffer, room = self._buffer, self._at["ggml_backend_dev_props"]
        event = ctypes.addressof(self._event)
        source, dst = self._tensors
        moved = (dst, source, 0, 1)  # one byte of a tensor
        twice = (*moved, 2, 1, 1)
        for struct, part, function, *arguments in (
            ("_reg", "get_name", "reg_name", reg),
            ("_reg", "get_device_count", "reg_dev_count", reg),
            ("_reg", "get_device", "reg_dev_get", reg, 0),
            ("_reg", "get_proc_address", "reg_get_proc_address", reg, 0),
            ("_device", "get_name", "dev_name", device),
            ("_device", "get_description", "dev_description", device),
            ("_device", "get_memory", "dev_memory", device, 0, 0),
            ("_device", "get_type", "dev_type", device),
            ("_device", "get_props", "dev_get_props", device, room),
            ("_device", "init_backend", "dev_init", device, 0),
            ("_device", "get_buffer_type", "dev_buffer_type", device),
            ("_device", "get_host_buffer_type", "dev_host_buffer_type", device),
            ("_device", "buffer_from_host_ptr", "dev_buffer_from_host_ptr", device, 0, 0, 0),
            ("_device", "supports_op", "dev_supports_op", device, source),
            ("_device", "supports_buft", "dev_supports_buft", device, 0),
            ("_device", "offload_op", "dev_offload_op", device, source),
            ("_device", "event_new", "event_new", device),
            ("_device", "event_free", "event_free", event),
            ("_device", "event_synchronize", "event_synchronize", event),
            ("_device", "reg", "dev_backend_reg", device),
            ("", "get_name", "name", backend),
            ("", "free", "free", backend),
            ("", "set_tensor_async", "tensor_set_async", backend, *moved),
            ("", "get_tensor_async", "tensor_get_async", backend, *moved),
            ("", "set_tensor_2d_async", "tensor_set_2d_async", backend, *twice),
            ("", "get_tensor_2d_async", "tensor_get_2d_async", backend, *twice),
            ("", "cpy_tensor_async", "tensor_copy_async", backend, backend, source, dst),
            ("", "synchronize", "synchronize", backend),
            ("", "graph_plan_create", "graph_plan_create", backend, 0),
            ("", "graph_plan_free", "graph_plan_free", backend, 0),
            ("", "graph_plan_compute", "graph_plan_compute", backend, 0),
            ("", "graph_compute", "graph_compute_async", backend, 0),
            ("", "event_record", "event_record", event, backend),
            ("", "event_wait", "event_wait", backend, 0),
            ("", "device", "get_device", backend),
            ("", "guid", "guid", backend),
            ("_buffer_type", "get_name", "buft_name", buft),
            ("_buffer_type", "alloc_buffer", "buft_alloc_buffer", buft, 8),
            ("_buffer_type", "alloc_buffer_n", "buft_alloc_buffer_n", buft, 0, 0),
            ("_buffer_type", "get_alignment", "buft_get_alignment", buft),
            ("_buffer_type", "get_max_size", "buft_get_max_size", buft),
            ("_buffer_type", "get_alloc_size", "buft_get_alloc_size", buft, source),
            ("_buffer_type", "get_alloc_size_n", "buft_get_alloc_size_n", buft, 0, 0),
            ("_buffer_type", "is_host", "buft_is_host", buft),
            ("_buffer_type", "device", "buft_get_device", buft),
            ("_buffer", "get_base", "buffer_get_base", buffer),
            ("_buffer", "init_tensor", "buffer_init_tensor", buffer, source),
            ("_buffer", "memset_tensor", "tensor_memset", dst, 0, 0, 1),
            ("_buffer", "set_tensor", "tensor_set", *moved),
            ("_buffer", "get_tensor", "tensor_get", *moved),
            ("_buffer", "set_tensor_2d", "tensor_set_2d", *twice),
            ("_buffer", "get_tensor_2d", "tensor_get_2d", *twice),
            ("_buffer", "cpy_tensor", "buffer_copy_tensor", source, dst),
            ("_buffer", "clear", "buffer_clear", buffer, 0),
            ("_buffer", "reset", "buffer_reset", buffer),
            ("_buffer", "free_buffer", "buffer_free", buffer),
        ):
            yield Reading(f"ggml_backend{struct}", str(part), f"ggml_backend_{function}", tuple(arguments))

    def found(self, reading: Reading) -> int | None:
        """The word that a function called or read; None for a function that this ggml does not have or export."""
        self._called.clear()
        try:
            result = self._call(reading.function, *reading.arguments)
        except AttributeError:
            return None
        if self._called:
            return self._called[0]
        return self._words.index(result) if result in self._words else -1

    def expected(self, struct: str, part: str) -> int:
        """The word that a layout has a slot or a field in; -1 for one that it does not have."""
        offset, table = self._layout.structs[struct].get("iface", (0, ""))
        if part in self._layout.tables[table]:
            return offset // _WORD + list(self._layout.tables[table]).index(part)
        return self._layout.structs[struct].get(part, (-_WORD, ""))[0] // _WORD

    def buffer_holds(self) -> bool:
        """Whether ggml_backend_buffer_init put its arguments where the layout has them."""
        fields = self._layout["ggml_backend_buffer"].from_address(self._buffer)
        return (fields.buft, fields.context, fields.size) == (self._at["ggml_backend_buffer_type"], self._context, 8)


def facts(ggml: Ggml, layout: Layout) -> Iterator[tuple[str, bool]]:
    """What is asked of a ggml, by name, and whether its answer fits a layout. After the first answer that does not fit,
    the caller must not ask further."""
    memory = ctypes.create_string_buffer(_MEMORY)
    context = ggml.ggml_init(structs.InitParams(_MEMORY, ctypes.addressof(memory), False))
    try:
        yield from _public(ggml, context, memory)
        tensors = [ggml.ggml_new_tensor(context, ggml.type_numbers["q8_0"], 1, (c_int64 * 1)(64)) for _ in range(2)]
        bench = _Bench(ggml, layout, (tensors[0], tensors[1]))
        yield "ggml_backend_buffer", bench.buffer_holds()
        for reading in bench.readings():
            found = bench.found(reading)
            if found is not None:
                yield f"{reading.struct}.{reading.part}", found == bench.expected(reading.struct, reading.part)
    finally:
        ggml.ggml_free(context)
    yield from _live(ggml, layout)


def _public(ggml: Ggml, context: int, memory: Any) -> Iterator[tuple[str, bool]]:
    """The tensor and the graph, which every known layout has in common."""
    q8_0 = ggml.type_numbers["q8_0"]
    table = ggml.ggml_new_tensor(context, q8_0, 4, (c_int64 * 4)(32, 3, 2, 1))
    ggml.ggml_set_name(table, b"a name")
    view = ggml.ggml_view_4d(context, table, 32, 2, 1, 1, 34, 68, 68, 34)
    node = ggml.ggml_cont(context, view)
    fields = [structs.TENSOR.unpack(ctypes.string_at(t, structs.TENSOR.size)) for t in (table, view, node)]
    yield (
        "ggml_tensor",
        fields[0][2:10] == (32, 3, 2, 1, 34, 34, 102, 204)
        and fields[0][26].rstrip(b"\0") == b"a name"
        and fields[1][23:25] == (table, 34)
        and ggml.ops[fields[2][10]] == "CONT"
        and fields[2][13] == view,
    )
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, node)
    laid_out = structs.GgmlCGraph.from_address(graph)
    begin = ctypes.addressof(memory)
    parts = [
        ctypes.cast(part, c_void_p).value or 0
        for part in (laid_out.nodes, laid_out.use_counts, laid_out.visited.used, laid_out.visited.keys)
    ]
    yield (
        "ggml_cgraph",
        laid_out.n_nodes == ggml.ggml_graph_n_nodes(graph)
        and parts[0] == ggml.ggml_graph_nodes(graph)
        and all(begin <= part < begin + _MEMORY for part in parts)
        and laid_out.visited.size < _MEMORY // _WORD
        and [laid_out.uses(tensor) for tensor in (view, node, 16)] == [1, 0, -1],
    )
    traits = ggml.ggml_get_type_traits(q8_0).contents
    yield (
        "ggml_type_traits",
        c_void_p.from_buffer(traits).value == address(ggml, "ggml_type_name", q8_0)
        and (traits.blck_size, traits.type_size, traits.is_quantized) == (32, 34, True),
    )


def _live(ggml: Ggml, layout: Layout) -> Iterator[tuple[str, bool]]:
    """The CPU backend's own structs, once the tables are known to fit the layout."""
    cpu = ggml.ggml_backend_reg_by_name(b"CPU")
    registry = layout["ggml_backend_reg"].from_address(cpu)
    name = b"ggml_backend_set_n_threads"
    yield "the CPU's registry", c_char_p(registry.iface.get_name(cpu)).value == b"CPU"
    proc = ggml.ggml_backend_reg_get_proc_address(cpu, name)
    yield "the CPU's get_proc_address", registry.iface.get_proc_address(cpu, name) == proc
    handle = ggml.ggml_backend_reg_dev_get(cpu, 0)
    device = layout["ggml_backend_device"].from_address(handle)
    yield (
        "the CPU's device",
        device.reg == cpu
        and device.iface.get_type(handle) == structs.DEVICE_TYPE_CPU
        and device.iface.supports_buft(handle, ggml.ggml_backend_cpu_buffer_type()),
    )
    yield "ggml_backend_dev_props", _has_props(ggml, layout, handle)
    backend = ggml.ggml_backend_dev_init(handle, None)
    live = layout["ggml_backend"].from_address(backend)
    same = live.device == handle and bool(live.iface.graph_compute) and not live.iface.event_record
    ggml.ggml_backend_free(backend)
    yield "the CPU's backend", same


def _has_props(ggml: Ggml, layout: Layout, device: int) -> bool:
    """Whether ggml_backend_dev_get_props says of the CPU what the single functions say. No text is dereferenced."""
    props, caps = layout["ggml_backend_dev_props"], layout["ggml_backend_dev_caps"]
    room = (c_void_p * 64)()
    ggml.ggml_backend_dev_get_props(device, room)
    said = props.from_buffer(room)
    texts = [address(ggml, f"ggml_backend_dev_{name}", device) for name in ("name", "description")]
    total = c_size_t()
    ggml.ggml_backend_dev_memory(device, c_size_t(), total)
    capabilities = bytes(said.caps)[: len(caps._fields_)]
    return (
        [room[part.offset // _WORD] for part in (props.name, props.description)] == texts
        and (said.memory_total, said.type) == (total.value, structs.DEVICE_TYPE_CPU)
        and max(capabilities) <= 1
        and bool(said.caps.buffer_from_host_ptr)
    )


def uncounted(ggml: Ggml) -> frozenset[str]:
    """Which of the ops that keep states do not have their number K in op_params. Without it, SSM_SCAN keeps one state,
    and the states of GATED_DELTA_NET have other dimensions."""
    memory = ctypes.create_string_buffer(_MEMORY)
    context = ggml.ggml_init(structs.InitParams(_MEMORY, ctypes.addressof(memory), True))
    one = (c_int64 * 4)(1, 1, 1, 1)
    floats, ids = (ggml.ggml_new_tensor(context, ggml.type_numbers[type], 4, one) for type in ("f32", "i32"))
    found = []
    for op, sources in (("SSM_SCAN", (*[floats] * 6, ids)), ("GATED_DELTA_NET", (floats,) * 6)):
        function = ggml.library[f"ggml_{op.lower()}"]
        function.restype, function.argtypes = c_void_p, [c_void_p] * (1 + len(sources)) + [c_int64]
        node = function(context, *sources, 3)  # one argument too many does no harm
        params = structs.TENSOR.unpack(ctypes.string_at(node, structs.TENSOR.size))[11]
        found += [op] if int.from_bytes(params[:4], "little") != 3 else []
    ggml.ggml_free(context)
    return frozenset(found)


def address(ggml: Ggml, function: str, argument: int) -> int | None:
    """The address of the text that a ggml function returns."""
    found = ggml.library[function]
    found.restype, found.argtypes = c_void_p, [c_void_p]
    address: int | None = found(argument)
    return address
