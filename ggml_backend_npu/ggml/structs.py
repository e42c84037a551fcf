"""C structs of ggml that are the same in every known version: the tensor, the graph, and public ones.

Structs that differ are in `ggml.layouts`. A tensor and a graph of the live ggml are checked before anything here is
used (`ggml.probes`).
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
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

# struct ggml_tensor, as Python's struct module reads it
#   type, buffer, ne[4], nb[4], op, op_params[64 bytes], flags, src[10], view_src, view_offs, data, name[64], extra
TENSOR = struct.Struct("=i4xQ4q4Qi64si10QQQQ64sQ8x")
TENSOR_KEY_BYTES = 256  # everything before the name: what a plan depends on
BUFFER_AT, OP_AT, FLAGS_AT, SRC_AT, VIEW_SRC_AT, DATA_AT, EXTRA_AT = 8, 80, 148, 152, 232, 248, 320
N_SRC, NAME_BYTES = 10, 64
OPERATION = struct.Struct("=i64si10Q")  # its fields from OP_AT on: op, op_params, flags, src
FLAG_INPUT, FLAG_OUTPUT, FLAG_COMPUTE = 1, 2, 16

STATUS_FAILED, STATUS_SUCCESS = -1, 0
USAGE_WEIGHTS = 1  # of a buffer that a model's weights lie in
USAGE_COMPUTE = 2  # of a buffer for tensors of graphs, which share its addresses in turns
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


class Feature(Structure):
    """struct ggml_backend_feature"""

    _fields_ = [("name", c_char_p), ("value", c_char_p)]


def fill(table: type[Structure], **callbacks: Callable[..., Any] | int) -> Structure:
    """A table with the given slots set, each to a callback or to the address of a C function; the others are NULL."""
    prototypes: dict[str, Any] = {name: kind for name, kind, *_ in table._fields_}
    return table(**{name: prototypes[name](callback) for name, callback in callbacks.items()})


class GgmlBackendEvent(Structure):
    """struct ggml_backend_event"""

    _fields_ = [("device", c_void_p), ("context", c_void_p)]


class Place(Structure):
    """Dl_info of dladdr"""

    _fields_ = [("file", c_char_p), ("base", c_void_p), ("symbol", c_char_p), ("symbol_at", c_void_p)]


SetThreads = CFUNCTYPE(None, c_void_p, c_int32)  # ggml_backend_set_n_threads_t
GetFeatures = CFUNCTYPE(POINTER(Feature), c_void_p)  # ggml_backend_get_features_t
GraphCompute = CFUNCTYPE(c_int, c_void_p, c_void_p)  # of ggml_backend_i
EvalCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)  # ggml_backend_sched_eval_callback
