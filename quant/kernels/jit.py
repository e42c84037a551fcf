"""numba as this project uses it: C functions and their parts, one cache, pointers and half floats.

A kernel works on addresses (integers) and strides (bytes), as ggml's own do. `array_at` turns an address into something
that numba can index and LLVM can vectorise.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from quant.errors import UserError
from quant.kernels import objects
from quant.kernels.late import Late, Signature, cgutils, intrinsic, ir, jitable, real, types

Part = Callable[..., Any]


class EngineError(UserError, ValueError):
    """GGML_NPU_ENGINE is not the name of an engine, or GGML_NPU_THREADS is not a number of threads."""


class CompilerError(UserError):
    """numba cannot be loaded, as it is broken here or refuses a variable."""


def engine() -> str:
    """Which kernels run: "compiled", or "reference" for the NumPy definitions, as GGML_NPU_ENGINE says. Raises
    EngineError for another value."""
    name = os.environ.get("GGML_NPU_ENGINE", "compiled")
    if name not in ("compiled", "reference"):
        raise EngineError(f"GGML_NPU_ENGINE={name!r}: must be one of compiled, reference")
    return name


class CFunction:
    """A C function, compiled when it is first needed, and kept on disk if that is possible. It runs without the GIL,
    in any thread."""

    def __init__(self, function: Callable[..., Any], signature: Signature) -> None:
        self._function, self._signature = function, signature

    @functools.cached_property
    def _loaded(self) -> objects.Loaded:
        kept = objects.Kept(self._function, self._signature.names)
        loaded = kept.loaded()
        if loaded is None:
            loaded = _compiler().compiled(self._function, self._signature, kept, _told)
        return loaded

    @property
    def is_compiled(self) -> bool:
        """Whether it has been needed yet."""
        return "_loaded" in self.__dict__

    @functools.cached_property
    def address(self) -> int:
        """The address of the C function; compiles it if that has not been done."""
        return self._loaded.address

    @functools.cached_property
    def _from_python(self) -> Callable[..., Any]:
        return objects.prototype(self._signature.names)(self.address)

    def __call__(self, *arguments: int) -> Any:
        return self._from_python(*arguments)


_told: list[Callable[[], None]] = []


def while_compiling(tell: Callable[[], None]) -> None:
    """Has `tell` called again and again while kernels are compiled: at the start and the end of each pass of numba."""
    _told.append(tell)


def _compiler() -> Any:
    """The module `compiler`, which imports numba and LLVM. Raises CompilerError if it cannot."""
    try:
        from quant.kernels import compiler
    except Exception as error:
        given = ", ".join(f"{name}={value!r}" for name, value in os.environ.items() if name.startswith("NUMBA_"))
        raise CompilerError(f"numba cannot be loaded: {error} ({given or 'no NUMBA_ variable is set'})") from error
    return compiler


def callback(signature: Signature) -> Callable[[Callable[..., Any]], CFunction]:
    """Decorator: makes a C function of the given signature."""
    return functools.partial(CFunction, signature=signature)


compiled = callback(types.int64(*[types.int64] * 4))
"""Decorator of a kernel, `kernel(p, begin, end, scratch)`: computes units [begin, end). p is the address of the record
of its parameters (`quant.kernels.records`), scratch that of the memory that its `Work` has for it. Returns 0, or if
it cannot do it what its work makes an error of."""


def caller(n: int) -> Callable[..., Any]:
    """The code of a call of the function at an address, of n int64."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        function = builder.inttoptr(arguments[0], ir.FunctionType(i64, [i64] * n).as_pointer())
        return builder.call(function, arguments[1:])

    return emit


@intrinsic
def call_kernel(typing_context: Any, kernel: Any, parameters: Any, begin: Any, end: Any, scratch: Any) -> Any:
    """Calls the kernel at an address; returns what it returns."""
    return types.int64(*[types.int64] * 5), caller(4)


@intrinsic
def call_elementwise(typing_context: Any, function: Any, constants: Any, to: Any, x: Any, y: Any, n: Any) -> Any:
    """Calls the `elementwise` function at an address; returns what it returns."""
    return types.int64(*[types.int64] * 6), caller(5)


