"""Finds the ggml of this process, types its functions, and refuses one whose private layouts are not known here."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count, takewhile
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any, NamedTuple

from ggml_backend_npu.abi import structs
from quant.errors import UserError

if TYPE_CHECKING:
    from ggml_backend_npu.abi.plugin import Plugin

API_VERSION = 2


class Counts(NamedTuple):
    """How many types, ops and functions of UNARY and GLU a ggml has: its tables of names do not end by themselves."""

    types: int
    ops: int
    unary: int
    glu: int


KNOWN_VERSIONS = {"0.25": Counts(types=43, ops=101, unary=22, glu=7)}

_Functions = dict[str, tuple[Any, list[Any]]]

_FUNCTIONS: _Functions = {
    "ggml_type_name": (c_char_p, [c_int]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_op_name": (c_char_p, [c_int]),
    "ggml_unary_op_name": (c_char_p, [c_int]),
    "ggml_glu_op_name": (c_char_p, [c_int]),
    "ggml_get_type_traits": (POINTER(structs.TypeTraits), [c_int]),
    "ggml_init": (c_void_p, [structs.InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64)]),
    "ggml_set_name": (c_void_p, [c_void_p, c_char_p]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
    "ggml_view_4d": (c_void_p, [c_void_p, c_void_p, *[c_int64] * 4, *[c_size_t] * 4]),
    "ggml_permute": (c_void_p, [c_void_p, c_void_p, *[c_int] * 4]),
    "ggml_transpose": (c_void_p, [c_void_p, c_void_p]),
    "ggml_get_rows": (c_void_p, [c_void_p] * 3),
    "ggml_set_rows": (c_void_p, [c_void_p] * 4),
    "ggml_cpy": (c_void_p, [c_void_p] * 3),
    "ggml_cast": (c_void_p, [c_void_p, c_void_p, c_int]),
    "ggml_dup": (c_void_p, [c_void_p] * 2),
    "ggml_cont": (c_void_p, [c_void_p] * 2),
    "ggml_sqr": (c_void_p, [c_void_p] * 2),
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 3) for name in ("add", "sub", "mul", "div", "repeat")},
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 3) for name in ("mul_mat", "swiglu_split")},
    "ggml_mul_mat_id": (c_void_p, [c_void_p] * 4),
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 2) for name in ("silu", "gelu", "sigmoid")},
    **{f"ggml_{name}": (c_void_p, [c_void_p, c_void_p, c_float]) for name in ("norm", "rms_norm")},
    **{f"ggml_{name}": (c_void_p, [c_void_p, c_void_p, c_float]) for name in ("l2_norm", "scale", "fill")},
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 2) for name in ("sqrt", "log", "sin", "cos")},
    **{f"ggml_{name}": (c_void_p, [c_void_p, c_void_p, c_int]) for name in ("unary", "unary_inplace", "top_k")},
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 3 + [c_int]) for name in ("glu_split", "add_cast")},
    "ggml_glu": (c_void_p, [c_void_p, c_void_p, c_int, c_bool]),
    "ggml_swiglu_oai": (c_void_p, [c_void_p] * 3 + [c_float] * 2),
    "ggml_swiglu_clamp": (c_void_p, [c_void_p] * 3 + [c_float]),
    "ggml_xielu": (c_void_p, [c_void_p, c_void_p, *[c_float] * 4]),
    "ggml_group_norm": (c_void_p, [c_void_p, c_void_p, c_int, c_float]),
    "ggml_add_id": (c_void_p, [c_void_p] * 4),
    "ggml_arange": (c_void_p, [c_void_p, *[c_float] * 3]),
    "ggml_scale_bias": (c_void_p, [c_void_p, c_void_p, c_float, c_float]),
    "ggml_pool_2d": (c_void_p, [c_void_p, c_void_p, *[c_int] * 5, *[c_float] * 2]),
    "ggml_pool_1d": (c_void_p, [c_void_p, c_void_p, *[c_int] * 4]),
    "ggml_pool_2d_back": (c_void_p, [c_void_p] * 3 + [c_int] * 5 + [c_float] * 2),
    "ggml_clamp": (c_void_p, [c_void_p, c_void_p, c_float, c_float]),
    "ggml_sum_rows": (c_void_p, [c_void_p] * 2),
    "ggml_concat": (c_void_p, [c_void_p] * 3 + [c_int]),
    "ggml_argsort": (c_void_p, [c_void_p, c_void_p, c_int]),
    "ggml_reshape_4d": (c_void_p, [c_void_p, c_void_p, *[c_int64] * 4]),
    "ggml_soft_max_ext": (c_void_p, [c_void_p] * 3 + [c_float] * 2),
    "ggml_soft_max_add_sinks": (None, [c_void_p] * 2),
    "ggml_flash_attn_ext": (c_void_p, [c_void_p] * 5 + [c_float] * 3),
    "ggml_flash_attn_ext_add_sinks": (None, [c_void_p] * 2),
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 2) for name in ("sum", "mean", "cumsum", "argmax")},
    "ggml_im2col": (c_void_p, [c_void_p] * 3 + [c_int] * 6 + [c_bool, c_int]),
    "ggml_im2col_back": (c_void_p, [c_void_p] * 3 + [POINTER(c_int64)] + [c_int] * 6 + [c_bool]),
    "ggml_im2col_3d": (c_void_p, [c_void_p] * 3 + [c_int64] + [c_int] * 10),
    "ggml_conv_2d_direct": (c_void_p, [c_void_p] * 3 + [c_int] * 6),
    "ggml_conv_2d_dw_direct": (c_void_p, [c_void_p] * 3 + [c_int] * 6),
    "ggml_conv_3d_direct": (c_void_p, [c_void_p] * 3 + [c_int] * 12),
    "ggml_conv_transpose_1d": (c_void_p, [c_void_p] * 3 + [c_int] * 3),
    "ggml_conv_transpose_2d_p0": (c_void_p, [c_void_p] * 3 + [c_int]),
    "ggml_col2im_1d": (c_void_p, [c_void_p] * 2 + [c_int] * 3),
    "ggml_interpolate": (c_void_p, [c_void_p] * 2 + [c_int64] * 4 + [c_uint32]),
    "ggml_pad_reflect_1d": (c_void_p, [c_void_p] * 2 + [c_int] * 2),
    "ggml_roll": (c_void_p, [c_void_p] * 2 + [c_int] * 4),
    "ggml_timestep_embedding": (c_void_p, [c_void_p] * 2 + [c_int] * 2),
    "ggml_win_part": (c_void_p, [c_void_p] * 2 + [c_int]),
    "ggml_win_unpart": (c_void_p, [c_void_p] * 2 + [c_int] * 3),
    "ggml_get_rel_pos": (c_void_p, [c_void_p] * 2 + [c_int] * 2),
    "ggml_add_rel_pos": (c_void_p, [c_void_p] * 4),
    "ggml_add_rel_pos_inplace": (c_void_p, [c_void_p] * 4),
    "ggml_tri": (c_void_p, [c_void_p] * 2 + [c_int]),
    "ggml_solve_tri": (c_void_p, [c_void_p] * 3 + [c_bool] * 3),
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 3 + [c_size_t] * 4) for name in ("set", "set_inplace")},
    **{f"ggml_{name}": (c_void_p, [c_void_p] * 2 + [c_int] * 8) for name in ("pad_ext", "pad_ext_circular")},
    "ggml_ssm_conv": (c_void_p, [c_void_p] * 3),
    "ggml_ssm_scan": (c_void_p, [c_void_p] * 8 + [c_int64]),
    "ggml_rwkv_wkv6": (c_void_p, [c_void_p] * 7),
    "ggml_rwkv_wkv7": (c_void_p, [c_void_p] * 8),
    "ggml_gated_linear_attn": (c_void_p, [c_void_p] * 6 + [c_float]),
    "ggml_gated_delta_net": (c_void_p, [c_void_p] * 7 + [c_int64]),
    **{
        f"ggml_rope_{name}": (c_void_p, [c_void_p] * 4 + [c_int] * 3 + [c_float] * 6)
        for name in ("ext", "ext_inplace", "ext_back")
    },
    **{
        f"ggml_rope_{name}": (c_void_p, [c_void_p] * 4 + [c_int, POINTER(c_int), c_int, c_int] + [c_float] * 6)
        for name in ("multi", "multi_inplace", "multi_back")
    },
    "ggml_lightning_indexer": (c_void_p, [c_void_p] * 5),
    "ggml_dsv4_hc_comb": (c_void_p, [c_void_p] * 4 + [c_float, c_int]),
    "ggml_dsv4_hc_pre": (c_void_p, [c_void_p] * 3),
    "ggml_dsv4_hc_pre_gated": (c_void_p, [c_void_p] * 3 + [c_float]),
    "ggml_dsv4_hc_post": (c_void_p, [c_void_p] * 5),
    "ggml_rope_set_offset": (None, [c_void_p, c_int]),
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
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_backend_dev_backend_reg": (c_void_p, [c_void_p]),
    "ggml_backend_dev_init": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_dev_supports_op": (c_bool, [c_void_p, c_void_p]),
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
    "ggml_backend_buffer_init": (c_void_p, [c_void_p, structs.BufferTable, c_void_p, c_size_t]),
    "ggml_backend_buft_is_host": (c_bool, [c_void_p]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_log_set": (None, [c_void_p, c_void_p]),
}

_CPU_FUNCTIONS: _Functions = {
    "ggml_get_type_traits_cpu": (POINTER(structs.TypeTraitsCpu), [c_int]),
    "ggml_cpu_init": (None, []),
}


class UnknownGgmlError(UserError):
    """A ggml that this backend does not know: the message says what was found."""


@dataclass(frozen=True)
class TypeInfo:
    """A ggml type by number, as ggml itself names and measures it."""

    number: int
    name: str
    block_size: int
    block_bytes: int


class Ggml:
    """ggml's functions, typed, by their C names: `ggml.ggml_nbytes(tensor)`. Raises UnknownGgmlError.

    cpu_file  what its CPU backend was loaded from: a library, or a program
    plugins   our backends that are registered with it, by the name of the device
    registering  held while its registry is not to change
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.plugins: dict[str, Plugin] = {}
        self.registering = RLock()
        self._take(library, {"ggml_version": (c_char_p, [])})
        _ = self.counts  # a version that is not known is refused by its number, not by a function that it lacks
        self._take(library, _FUNCTIONS)
        cpu = self.ggml_backend_reg_by_name(b"CPU")
        if cpu is None:
            raise UnknownGgmlError(f"ggml {self.version}: no CPU backend is loaded")
        # where ggml's backends are libraries of their own (GGML_BACKEND_DL), no other one links the CPU's
        at = ctypes.cast(structs.GgmlBackendReg.from_address(cpu).iface.get_name, c_void_p)
        self._cpu, self.cpu_file = _library_at(at), _file_at(at)
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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @cached_property
    def openmp(self) -> int:
        """The address of GOMP_parallel of the OpenMP runtime that ggml's CPU backend has its threads from; 0 where it
        is built without one."""
        try:
            return ctypes.cast(self._cpu.GOMP_parallel, c_void_p).value or 0
        except AttributeError:
            return 0

    @cached_property
    def contracts(self) -> bool:
        """Whether the compiler of its CPU backend made one step of a product and its sum (-ffp-contract): of all half
        floats, the GELU of 0xbfff tells. True where the table of them cannot be read."""
        self.ggml_cpu_init()
        try:
            table = (c_uint16 * (1 << 16)).in_dll(self._cpu, "ggml_table_gelu_f16")
        except ValueError:
            return True
        return table[0xBFFF] != 0xA9D2

    @cached_property
    def features(self) -> dict[str, str]:
        """What its CPU backend says it was compiled with, by ggml's names: "AVX2", "AVX512", "OPENMP", ..."""
        registry = self.ggml_backend_reg_by_name(b"CPU")
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_get_features")
        if not address:
            return {}
        found = structs.GetFeatures(address)(registry)
        each = takewhile(lambda feature: feature.name, (found[i] for i in count()))
        return {feature.name.decode(): feature.value.decode() for feature in each}

    @cached_property
    def version(self) -> str:
        version: bytes = self.ggml_version()
        return version.decode()

    @cached_property
    def counts(self) -> Counts:
        """How long ggml's tables of names are. Raises UnknownGgmlError for a version that is not known here."""
        counts = KNOWN_VERSIONS.get(".".join(self.version.split(".")[:2]))
        if counts is None:
            known = ", ".join(f"{version}.x" for version in KNOWN_VERSIONS)
            raise UnknownGgmlError(f"ggml {self.version} is not known to this backend; known: {known}")
        return counts

    @cached_property
    def types(self) -> dict[int, TypeInfo]:
        """Every type of this ggml, by number."""
        sizes = {number: self.ggml_type_size(number) for number in range(self.counts.types)}
        return {
            number: TypeInfo(number, self.ggml_type_name(number).decode(), self.ggml_blck_size(number), size)
            for number, size in sizes.items()
            if size
        }

    @cached_property
    def type_numbers(self) -> dict[str, int]:
        return {info.name: info.number for info in self.types.values()}

    @cached_property
    def ops(self) -> dict[int, str]:
        """Names of the ops, by number."""
        return {number: self.ggml_op_name(number).decode() for number in range(self.counts.ops)}

    @cached_property
    def functions(self) -> dict[str, dict[int, str]]:
        """Names of the functions that the ops UNARY and GLU stand for, by number."""
        return {
            "UNARY": {n: self.ggml_unary_op_name(n).decode() for n in range(self.counts.unary)},
            "GLU": {n: self.ggml_glu_op_name(n).decode() for n in range(self.counts.glu)},
        }

    @cached_property
    def op_numbers(self) -> dict[str, tuple[int, int | None]]:
        """What `op_name` gives -> the op's number and, for UNARY and GLU, the function's."""
        numbers: dict[str, tuple[int, int | None]] = {name: (number, None) for number, name in self.ops.items()}
        for op, names in self.functions.items():
            number, _ = numbers.pop(op)
            numbers.update({name: (number, function) for function, name in names.items()})
        return numbers

    @cached_property
    def op_names(self) -> frozenset[str]:
        """Every name that `op_name` may give."""
        names = {*self.ops.values(), *(name for names in self.functions.values() for name in names.values())}
        return frozenset(names - self.functions.keys())

    def op_name(self, op: int, first_param: int) -> str:
        """ggml_op_desc: the op's name; for UNARY and GLU the name of their function."""
        name = self.ops[op]
        return self.functions[name][first_param] if name in self.functions else name


