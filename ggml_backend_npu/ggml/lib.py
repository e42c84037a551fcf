"""Finds the ggml of this process, types its functions, and refuses one whose private layouts are not known here."""

from __future__ import annotations

import ctypes
import difflib
import os
import re
import sys
from bisect import bisect_right
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count, takewhile
from typing import Any, NamedTuple

from ggml_backend_npu.ggml import layouts, llama, places, probes, structs
from ggml_backend_npu.ggml.layouts.layout import Layout
from quant.errors import UserError

_NAME = re.compile(rb"[A-Z][A-Z0-9_]*")  # of an op or a function
_MOST_BYTES = 1 << 16  # of a block of any type

_Functions = dict[str, tuple[Any, list[Any]]]

_FUNCTIONS: _Functions = {
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_op_name": (c_char_p, [c_int]),
    "ggml_unary_op_name": (c_char_p, [c_int]),
    "ggml_glu_op_name": (c_char_p, [c_int]),
    "ggml_quantize_requires_imatrix": (c_bool, [c_int]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "ggml_get_type_traits": (POINTER(structs.TypeTraits), [c_int]),
    "ggml_init": (c_void_p, [structs.InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "ggml_set_name": (c_void_p, [c_void_p, c_char_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_view_4d": (c_void_p, [c_void_p, c_void_p, *[c_int64] * 4, *[c_size_t] * 4]),
    "ggml_permute": (c_void_p, [c_void_p, c_void_p, *[c_int] * 4]),
    "ggml_transpose": (c_void_p, [c_void_p, c_void_p]),
    "ggml_cont": (c_void_p, [c_void_p] * 2),
    "ggml_reshape_4d": (c_void_p, [c_void_p, c_void_p, *[c_int64] * 4]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_graph_n_nodes": (c_int, [c_void_p]),
    "ggml_graph_nodes": (c_void_p, [c_void_p]),
    "ggml_backend_register": (None, [c_void_p]),
    "ggml_backend_unload": (None, [c_void_p]),
    "ggml_set_abort_callback": (c_void_p, [c_void_p]),
    "ggml_backend_reg_count": (c_size_t, []),
    "ggml_backend_reg_get": (c_void_p, [c_size_t]),
    "ggml_backend_reg_name": (c_char_p, [c_void_p]),
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_reg_dev_count": (c_size_t, [c_void_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_get_props": (None, [c_void_p, c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_dev_host_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_supports_buft": (c_bool, [c_void_p, c_void_p]),
    "ggml_backend_guid": (c_void_p, [c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_set_output": (None, [c_void_p]),
    "ggml_gallocr_new": (c_void_p, [c_void_p]),
    "ggml_gallocr_alloc_graph": (c_bool, [c_void_p, c_void_p]),
    "ggml_gallocr_free": (None, [c_void_p]),
    "ggml_backend_get_default_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_alloc_ctx_tensors": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_buffer_get_base": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_get_size": (c_size_t, [c_void_p]),
    "ggml_backend_buffer_get_usage": (c_int, [c_void_p]),
    "ggml_backend_buffer_get_type": (c_void_p, [c_void_p]),
    "ggml_backend_buffer_is_host": (c_bool, [c_void_p]),
    "ggml_backend_buft_get_device": (c_void_p, [c_void_p]),
    "ggml_backend_buft_is_host": (c_bool, [c_void_p]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_log_set": (None, [c_void_p, c_void_p]),
}

# what moves bytes between the host and devices, and what ggml knows of ops; taken when they are first asked for, as
# older versions lack some
_OF_MEMORY: _Functions = {
    "ggml_backend_buft_alloc_buffer": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_buffer_clear": (None, [c_void_p, c_uint8]),
    "ggml_backend_buft_get_alloc_size": (c_size_t, [c_void_p] * 2),
    "ggml_backend_tensor_alloc": (c_int, [c_void_p] * 3),
    "ggml_backend_view_init": (c_int, [c_void_p]),
    "ggml_backend_tensor_memset": (None, [c_void_p, c_uint8, c_size_t, c_size_t]),
    "ggml_backend_tensor_copy": (None, [c_void_p] * 2),
    "ggml_backend_tensor_set_2d": (None, [c_void_p, c_void_p, *[c_size_t] * 5]),
    "ggml_backend_tensor_get_2d": (None, [c_void_p, c_void_p, *[c_size_t] * 5]),
    "ggml_backend_tensor_set_async": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get_async": (None, [c_void_p, c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_copy_async": (None, [c_void_p] * 4),
    "ggml_backend_synchronize": (None, [c_void_p]),
    "ggml_backend_event_new": (c_void_p, [c_void_p]),
    "ggml_backend_event_free": (None, [c_void_p]),
    "ggml_backend_event_record": (None, [c_void_p] * 2),
    "ggml_backend_event_synchronize": (None, [c_void_p]),
    "ggml_backend_event_wait": (None, [c_void_p] * 2),
    "ggml_op_can_inplace": (c_bool, [c_int]),
}

# arguments of functions that make nodes, as `Op.functions` has them
_KINDS: dict[str, Any] = {
    "c": c_void_p,
    "t": c_void_p,
    "i": c_int,
    "l": c_int64,
    "z": c_size_t,
    "u": c_uint32,
    "f": c_float,
    "b": c_bool,
    "p": POINTER(c_int),
    "q": POINTER(c_int64),
}

_CPU_FUNCTIONS: _Functions = {
    "ggml_get_type_traits_cpu": (POINTER(structs.TypeTraitsCpu), [c_int]),
    "ggml_cpu_init": (None, []),
    "ggml_graph_compute_with_ctx": (c_int, [c_void_p, c_void_p, c_int]),
}


class UnknownGgmlError(UserError):
    """A ggml that this backend does not know; the message says what was found."""


@dataclass(frozen=True)
class TypeInfo:
    """A ggml type by number, with ggml's own name and sizes for it: elements and bytes of a block."""

    number: int
    name: str
    block_size: int
    block_bytes: int


class Ggml:
    """ggml's functions, typed, by their C names: `ggml.ggml_nbytes(tensor)`. Raises UnknownGgmlError.

    library   the library that exports the functions
    cpu_file  the file that its CPU backend was loaded from: a library, or a program
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._take(library, {"ggml_version": (c_char_p, [])})
        self._take(library, _FUNCTIONS)
        cpu = self.ggml_backend_reg_by_name(b"CPU")
        if cpu is None:
            raise UnknownGgmlError(f"ggml {self.version}: no CPU backend is loaded")
        # where ggml's backends are libraries of their own (GGML_BACKEND_DL), no other one links the CPU's
        at = c_void_p.from_address(cpu + layouts.NEWEST["ggml_backend_reg"].iface.offset)
        self._cpu, self.cpu_file = _library_at(at), places.file_at(at)
        self._take(self._cpu, _CPU_FUNCTIONS)

    def _take(self, library: ctypes.CDLL, functions: _Functions) -> None:
        for name, (result, arguments) in functions.items():
            try:
                function = library[name]
            except AttributeError:
                where = library._name or "what this program exports"
                raise UnknownGgmlError(f"ggml: no function {name} in {where}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    @cached_property
    def layout(self) -> Layout:
        """The layout of its private structs. Raises UnknownGgmlError where that is not known, with its API version or
        the probe that does not fit."""
        api_version = ctypes.c_int.from_address(self.ggml_backend_reg_by_name(b"CPU")).value
        known = sorted({layout.api_version for layout in layouts.KNOWN})
        candidates = [layout for layout in layouts.KNOWN if layout.api_version == api_version]
        if not candidates:
            raise UnknownGgmlError(
                f"ggml {self.version} is not known to this backend: its GGML_BACKEND_API_VERSION is {api_version}, "
                f"known are {' and '.join(map(str, known))}"
            )
        wrong = {}
        # the layout of its own version first
        for layout in sorted(candidates, key=lambda each: self._distance(each)):
            wrong[layout] = next((what for what, holds in probes.facts(self, layout) if not holds), None)
            if wrong[layout] is None:
                self._take(self.library, {"ggml_backend_buffer_init": _buffer_init(layout)})
                return layout
        raise UnknownGgmlError(
            f"ggml {self.version}: {next(iter(wrong.values()))} is not where the versions known to this backend have it"
        )

    def _distance(self, layout: Layout) -> int:
        """How far a layout's versions are from this ggml's version, in the order of the known versions."""
        known = [*map(numbers, layouts.VERSIONS)]
        place = bisect_right(known, numbers(self.version)) - 1
        places = [known.index(numbers(version)) for version in layout.versions] or [len(known)]
        return min(abs(place - each) for each in places)

    @property
    def is_between(self) -> bool:
        """Whether its version is one whose layout is known, or lies between two such versions."""
        known = [*map(numbers, layouts.VERSIONS)]
        return self.layout.api_version == layouts.NEWEST.api_version and known[0] <= numbers(self.version) <= known[-1]

    def __getattr__(self, name: str) -> Any:
        """A function of `_OF_MEMORY`, typed. Raises AttributeError for any other, and if this version has none."""
        if name not in _OF_MEMORY or not hasattr(self.library, name):
            raise AttributeError(f"ggml: no function {name} is known here, or in this version")
        self._take(self.library, {name: _OF_MEMORY[name]})
        return self.__dict__[name]

    def typed(self, name: str, kinds: str) -> Any:
        """A function that makes a node, or changes one, typed as its op says (`Op.functions`). Raises AttributeError
        where this ggml has none."""
        if not hasattr(self.library, name):
            raise AttributeError(f"ggml: no function {name} in this version")
        result = c_void_p if kinds.startswith("c") else None
        self._take(self.library, {name: (result, [_KINDS[kind] for kind in kinds.replace(" ", "")])})
        return self.__dict__[name]

    @cached_property
    def openmp(self) -> int:
        """Address of the addresses of GOMP_parallel and omp_get_thread_num in the OpenMP runtime whose threads ggml's
        CPU backend takes; 0 where it is built without OpenMP."""
        try:
            functions = self._cpu.GOMP_parallel, self._cpu.omp_get_thread_num
        except AttributeError:
            return 0
        self._of_openmp = (c_void_p * 2)(*(ctypes.cast(function, c_void_p).value for function in functions))
        return ctypes.addressof(self._of_openmp)

    @cached_property
    def contracts(self) -> bool:
        """Whether the compiler of its CPU backend fused a product and its sum into one step (-ffp-contract). The GELU
        of the half float 0xbfff tells, in ggml_table_gelu_f16; True where that table cannot be read."""
        self.ggml_cpu_init()
        try:
            table = (c_uint16 * (1 << 16)).in_dll(self._cpu, "ggml_table_gelu_f16")
        except ValueError:
            return True
        return table[0xBFFF] != 0xA9D2

    @cached_property
    def features(self) -> dict[str, str]:
        """The features that its CPU backend was compiled with, by ggml's names: "AVX2", "AVX512", "OPENMP", ..."""
        registry = self.ggml_backend_reg_by_name(b"CPU")
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
        if not address:
            return {}
        found = structs.GetFeatures(address)(registry)
        each = takewhile(lambda feature: feature.name, (found[i] for i in count()))
        return {feature.name.decode(): feature.value.decode() for feature in each}

    @cached_property
    def version(self) -> str:
        """ggml_version, such as "0.15.3"."""
        version: bytes = self.ggml_version()
        return version.decode()

    @cached_property
    def types(self) -> dict[int, TypeInfo]:
        """Every type of this ggml, by number. The table ends at the first number that is not a type."""
        found: dict[int, TypeInfo] = {}
        for number in count():
            name, sizes = (
                self._text("ggml_type_name", number),
                (self.ggml_blck_size(number), self.ggml_type_size(number)),
            )
            if name is None or not all(0 <= size <= _MOST_BYTES for size in sizes):
                return found
            if all(sizes):
                found[number] = TypeInfo(number, name.decode(), *sizes)
        return found

    def _text(self, function: str, number: int) -> bytes | None:
        """The text that a ggml function returns for a number; None where it is not a text of the same library, as it
        may be past the end of a table."""
        address = probes.address(self, function, number)
        if not address or places.file_at(c_void_p(address)) != places.file_at(
            ctypes.cast(self.library[function], c_void_p)
        ):
            return None
        return ctypes.string_at(address)

    def _names(self, function: str) -> dict[int, str]:
        """A table of names, by number. It ends where what follows is not a name, or is another table."""
        tables = ("ggml_op_name", "ggml_unary_op_name", "ggml_glu_op_name")
        others = [self._text(other, 0) for other in tables if other != function]
        names = takewhile(
            lambda name: name is not None and _NAME.fullmatch(name) and name not in others,
            (self._text(function, number) for number in count()),
        )
        return {number: name.decode() for number, name in enumerate(names) if name is not None}

    @cached_property
    def type_numbers(self) -> dict[str, int]:
        """Number of each ggml_type, by name."""
        return {info.name: info.number for info in self.types.values()}

    @cached_property
    def ops(self) -> dict[int, str]:
        """Names of the ops, by number."""
        return self._names("ggml_op_name")

    @cached_property
    def functions(self) -> dict[str, dict[int, str]]:
        """Names of the functions of the ops UNARY and GLU, by number."""
        return {"UNARY": self._names("ggml_unary_op_name"), "GLU": self._names("ggml_glu_op_name")}

    @cached_property
    def uncounted(self) -> frozenset[str]:
        """Which of SSM_SCAN and GATED_DELTA_NET do not have the number K of states to keep in their op_params."""
        return probes.uncounted(self)

    @cached_property
    def op_numbers(self) -> dict[str, tuple[int, int | None]]:
        """For each name that `op_name` may return, the op's number and, for UNARY and GLU, the function's."""
        numbers: dict[str, tuple[int, int | None]] = {name: (number, None) for number, name in self.ops.items()}
        for op, names in self.functions.items():
            number, _ = numbers.pop(op)
            numbers.update({name: (number, function) for function, name in names.items()})
        return numbers

    @cached_property
    def op_names(self) -> frozenset[str]:
        """Every name that `op_name` may return."""
        names = {*self.ops.values(), *(name for names in self.functions.values() for name in names.values())}
        return frozenset(names - self.functions.keys())

    def has_no_op(self, name: str) -> str:
        """What to say of a name that is none of its ops: it names the nearest one."""
        near = difflib.get_close_matches(name.upper(), self.op_names, n=1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        return f"ggml {self.version} has no op {name!r}{meant}"

    def op_name(self, op: int, first_param: int) -> str:
        """ggml_op_desc: the op's name; for UNARY and GLU the name of their function, by the first op_param."""
        name = self.ops[op]
        return self.functions[name][first_param] if name in self.functions else name


class DeviceInfo(NamedTuple):
    """A device of ggml's, as it describes itself."""

    name: str
    type: str
    backend: str
    description: str


_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL", 4: "META"}


def describe(found: Ggml, device: int) -> DeviceInfo:
    """What a device says of itself. device: its ggml_backend_dev_t."""
    return DeviceInfo(
        found.ggml_backend_dev_name(device).decode(),
        _DEVICE_TYPES[found.ggml_backend_dev_type(device)],
        found.ggml_backend_reg_name(found.ggml_backend_dev_backend_reg(device)).decode(),
        found.ggml_backend_dev_description(device).decode(),
    )


def list_devices(found: Ggml) -> list[DeviceInfo]:
    """Every device of this process, in the order of registration."""
    return [describe(found, found.ggml_backend_dev_get(index)) for index in range(found.ggml_backend_dev_count())]


_given: dict[str, ctypes.CDLL] = {}  # the library whose ggml this process was told to `take`, by its argument


def take(where: str | os.PathLike[str]) -> None:
    """Makes the ggml of a Python package, or of a library, the ggml of this process. Raises PlaceError where it has
    none, and where the process has another one already."""
    library = places.library_of(where)
    if ggml.cache_info().currsize and ggml().library._handle != library._handle:
        has = f"the ggml {ggml().version} of {ggml().cpu_file}"
        raise places.PlaceError(f"into={str(where)!r}: this process has {has} already, and a process has one")
    _given[str(where)] = library


def unchecked() -> Ggml:
    """The ggml of this process, with its layouts not checked: the one that the process was told to `take`, that of the
    program that has loaded this backend as its plugin, or that of llama-cpp-python. Raises UnknownGgmlError where a
    plugin does not say which it is."""
    if _given:
        return Ggml(next(iter(_given.values())))
    plugin = sys.modules.get("_ggml_npu")
    if plugin is None:
        return Ggml(_llama_cpp())
    if not hasattr(plugin, "caller"):
        raise UnknownGgmlError(
            "the plugin was built by another version of this package; `ggml-npu plugin` builds it anew"
        )
    return Ggml(_library_at(c_void_p(plugin.caller)))


@cache
def ggml() -> Ggml:
    """The ggml of this process, checked; the first call chooses it. Raises UnknownGgmlError where it is unknown."""
    found = unchecked()
    _ = found.layout
    if not found.is_between:
        print(
            f"ggml-npu: ggml {found.version} is not one of the versions known to this backend "
            f"({layouts.VERSIONS[0]} to {layouts.VERSIONS[-1]}); its layouts fit",
            file=sys.stderr,
        )
    return found


def check_caller(caller: int) -> None:
    """Raises UnknownGgmlError where the ggml of the code at an address is not known here."""
    _ = Ggml(_library_at(c_void_p(caller))).layout


def numbers(version: str) -> tuple[int, ...]:
    """Major, minor and patch of a ggml version."""
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:3])


def _buffer_init(layout: Layout) -> tuple[Any, list[Any]]:
    """Result and arguments of ggml_backend_buffer_init, which takes a table by value."""
    return c_void_p, [c_void_p, layout["ggml_backend_buffer_i"], c_void_p, c_size_t]


def _llama_cpp() -> ctypes.CDLL:
    """libllama's own handle: it finds the ggml that libllama uses; the wheel holds several copies of it."""
    try:
        library: ctypes.CDLL = llama.functions()._lib
    except UserError as error:
        raise UnknownGgmlError(f"{error}; register(into=...) takes another package's ggml") from None
    return library


def _library_at(address: c_void_p) -> ctypes.CDLL:
    """The loaded library that an address lies in, or the program itself."""
    try:
        return ctypes.CDLL(str(places.file_at(address)), mode=os.RTLD_NOLOAD)
    except OSError:
        return ctypes.CDLL(None)