@intrinsic
def call_openmp(typing_context: Any, openmp: Any, function: Any, data: Any, n_threads: Any) -> Any:
    """Has n_threads threads, this one among them, call function(data).

    openmp  the address of the addresses of GOMP_parallel and omp_get_thread_num of one runtime
    """

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64, i32 = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [i64, i64, i32, i32])
        count = builder.trunc(arguments[3], i32)
        parallel = builder.load(builder.inttoptr(arguments[0], kind.as_pointer().as_pointer()))
        builder.call(parallel, [*arguments[1:3], count, ir.Constant(i32, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def thread_number(typing_context: Any, openmp: Any) -> Any:
    """Which thread of those of `call_openmp` this is: 0 or more."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64, kind = ir.IntType(64), ir.FunctionType(ir.IntType(32), [])
        second = builder.add(arguments[0], ir.Constant(i64, 8))
        function = builder.load(builder.inttoptr(second, kind.as_pointer().as_pointer()))
        return builder.zext(builder.call(function, []), i64)

    return types.int64(types.int64), emit


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Adds to the int64 at an address; returns the value before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), emit


@intrinsic
def exchanged(typing_context: Any, address: Any, before: Any, after: Any) -> Any:
    """Writes `after` to the int64 at an address if that is `before`; returns what it was."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, *arguments[1:], "seq_cst", "seq_cst"), 0)

    return types.int64(types.int64, types.int64, types.int64), emit


@intrinsic
def acquired(typing_context: Any, address: Any) -> Any:
    """The int64 at an address, and with it whatever was written before it was `published`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(types.int64), emit


@intrinsic
def publish(typing_context: Any, address: Any, value: Any) -> Any:
    """Writes the int64 at an address, after all that this thread wrote before, for threads that have it `acquired`."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tells the processor that this thread waits for another one."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        void, i32 = ir.VoidType(), ir.IntType(32)
        if platform.machine() in ("x86_64", "AMD64"):
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", (), ir.FunctionType(void, [])), [])
        elif platform.machine() in ("aarch64", "arm64"):
            hint = builder.module.declare_intrinsic("llvm.aarch64.hint", (), ir.FunctionType(void, [i32]))
            builder.call(hint, [ir.Constant(i32, 1)])  # yield
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def give_way(typing_context: Any) -> Any:
    """sched_yield: lets another thread have this processor."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Has the processor fetch the cache line at an address into its second cache."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fetch_line(builder, arguments[0], near=False)
        return context.get_dummy_value()

    return types.void(types.int64), emit


def fetch_line(builder: Any, address: Any, *, near: bool) -> None:
    """Emits a prefetch of the cache line at an address, into the first cache or the second one."""
    i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    read, locality, data = (ir.Constant(i32, value) for value in (0, 3 if near else 2, 1))
    builder.call(function, [builder.inttoptr(address, pointer), read, locality, data])


_CLOCK = getattr(time, "CLOCK_MONOTONIC", 0)


def now() -> int:
    """The time in ns, as compiled code has it from `nanoseconds`."""
    return time.clock_gettime_ns(_CLOCK)


@intrinsic
def nanoseconds(typing_context: Any) -> Any:
    """The time in ns, by clock_gettime with CLOCK_MONOTONIC."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64, i32 = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(i32, [i32, i64.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        at = cgutils.alloca_once(builder, i64, size=2)  # a timespec
        builder.call(function, [ir.Constant(i32, _CLOCK), at])
        seconds, rest = builder.load(at), builder.load(builder.gep(at, [ir.Constant(i64, 1)]))
        return builder.add(builder.mul(seconds, ir.Constant(i64, 1_000_000_000)), rest)

    return types.int64(), emit


@intrinsic
def on_stack(typing_context: Any, count: Any) -> Any:
    """The address of `count` int64 on the stack, a constant number, until the function returns that has the call."""
    if not hasattr(count, "literal_value"):
        return None

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        return builder.ptrtoint(cgutils.alloca_once(builder, i64, size=count.literal_value), i64)

    return types.int64(count), emit


@intrinsic
def allocated(typing_context: Any, n_bytes: Any) -> Any:
    """The address of n_bytes of memory, by C's malloc: a kernel needs no runtime of numba's. `release` it."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        i64 = ir.IntType(64)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(i64, [i64]), "malloc")
        return builder.call(function, arguments)

    return types.int64(types.int64), emit


@intrinsic
def release(typing_context: Any, address: Any) -> Any:
    """Frees what `allocated` gave."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "free"), arguments)
        return context.get_dummy_value()

    return types.void(types.int64), emit


def inlined(function: Part) -> Part:
    """Decorator of a part of kernels: compiled into each `compiled` function that calls it, or gets it as an argument.

    It is an overload, not a dispatcher: a kernel that passes dispatchers around cannot be kept on disk.
    """
    return jitable(error_model="numpy")(function)


def reduced(function: Part) -> Part:
    """As `inlined`, for a sum or maximum over a row: LLVM may reorder the terms to suit vectors, and fuse products with
    their addition."""
    return jitable(error_model="numpy", fastmath={"reassoc", "nsz", "contract"})(function)


@intrinsic
def _pointer(typing_context: Any, address: Any, dtype: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return real(types.CPointer)(dtype.dtype)(address, dtype), emit


carray: Any = Late(lambda: import_module("numba").carray)


@inlined
def array_at(address: int, dtype: Any, count: int) -> Any:
    """An array of `count` elements of `dtype` at `address`, without a copy."""
    return carray(_pointer(address, dtype), count)


def _bit_cast(source: Any, target: Any, bits: Callable[[], Any]) -> Any:
    @intrinsic
    def cast(typing_context: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], bits())

        return target(source), emit

    return cast


float_bits = _bit_cast(types.float32, types.uint32, lambda: ir.IntType(32))
bits_float = _bit_cast(types.uint32, types.float32, lambda: ir.FloatType())


@intrinsic
def f16_to_f32(typing_context: Any, half: Any) -> Any:
    """Bits of a half float -> float32: exact; a signalling NaN becomes quiet."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), emit


@intrinsic
def f32_to_f16_payload(typing_context: Any, value: Any) -> Any:
    """float32 -> bits of a half float: nearest, ties to even, overflow to inf, subnormals kept. A NaN keeps as much of
    its payload as fits, as in the processor's vector conversion."""

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


@intrinsic
def copy(typing_context: Any, source: Any, target: Any, n_bytes: Any) -> Any:
    """C's memmove of n_bytes from one address to another; the addresses may overlap."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        kinds = [pointer, pointer, ir.IntType(64)]
        move = builder.module.declare_intrinsic("llvm.memmove", kinds)
        source, target = (builder.inttoptr(address, pointer) for address in arguments[:2])
        builder.call(move, [target, source, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


LINE = 64  # bytes of a cache line
_STREAMED = 32  # bytes of a vector that is stored past the caches


@intrinsic
def _stream_vector(typing_context: Any, source: Any, target: Any) -> Any:
    """Copies one vector past the caches. The target is a multiple of its size, _STREAMED."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.VectorType(ir.FloatType(), _STREAMED // 4).as_pointer()
        vector = builder.load(builder.inttoptr(arguments[0], pointer), align=1)
        store = builder.store(vector, builder.inttoptr(arguments[1], pointer), align=_STREAMED)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def stream_ends(typing_context: Any) -> Any:
    """A fence: other threads see whatever was streamed before."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@inlined
def stream(source: int, target: int, n_bytes: int) -> None:
    """As `copy`, past the caches: for results too large to stay in them. Call `stream_ends` after the last one."""
    head = min(-target % LINE, n_bytes)
    body = (n_bytes - head) // LINE * LINE
    if head:
        copy(source, target, head)
    for i in range(head, head + body, LINE):
        for j in range(i, i + LINE, _STREAMED):
            _stream_vector(types.int64(source + j), types.int64(target + j))
    if head + body < n_bytes:
        copy(source + head + body, target + head + body, n_bytes - head - body)


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
