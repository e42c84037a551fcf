"""Conversion of runs from one type to another, at any strides: a C function for each pair of types.

A unit is one element, or one block if either type has blocks. The elements of a unit are adjacent; from one unit to
the next there may be any number of bytes. The functions are compiled when a pair is first needed. They equal, byte for
byte, the NumPy definitions in `quant.scalars` and `quant.blocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from quant.kernels.jit import (
    CFunction,
    array_at,
    callback,
    compiled,
    f16_to_f32,
    f32_to_f16_payload,
    inlined,
    stream_ends,
    truncate_to_int32,
)
from quant.kernels.late import intrinsic, ir, types
from quant.kernels.records import record_at
from quant.kernels.vectors import FLOAT, HALF, INT8, INT16, INT32, Address, Value, part
from quant.runs import bf16_to_f32, f32_to_bf16, f32_to_f16, flush, same, space_for

Part = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Elements:
    """A type whose block is one element.

    type    numba's type of its bits, which are nbytes bytes
    widen   bits -> float32
    narrow  float32 -> bits
    floats  `n` elements at an address as float32, for encoders; None: it converts to float32 alone
    """

    name: str
    type: Any
    nbytes: int
    widen: Part
    narrow: Part
    floats: Callable[[Address, int], Value] | None = None


def _as_it_is(quants: Value) -> Value:
    return quants


@dataclass(frozen=True, eq=False)
class Blocks:
    """A type whose blocks are a float16 scale, and then `payload` bytes of quants.

    size    elements of a block
    decode  (scale, quants) -> float32
    encode  for each rounding, or "" for all: float32 -> (scale, quants)
    pack    quants of a block -> quants in the device layout (`quant.layout`)
    unpack  the way back
    """

    name: str
    size: int
    payload: int
    decode: Callable[[Value, Value], Value]
    encode: Mapping[str, Callable[[Value], tuple[Value, Value]]]
    pack: Callable[[Value], Value] = _as_it_is
    unpack: Callable[[Value], Value] = _as_it_is


F32 = Elements("f32", types.float32, 4, same, same, lambda at, n: at.load(FLOAT, n))
F16 = Elements("f16", types.uint16, 2, f16_to_f32, f32_to_f16, lambda at, n: at.load(HALF, n).widened())
BF16 = Elements(
    "bf16", types.uint16, 2, bf16_to_f32, f32_to_bf16, lambda at, n: (at.load(INT16, n).to(INT32) << 16).as_float()
)


@inlined
def _i32_to_f32(x):
    return types.float32(x)


I32 = Elements("i32", types.int32, 4, _i32_to_f32, truncate_to_int32)

# the whole fours of a row of f16, which ggml_cpu_fp32_to_fp16 converts by the vectors of x86: they keep a NaN's payload
F16_FOURS = Elements("f16_fours", types.uint16, 2, f16_to_f32, f32_to_f16_payload)


@inlined
def _at(address, packed, n_packed, payload):
    """The addresses of the scale and of the quants of the block that ggml has at `address`.

    In a tensor of n_packed blocks, packed in the device layout at `packed`, the two lie apart; n_packed is 0 for any
    other tensor.
    """
    if n_packed == 0:
        return address, address + 2
    index = (address - packed) // (payload + 2)
    return packed + n_packed * payload + 2 * index, packed + index * payload


@cache
def block_decoder(kind: Blocks, packed: bool = False) -> Part:
    """A part of kernels that decodes a block: part(scale, quants, target), which are addresses."""

    def decode(scale: Address, quants: Address, target: Address) -> None:
        found = quants.load(INT8, kind.payload)
        target.store(kind.decode(scale.load(HALF).widened(), kind.unpack(found) if packed else found))

    made: Part = part(decode)
    return made


@cache
def block_encoder(kind: Blocks, rounding: str, source: Elements = F32, packed: bool = False) -> Part:
    """A part of kernels that encodes a block: part(source, scale, quants), which are addresses."""
    floats, function = source.floats, kind.encode.get(rounding) or kind.encode[""]
    assert floats is not None

    def encode(at: Address, scale: Address, quants: Address) -> None:
        d, found = function(floats(at, kind.size))
        scale.store(d.narrowed())
        quants.store(kind.pack(found) if packed else found)

    made: Part = part(encode)
    return made


@cache
def decoding(kind: Blocks) -> Part:
    """A part of kernels that decodes blocks: part(src, src_step, packed, n_packed, dst, dst_step, count). For one block
    there is `block_decoder`: of such a loop over a constant 1, LLVM 20 has lost a store."""
    payload, decode, decode_packed = kind.payload, block_decoder(kind), block_decoder(kind, packed=True)

    @inlined
    def run(src, src_step, packed, n_packed, dst, dst_step, count):
        if n_packed:
            for block in range(count):
                scale, quants = _at(src + block * src_step, packed, n_packed, payload)
                decode_packed(scale, quants, dst + block * dst_step)
        else:
            for block in range(count):
                scale = src + block * src_step
                decode(scale, scale + 2, dst + block * dst_step)

    return run


Run = Elements | Blocks

_conversion = callback(types.int64(*[types.int64] * 9))


@cache
def conversion(src: Run | None, dst: Run | None, rounding: str) -> CFunction | None:
    """The C function (src, src_step, src_packed, src_n, dst, dst_step, dst_packed, dst_n, count) that converts `count`
    units; steps in bytes. There is one from any type to f32, from a type of floats to any, and from a type of blocks to
    itself; None elsewhere.

    If a side lies in a tensor packed in the device layout, `packed` and `n` are that tensor's address and its number
    of blocks; otherwise n is 0.
    """
    made = None
    if isinstance(src, Blocks):
        if dst is F32:
            made = _from_blocks(src)
        elif dst is src:
            made = _of_blocks(src)
    elif src is not None and dst is not None and (src.floats is not None or dst is F32):
        made = _of_elements(src, dst) if isinstance(dst, Elements) else _to_blocks(src, dst, rounding)
    if made is None or src is None or dst is None:
        return None
    made.__qualname__ = f"{src.name}_to_{dst.name}_{rounding}"  # under this name it is kept on disk
    return _conversion(made)


def _from_blocks(src: Blocks) -> Part:
    decode = decoding(src)

    def run(x, x_step, packed, n_packed, y, y_step, y_packed, y_n, count):
        decode(x, x_step, packed, n_packed, y, y_step, count)
        return 0

    return run


def _to_blocks(src: Elements, dst: Blocks, rounding: str) -> Part:
    payload = dst.payload
    encode, encode_packed = (block_encoder(dst, rounding, src, packed) for packed in (False, True))

    def run(x, x_step, x_packed, x_n, y, y_step, packed, n_packed, count):
        if n_packed:
            for block in range(count):
                scale, quants = _at(y + block * y_step, packed, n_packed, payload)
                encode_packed(x + block * x_step, scale, quants)
        else:
            for block in range(count):
                scale = y + block * y_step
                encode(x + block * x_step, scale, scale + 2)
        return 0

    return run


def _of_blocks(kind: Blocks) -> Part:
    payload = kind.payload

    def mover(change: Callable[[Value], Value]) -> Part:
        def move(d: Address, q: Address, target_d: Address, target_q: Address) -> None:
            target_d.store(d.load(INT16))
            target_q.store(change(q.load(INT8, payload)))

        made: Part = part(move)
        return made

    copy_block, pack, unpack = mover(_as_it_is), mover(kind.pack), mover(kind.unpack)

    def run(x, x_step, x_packed, x_n, y, y_step, y_packed, y_n, count):
        for block in range(count):
            d, q = _at(x + block * x_step, x_packed, x_n, payload)
            target_d, target_q = _at(y + block * y_step, y_packed, y_n, payload)
            if (x_n == 0) == (y_n == 0):
                copy_block(d, q, target_d, target_q)
            elif x_n == 0:
                pack(d, q, target_d, target_q)
            else:
                unpack(d, q, target_d, target_q)
        return 0

    return run


def _of_elements(src: Elements, dst: Elements) -> Part:
    widen, narrow, source, target = src.widen, dst.narrow, src.type, dst.type
    source_bytes, target_bytes = src.nbytes, dst.nbytes

    def run(x, x_step, x_packed, x_n, y, y_step, y_packed, y_n, count):
        if x_step == source_bytes and y_step == target_bytes:
            values, to = array_at(x, source, count), array_at(y, target, count)
            for i in range(count):
                to[i] = narrow(widen(values[i]))
        else:
            for i in range(count):
                value = widen(array_at(x + i * x_step, source, 1)[0])
                array_at(y + i * y_step, target, 1)[0] = narrow(value)
        return 0

    return run


@intrinsic
def convert_run(typing_context, function, x, x_step, x_packed, x_n, y, y_step, y_packed, y_n, count):
    """Calls the conversion at an address."""

    def emit(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        kind = ir.FunctionType(i64, [i64] * 9)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*[types.int64] * 10), emit


class Convert(NamedTuple):
    """Parameters of `convert`: the address of a conversion; steps in bytes; streams: dst is stored past the caches."""

    function: int
    src: int
    src_step: int
    dst: int
    dst_step: int
    streams: int


@compiled
def convert(p, begin, end, stage):
    """Units [begin, end) (blocks or elements) of two arrays without gaps. With `streams`, dst is built in a stage of
    STAGE_SIZE bytes and stored past the caches."""
    of = record_at(p, Convert)
    function, src_step, dst_step = of.function, of.src_step, of.dst_step
    if not of.streams:
        convert_run(
            function, of.src + begin * src_step, src_step, 0, 0, of.dst + begin * dst_step, dst_step, 0, 0, end - begin
        )
        return 0
    filled, target = 0, of.dst + begin * dst_step
    while begin < end:
        count = min(space_for(dst_step, filled), end - begin)
        convert_run(function, of.src + begin * src_step, src_step, 0, 0, stage + filled, dst_step, 0, 0, count)
        begin += count
        filled, target = flush(stage, filled + count * dst_step, target, begin == end)
    stream_ends()
    return 0
