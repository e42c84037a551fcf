"""numba as this project uses it: two decorators, one cache, pointers and half floats.

A kernel works on addresses (integers) and strides (bytes), as ggml's own do; `array_at` turns an address
into something that numba can index and LLVM can vectorise.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import platformdirs
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic, register_jitable

Kernel = Callable[..., Any]


@functools.cache
def cache_directory() -> Path:
    """Where compiled kernels are kept: one folder per content of the modules that hold kernels.

    numba notices a change in the file of the cached function only, not in those it calls; a folder named by
    all their sources cannot go stale. `NUMBA_CACHE_DIR`, where set, takes the place of the user's cache directory.
    """
    root = os.environ.get("NUMBA_CACHE_DIR") or platformdirs.user_cache_dir("ggml-npu")
    here = Path(__file__).resolve().parent
    sources = sorted([*here.rglob("*.py"), *(here.parent / "ggml_backend_npu").rglob("*.py")])
    digest = hashlib.sha256()
    for text in (source.read_bytes() for source in sources):
        if b"quant.jit" in text or b"@intrinsic" in text:
            digest.update(text)
    return Path(root) / f"kernels-{digest.hexdigest()[:16]}"


class EngineError(ValueError):
    """GGML_NPU_ENGINE names no engine."""


def engine() -> str:
    """Which kernels run: compiled, or the NumPy definitions where `GGML_NPU_ENGINE=reference` asks for them."""
    name = os.environ.get("GGML_NPU_ENGINE", "compiled")
    if name not in ("compiled", "reference"):
        raise EngineError(f"GGML_NPU_ENGINE={name!r}: must be one of compiled, reference")
    return name


@contextmanager
def _own_cache() -> Iterator[None]:
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_directory())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def compiled(function: Kernel) -> Kernel:
    """A kernel that Python calls: compiled at its first call, kept on disk, runs without the GIL."""
    with _own_cache():
        kernel: Kernel = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    _ours.add(function.__qualname__)
    return kernel


def inlined(function: Kernel) -> Kernel:
    """A part of kernels: compiled into each `compiled` function that calls it, or is given it as an argument.

    An overload, not a dispatcher: a kernel that passes dispatchers around cannot be kept on disk.
    """
    part: Kernel = register_jitable(error_model="numpy")(function)
    return part


def reduced(function: Kernel) -> Kernel:
    """As `inlined`, for a sum or maximum over a row: LLVM may take its terms in the order that vectors like."""
    part: Kernel = register_jitable(error_model="numpy", fastmath={"reassoc", "nsz"})(function)
    return part


class _Announcement(event.Listener):
    """Says once per process, on stderr, that kernels are being compiled."""

    said = False

    def on_start(self, compilation: Any) -> None:
        dispatcher = compilation.data["dispatcher"]
        if not self.said and dispatcher.py_func.__qualname__ in _ours:
            self.said = True
            print(f"ggml-npu: compiling kernels, once; kept in {cache_directory()}", file=sys.stderr)

    def on_end(self, compilation: Any) -> None:
        pass


_ours: set[str] = set()
event.register("numba:compile", _Announcement())


@intrinsic
def _pointer(typing_context: Any, address: Any, dtype: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(address, dtype), emit


@inlined
def array_at(address: int, dtype: Any, count: int) -> Any:
    """`count` elements of `dtype` that begin at `address`, without a copy."""
    return numba.carray(_pointer(address, dtype), count)


def _bit_cast(source: Any, target: Any, target_ir: ir.Type) -> Any:
    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], target_ir)

        return target(source), emit

    return cast


float_bits = _bit_cast(types.float32, types.uint32, ir.IntType(32))
bits_float = _bit_cast(types.uint32, types.float32, ir.FloatType())


@intrinsic
def f16_to_f32(typing_context: Any, half: Any) -> Any:
    """Bits of a half float -> float32: exact; a signalling NaN becomes quiet."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def f32_to_f16_payload(typing_context: Any, value: Any) -> Any:
    """float32 -> bits of a half float: nearest, ties to even, overflow to inf, subnormals kept; a NaN keeps what
    fits of its payload, as in the processor's vector conversion."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), emit


def _rounding(llvm_name: str) -> Any:
    @intrinsic
    def round_float(typing_context: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function = builder.module.declare_intrinsic(llvm_name, [ir.FloatType()])
            return builder.call(function, arguments)

        return types.float32(types.float32), emit

    return round_float


round_half_even = _rounding("llvm.rint")
round_half_away = _rounding("llvm.round")


_LANES = 8  # float32 of a vector that is stored past the caches
STREAM_ALIGNMENT = 4 * _LANES


@intrinsic
def _stream_vector(typing_context: Any, source: Any, target: Any) -> Any:
    """Moves 8 float32 from an address to one that is a multiple of 32, past the caches."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.VectorType(ir.FloatType(), _LANES).as_pointer()
        vector = builder.load(builder.inttoptr(arguments[0], pointer), align=4)
        store = builder.store(vector, builder.inttoptr(arguments[1], pointer), align=STREAM_ALIGNMENT)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def stream_ends(typing_context: Any) -> Any:
    """What was streamed before is seen by other threads."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@inlined
def stream(source: int, target: int, count: int) -> None:
    """Moves `count` float32, a multiple of 8, past the caches: for results so large that they do not stay there.

    Both addresses as for `array_at`; the target's is a multiple of STREAM_ALIGNMENT.
    """
    for i in range(0, 4 * count, STREAM_ALIGNMENT):
        _stream_vector(types.int64(source + i), types.int64(target + i))


@intrinsic
def fused_multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), emit


@intrinsic
def truncate_to_int32(typing_context: Any, value: Any) -> Any:
    """C's (int32_t) x; out of range and NaN give what the processor's conversion gives."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fptosi(arguments[0], ir.IntType(32))

    return types.int32(types.float32), emit


def callback(signature: Any) -> Callable[[Kernel], Any]:
    """Decorator: a C function of the given numba signature; `.address` is its pointer."""

    def make(function: Kernel) -> Any:
        with _own_cache():
            return numba.cfunc(signature, cache=True, nopython=True)(function)

    return make
