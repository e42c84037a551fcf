"""C layouts of ggml: the tensor, the graph, and the tables of functions of ggml-backend-impl.h.

The tables are private to ggml and change without a new GGML_BACKEND_API_VERSION; `abi.lib` checks them against the
live CPU backend before anything here is used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

# struct ggml_tensor, as Python's struct module reads it
#   type, buffer, ne[4], nb[4], op, op_params[64 bytes], flags, src[10], view_src, view_offs, data, name[64], extra
TENSOR = struct.Struct("=i4xQ4q4Qi64si10QQQQ64sQ8x")
TENSOR_KEY_BYTES = 256  # everything in front of the name: what a plan depends on
BUFFER_AT, OP_AT, FLAGS_AT, SRC_AT, VIEW_SRC_AT, DATA_AT = 8, 80, 148, 152, 232, 248
N_SRC, NAME_BYTES = 10, 64
OPERATION = struct.Struct("=i64si10Q")  # of it, what stands from OP_AT: op, op_params, flags, src
FLAG_INPUT, FLAG_OUTPUT, FLAG_COMPUTE = 1, 2, 16

STATUS_FAILED, STATUS_SUCCESS = -1, 0
USAGE_COMPUTE = 2  # of a buffer: tensors of graphs, which share its addresses in turns
DEVICE_TYPE_CPU, DEVICE_TYPE_GPU, DEVICE_TYPE_IGPU, DEVICE_TYPE_ACCEL = 0, 1, 2, 3


class HashSet(Structure):
    """struct ggml_hash_set"""

    _fields_ = [("size", c_size_t), ("used", POINTER(c_uint32)), ("keys", POINTER(c_void_p))]

    def find(self, address: int) -> int | None:
        """ggml_hash_find: the slot of a tensor; None where it is not in the set."""
        if not self.size:
            return None
        first = slot = (address >> 4) % self.size
        while self.used[slot // 32] >> slot % 32 & 1:
            if self.keys[slot] == address:
                return int(slot)
            slot = (slot + 1) % self.size
            if slot == first:
                break
        return None


class GgmlCGraph(Structure):
    """struct ggml_cgraph"""

    _fields_ = [
        ("size", c_int),
        ("n_nodes", c_int),
        ("n_leafs", c_int),
        ("nodes", POINTER(c_void_p)),
        ("grads", c_void_p),
        ("grad_accs", c_void_p),
        ("leafs", c_void_p),
        ("use_counts", POINTER(c_int32)),
        ("visited", HashSet),
        ("order", c_int),
        ("uid", c_uint64),
    ]

    def uses(self, tensor: int) -> int:
        """How often a tensor is a source in the whole graph that this one is a part of; -1 where that is not known."""
        slot = self.visited.find(tensor) if self.use_counts else None
        return -1 if slot is None else int(self.use_counts[slot])


class InitParams(Structure):
    """struct ggml_init_params"""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class TypeTraits(Structure):
    """struct ggml_type_traits"""

    _fields_ = [
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    ]


class TypeTraitsCpu(Structure):
    """struct ggml_type_traits_cpu, its first fields"""

    _fields_ = [("from_float", c_void_p), ("vec_dot", c_void_p), ("vec_dot_type", c_int)]


RowFunction = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)  # ggml_to_float_t and ggml_from_float_t


class Caps(Structure):
    """struct ggml_backend_dev_caps"""

    _fields_ = [
        ("async_", c_bool),
        ("host_buffer", c_bool),
        ("buffer_from_host_ptr", c_bool),
        ("events", c_bool),
        ("mmap_support", c_bool),
    ]


class Feature(Structure):
    """struct ggml_backend_feature"""

    _fields_ = [("name", c_char_p), ("value", c_char_p)]


class DeviceProps(Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = [
        ("name", c_char_p),
        ("description", c_char_p),
        ("memory_free", c_size_t),
        ("memory_total", c_size_t),
        ("type", c_int),
        ("device_id", c_char_p),
        ("caps", Caps),
    ]


def _table(name: str, **slots: Any) -> type[Structure]:
    """A table of functions: each slot a ctypes prototype, or None for a slot this backend leaves NULL."""
    fields = [(slot, c_void_p if prototype is None else prototype) for slot, prototype in slots.items()]
    return type(name, (Structure,), {"_fields_": fields})


def fill(table: type[Structure], **callbacks: Callable[..., Any] | int) -> Structure:
    """A table with the given slots set, each by its prototype to a callback or the address of a C function; the others
    NULL."""
    prototypes: dict[str, Any] = {name: kind for name, kind, *_ in table._fields_}
    return table(**{name: prototypes[name](callback) for name, callback in callbacks.items()})


_name = CFUNCTYPE(c_void_p, c_void_p)
GraphCompute = CFUNCTYPE(c_int, c_void_p, c_void_p)

BackendTable = _table(
    "ggml_backend_i",
    get_name=_name,
    free=CFUNCTYPE(None, c_void_p),
    set_tensor_async=None,
    get_tensor_async=None,
    set_tensor_2d_async=None,
    get_tensor_2d_async=None,
    cpy_tensor_async=None,
    synchronize=None,
    graph_plan_create=None,
    graph_plan_free=None,
    graph_plan_update=None,
    graph_plan_compute=None,
    graph_compute=GraphCompute,
    event_record=None,
    event_wait=None,
    graph_optimize=None,
)

DeviceTable = _table(
    "ggml_backend_device_i",
    get_name=_name,
    get_description=_name,
    get_memory=CFUNCTYPE(None, c_void_p, POINTER(c_size_t), POINTER(c_size_t)),
    get_type=CFUNCTYPE(c_int, c_void_p),
    get_props=CFUNCTYPE(None, c_void_p, POINTER(DeviceProps)),
    init_backend=CFUNCTYPE(c_void_p, c_void_p, c_char_p),
    get_buffer_type=CFUNCTYPE(c_void_p, c_void_p),
    get_host_buffer_type=None,
    buffer_from_host_ptr=CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t, c_size_t),
    supports_op=CFUNCTYPE(c_bool, c_void_p, c_void_p),
    supports_buft=CFUNCTYPE(c_bool, c_void_p, c_void_p),
    offload_op=None,
    event_new=None,
    event_free=None,
    event_synchronize=None,
)

RegistryTable = _table(
    "ggml_backend_reg_i",
    get_name=_name,
    get_device_count=CFUNCTYPE(c_size_t, c_void_p),
    get_device=CFUNCTYPE(c_void_p, c_void_p, c_size_t),
    get_proc_address=CFUNCTYPE(c_void_p, c_void_p, c_char_p),
)


BufferTypeTable = _table(
    "ggml_backend_buffer_type_i",
    get_name=_name,
    alloc_buffer=CFUNCTYPE(c_void_p, c_void_p, c_size_t),
    get_alignment=CFUNCTYPE(c_size_t, c_void_p),
    get_max_size=None,
    get_alloc_size=None,
    is_host=None,
)

BufferTable = _table(
    "ggml_backend_buffer_i",
    free_buffer=CFUNCTYPE(None, c_void_p),
    get_base=CFUNCTYPE(c_void_p, c_void_p),
    init_tensor=CFUNCTYPE(c_int, c_void_p, c_void_p),
    memset_tensor=CFUNCTYPE(None, c_void_p, c_void_p, c_uint8, c_size_t, c_size_t),
    set_tensor=CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t),
    get_tensor=CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_size_t, c_size_t),
    set_tensor_2d=None,
    get_tensor_2d=None,
    cpy_tensor=CFUNCTYPE(c_bool, c_void_p, c_void_p, c_void_p),
    clear=CFUNCTYPE(None, c_void_p, c_uint8),
    reset=None,
)


class GgmlBackendBufferType(Structure):
    """struct ggml_backend_buffer_type"""

    _fields_ = [("iface", BufferTypeTable), ("device", c_void_p), ("context", c_void_p)]


class GgmlBackend(Structure):
    """struct ggml_backend"""

    _fields_ = [("guid", POINTER(c_uint8)), ("iface", BackendTable), ("device", c_void_p), ("context", c_void_p)]


class GgmlBackendDevice(Structure):
    """struct ggml_backend_device"""

    _fields_ = [("iface", DeviceTable), ("reg", c_void_p), ("context", c_void_p)]


class GgmlBackendReg(Structure):
    """struct ggml_backend_reg"""

    _fields_ = [("api_version", c_int), ("iface", RegistryTable), ("context", c_void_p)]


class Place(Structure):
    """Dl_info of dladdr"""

    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("symbol_at", c_void_p)]


SetThreads = CFUNCTYPE(None, c_void_p, c_int32)  # ggml_backend_set_n_threads_t
GetFeatures = CFUNCTYPE(POINTER(Feature), c_void_p)  # ggml_backend_get_features_t
EvalCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)  # ggml_backend_sched_eval_callback