class DeviceInfo(NamedTuple):
    """A device that ggml knows, as it describes itself."""

    name: str
    type: str
    backend: str
    description: str


_DEVICE_TYPES = {0: "CPU", 1: "GPU", 2: "IGPU", 3: "ACCEL", 4: "META"}


def list_devices(found: Ggml) -> list[DeviceInfo]:
    """Every device of this process, in the order of registration."""
    handles = [found.ggml_backend_dev_get(index) for index in range(found.ggml_backend_dev_count())]
    return [
        DeviceInfo(
            found.ggml_backend_dev_name(handle).decode(),
            _DEVICE_TYPES[found.ggml_backend_dev_type(handle)],
            found.ggml_backend_reg_name(found.ggml_backend_dev_backend_reg(handle)).decode(),
            found.ggml_backend_dev_description(handle).decode(),
        )
        for handle in handles
    ]


def unchecked() -> Ggml:
    """The ggml of this process, its layouts not looked at: that of the program which has loaded this backend as its
    plugin, or that of llama-cpp-python. Raises UnknownGgmlError where a plugin does not say which it is."""
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
    """The ggml of this process, checked; the first call chooses it. Raises UnknownGgmlError where that is not one that
    is known here."""
    found = unchecked()
    check(found)
    return found


def check_caller(caller: int) -> None:
    """Raises UnknownGgmlError where the ggml of the code at an address is not one that is known here."""
    check(Ggml(_library_at(c_void_p(caller))))


def _llama_cpp() -> ctypes.CDLL:
    try:
        from llama_cpp import llama_cpp
    except Exception as error:
        raise UnknownGgmlError(f"llama-cpp-python cannot be imported: {error}") from None
    # libllama's own handle: it finds the ggml that libllama uses, of which the wheel holds several copies
    library: ctypes.CDLL = llama_cpp._lib
    return library


def _library_at(address: c_void_p) -> ctypes.CDLL:
    """The loaded library that an address lies in, or the program itself."""
    try:
        return ctypes.CDLL(str(_file_at(address)), mode=os.RTLD_NOLOAD)
    except OSError:
        return ctypes.CDLL(None)


def _file_at(address: c_void_p) -> Path:
    """The file that the code at an address was loaded from."""
    place = structs.Place()
    ctypes.CDLL(None).dladdr(address, ctypes.byref(place))
    return Path(os.fsdecode(place.file or b""))


def check(found: Ggml) -> None:
    """Compares the layouts of `structs` with the live CPU backend, a tensor and a graph. Raises UnknownGgmlError."""
    for what, holds in _layout_facts(found):
        if not holds:
            raise UnknownGgmlError(
                f"ggml {found.version}: {what} is not laid out as in the versions known to this backend"
            )


def _layout_facts(found: Ggml) -> Iterator[tuple[str, bool]]:
    cpu = found.ggml_backend_reg_by_name(b"CPU")
    yield "its CPU backend", cpu is not None
    registry = structs.GgmlBackendReg.from_address(cpu)
    yield f"api_version {registry.api_version}", registry.api_version == API_VERSION
    yield "ggml_backend_reg", c_char_p(registry.iface.get_name(cpu)).value == b"CPU"
    yield (
        "ggml_backend_reg_i",
        registry.iface.get_proc_address(cpu, b"ggml_backend_set_n_threads")
        == found.ggml_backend_reg_get_proc_address(cpu, b"ggml_backend_set_n_threads"),
    )

    handle = found.ggml_backend_reg_dev_get(cpu, 0)
    device = structs.GgmlBackendDevice.from_address(handle)
    yield "ggml_backend_device", device.reg == cpu
    yield (
        "ggml_backend_device_i",
        c_char_p(device.iface.get_description(handle)).value == found.ggml_backend_dev_description(handle)
        and device.iface.get_type(handle) == found.ggml_backend_dev_type(handle) == structs.DEVICE_TYPE_CPU
        and device.iface.supports_buft(handle, found.ggml_backend_cpu_buffer_type())
        and device.iface.event_synchronize is None,
    )

    backend = found.ggml_backend_dev_init(handle, None)
    live = structs.GgmlBackend.from_address(backend)
    yield (
        "ggml_backend_i",
        live.device == handle
        and ctypes.cast(live.guid, c_void_p).value == found.ggml_backend_guid(backend)
        and bool(live.iface.graph_compute)
        and bool(live.iface.graph_plan_compute)
        and live.iface.event_record is None,
    )
    found.ggml_backend_free(backend)

    context = found.ggml_init(structs.InitParams(1 << 20, None, True))
    ne = (c_int64 * 4)(32, 3, 2, 1)
    table = found.ggml_new_tensor(context, found.type_numbers["q8_0"], 4, ne)
    found.ggml_set_name(table, b"a name")
    view = found.ggml_view_4d(context, table, 32, 2, 1, 1, 34, 68, 68, 34)
    node = found.ggml_cont(context, view)
    fields = [structs.TENSOR.unpack(ctypes.string_at(t, structs.TENSOR.size)) for t in (table, view, node)]
    yield (
        "ggml_tensor",
        fields[0][2:10] == (32, 3, 2, 1, 34, 34, 102, 204)
        and fields[0][26].rstrip(b"\0") == b"a name"
        and fields[1][23:25] == (table, 34)
        and found.ops[fields[2][10]] == "CONT"
        and fields[2][13] == view,
    )
    graph = found.ggml_new_graph(context)
    found.ggml_build_forward_expand(graph, node)
    laid_out = structs.GgmlCGraph.from_address(graph)
    yield (
        "ggml_cgraph",
        laid_out.n_nodes == found.ggml_graph_n_nodes(graph)
        and ctypes.cast(laid_out.nodes, c_void_p).value == found.ggml_graph_nodes(graph)
        and [laid_out.uses(tensor) for tensor in (view, node, 16)] == [1, 0, -1],
    )
    found.ggml_free(context)
