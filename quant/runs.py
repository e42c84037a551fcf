"""Compiled conversion of a run of units from one type to another, at any strides: `convert`.

A unit is one element, or one block where either type has blocks. The elements of a unit are adjacent; from one unit to
the next there may be any number of bytes. The functions here take addresses and are compiled into kernels. They equal,
byte for byte, the NumPy definitions in `quant.scalars` and `quant.blocks`.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quant.kernels.jit import (
    LINE,
    array_at,
    bits_float,
    compiled,
    copy,
    f16_to_f32,
    f32_to_f16_payload,
    float_bits,
    inlined,
    stream,
    stream_ends,
    truncate_to_int32,
)
from quant.kernels.records import record_at
from quant.kernels.vectors import FLOAT, HALF, INT8, INT16, INT32, part

# the types that `convert` knows, by number. As a destination q8_0 has one number per rounding, and f16 has two: F16 for
# single elements, and F16_FOURS for the whole fours of a row, which ggml_cpu_fp32_to_fp16 converts by the processor's
# vectors: they keep a NaN's payload
F32, F16, F16_FOURS, BF16, I32, Q8_0_REFERENCE, Q8_0_SIMD, Q4_0 = range(8)
CODES = {
    "f32": F32,
    "f16": F16,
    "f16 fours": F16_FOURS,
    "bf16": BF16,
    "i32": I32,
    "q4_0": Q4_0,
    "q8_0": Q8_0_REFERENCE,
    "q8_0 reference": Q8_0_REFERENCE,
    "q8_0 simd": Q8_0_SIMD,
}

_BLOCK = 32
STAGE = 2048  # bytes that are collected in the L1 cache before they are stored past the other caches
STAGE_SIZE = STAGE + LINE  # bytes of the memory that they are collected in
CACHED = 8 << 20  # bytes of a result that may well stay in the caches


@inlined
def f32_to_f16(x):
    """GGML_FP32_TO_FP16: as f32_to_f16_payload, but every NaN becomes 7e00 or fe00."""
    half = f32_to_f16_payload(x)
    if x != x:
        return types.uint16((half & types.uint16(0x8000)) | types.uint16(0x7E00))
    return half


@inlined
def _same(x):
    return x


@inlined
def _bf16_to_f32(bits):
    return bits_float(types.uint32(bits) << types.uint32(16))


@inlined
def _f32_to_bf16(x):
    bits = float_bits(x)
    if (bits & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000):
        return types.uint16((bits >> types.uint32(16)) | types.uint32(64))
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


@inlined
def _i32_to_f32(x):
    return types.float32(x)


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


@inlined
def copy_blocks(payload, src, src_step, src_packed, src_n, dst, dst_step, dst_packed, dst_n, count):
    """Copies `count` blocks of q8_0 (payload 32) or q4_0 (payload 16); either side may be packed, see `convert_run`."""
    for block in range(count):
        d, q = _at(src + block * src_step, src_packed, src_n, payload)
        target_d, target_q = _at(dst + block * dst_step, dst_packed, dst_n, payload)
        array_at(target_d, types.uint16, 1)[0] = array_at(d, types.uint16, 1)[0]
        x = array_at(q, types.uint8, payload)
        y = array_at(target_q, types.uint8, payload)
        if payload == 32 or (src_n == 0) == (dst_n == 0):
            for j in range(payload):
                y[j] = x[j]
        elif src_n == 0:
            for j in range(8):
                y[j] = ((x[2 * j] & 15) | (x[2 * j + 1] << 4)) ^ 0x88
                y[j + 8] = ((x[2 * j] >> 4) | (x[2 * j + 1] & 0xF0)) ^ 0x88
        else:
            for j in range(8):
                y[2 * j] = ((x[j] & 15) | (x[j + 8] << 4)) ^ 0x88
                y[2 * j + 1] = ((x[j] >> 4) | (x[j + 8] & 0xF0)) ^ 0x88


@inlined
def copy_run(unit_bytes, src, src_step, dst, dst_step, count):
    """Copies `count` units of one type, byte for byte. Steps are in bytes."""
    if src_step == unit_bytes and dst_step == unit_bytes:
        copy(src, dst, count * unit_bytes)
    elif unit_bytes == 4:
        for i in range(count):
            array_at(dst + i * dst_step, types.uint32, 1)[0] = array_at(src + i * src_step, types.uint32, 1)[0]
    elif unit_bytes == 2:
        for i in range(count):
            array_at(dst + i * dst_step, types.uint16, 1)[0] = array_at(src + i * src_step, types.uint16, 1)[0]
    else:
        for i in range(count):
            copy(src + i * src_step, dst + i * dst_step, unit_bytes)


def _floats(source, kind):
    """32 elements of f32, f16 or bf16 as float32."""
    if kind == F32:
        return source.load(FLOAT, _BLOCK)
    if kind == F16:
        return source.load(HALF, _BLOCK).widened()
    return (source.load(INT16, _BLOCK).to(INT32) << 16).as_float()


def magnitudes(x):
    """Bits of |x|; 0 for NaN, which is ignored as by C's `amax < fabsf(v)`."""
    bits = x.bits() & 0x7FFFFFFF
    return bits.where(bits.at_most(0x7F800000), 0)


def _reciprocal(d):
    """1 / d, or 0 where d is 0."""
    return (1.0 / d).where(d.differs(0.0), 0.0)


@part
def _decode_q8_0(scale, quants, target):
    d = scale.load(HALF).widened()
    target.store(quants.load(INT8, _BLOCK).to_float() * d)


def _q4_0_values(codes, d):
    return (codes.to(INT32) - 8).to_float() * d


@part
def _decode_q4_0(scale, quants, target):
    d, pairs = scale.load(HALF).widened(), quants.load(INT8, _BLOCK // 2)
    target.store(_q4_0_values((pairs & 15).followed_by(pairs >> 4), d))


@part
def _decode_q4_0_packed(scale, quants, target):
    d, pairs = scale.load(HALF).widened(), quants.load(INT8, _BLOCK // 2) ^ 0x88
    target.store(_q4_0_values((pairs & 15).interleaved(pairs >> 4), d))


def _encode_q8_0_reference_block(kind):
    @part
    def encode(source, scale, quants):
        x = _floats(source, kind)
        d = magnitudes(x).largest().as_float() / 127.0
        scale.store(d.narrowed())
        quants.store((x * _reciprocal(d)).rounded("round").to_int32().to(INT8))

    return encode


def _encode_q8_0_simd_block(kind):
    @part
    def encode(source, scale, quants):
        x = _floats(source, kind)
        largest = magnitudes(x).largest().as_float()
        scale.store((largest / 127.0).narrowed())
        inverse = (127.0 / largest).where(largest.differs(0.0), 0.0)
        quants.store((x * inverse).rounded("rint").to_int32().limited(-128, 127).to(INT8))

    return encode


def _q4_0_codes(x):
    """The scale of a block of 32, and its codes, 0 to 15."""
    sizes = magnitudes(x)
    largest = sizes.largest()
    extreme = x.lane(sizes.equals(largest).bits().first_set()).where(largest.differs(0), 0.0)
    d = extreme / -8.0
    return d, (x * _reciprocal(d) + 8.5).to_int32().to(INT8).limited(-128, 15)


def _encode_q4_0_block(kind):
    @part
    def encode(source, scale, quants):
        d, codes = _q4_0_codes(_floats(source, kind))
        scale.store(d.narrowed())
        quants.store(codes.lanes_from(0, 1, 16) | (codes.lanes_from(16, 1, 16) << 4))

    return encode


def _encode_q4_0_packed_block(kind):
    @part
    def encode(source, scale, quants):
        d, codes = _q4_0_codes(_floats(source, kind))
        scale.store(d.narrowed())
        quants.store((codes.lanes_from(0, 2, 16) | (codes.lanes_from(1, 2, 16) << 4)) ^ 0x88)

    return encode


def _encoders(kind):
    return (
        _encode_q8_0_reference_block(kind),
        _encode_q8_0_simd_block(kind),
        _encode_q4_0_block(kind),
        _encode_q4_0_packed_block(kind),
    )


F32_TO_Q8_0_REFERENCE, F32_TO_Q8_0_SIMD, F32_TO_Q4_0, F32_TO_Q4_0_PACKED = _encoders(F32)
F16_TO_Q8_0_REFERENCE, F16_TO_Q8_0_SIMD, F16_TO_Q4_0, F16_TO_Q4_0_PACKED = _encoders(F16)
BF16_TO_Q8_0_REFERENCE, BF16_TO_Q8_0_SIMD, BF16_TO_Q4_0, BF16_TO_Q4_0_PACKED = _encoders(BF16)


@inlined
def _decode_blocks(decode, decode_packed, payload, src, src_step, packed, n_packed, dst, dst_step, count):
    if n_packed:
        for block in range(count):
            scale, quants = _at(src + block * src_step, packed, n_packed, payload)
            decode_packed(scale, quants, dst + block * dst_step)
    else:
        for block in range(count):
            scale = src + block * src_step
            decode(scale, scale + 2, dst + block * dst_step)


@inlined
def _encode_blocks(encode, encode_packed, payload, src, src_step, dst, dst_step, packed, n_packed, count):
    if n_packed:
        for block in range(count):
            scale, quants = _at(dst + block * dst_step, packed, n_packed, payload)
            encode_packed(src + block * src_step, scale, quants)
    else:
        for block in range(count):
            scale = dst + block * dst_step
            encode(src + block * src_step, scale, scale + 2)


@inlined
def _elements(widen, source, source_bytes, src, src_step, narrow, target, target_bytes, dst, dst_step, count):
    if src_step == source_bytes and dst_step == target_bytes:
        x = array_at(src, source, count)
        y = array_at(dst, target, count)
        for i in range(count):
            y[i] = narrow(widen(x[i]))
    else:
        for i in range(count):
            value = widen(array_at(src + i * src_step, source, 1)[0])
            array_at(dst + i * dst_step, target, 1)[0] = narrow(value)


@inlined
def _from_float(
    widen, source, source_bytes, q8_0_reference, q8_0_simd, q4_0, q4_0_packed,
    src, src_step, dst_code, dst, dst_step, packed, n_packed, count,
):  # fmt: skip
    """From a float type, whose `widen` gives float32, to the type of `dst_code`; the arguments after `source_bytes` are
    its encoders."""
    if dst_code == F32:
        _elements(widen, source, source_bytes, src, src_step, _same, types.float32, 4, dst, dst_step, count)
    elif dst_code == F16:
        _elements(widen, source, source_bytes, src, src_step, f32_to_f16, types.uint16, 2, dst, dst_step, count)
    elif dst_code == F16_FOURS:
        _elements(widen, source, source_bytes, src, src_step, f32_to_f16_payload, types.uint16, 2, dst, dst_step, count)
    elif dst_code == BF16:
        _elements(widen, source, source_bytes, src, src_step, _f32_to_bf16, types.uint16, 2, dst, dst_step, count)
    elif dst_code == I32:
        _elements(widen, source, source_bytes, src, src_step, truncate_to_int32, types.int32, 4, dst, dst_step, count)
    elif dst_code == Q8_0_REFERENCE:
        _encode_blocks(q8_0_reference, q8_0_reference, 32, src, src_step, dst, dst_step, packed, n_packed, count)
    elif dst_code == Q8_0_SIMD:
        _encode_blocks(q8_0_simd, q8_0_simd, 32, src, src_step, dst, dst_step, packed, n_packed, count)
    elif dst_code == Q4_0:
        _encode_blocks(q4_0, q4_0_packed, 16, src, src_step, dst, dst_step, packed, n_packed, count)


@inlined
def convert_run(src_code, src, src_step, src_packed, src_n, dst_code, dst, dst_step, dst_packed, dst_n, count):
    """Converts `count` units from one type to another. Codes are values of `CODES`, steps are in bytes. It converts any
    of the types to f32, and a float type to any.

    Where a side lies in a tensor packed in the device layout, `packed` and `n` are that tensor's address and its number
    of blocks; otherwise n is 0.
    """
    if src_code == F32:
        _from_float(
            _same, types.float32, 4, F32_TO_Q8_0_REFERENCE, F32_TO_Q8_0_SIMD, F32_TO_Q4_0, F32_TO_Q4_0_PACKED,
            src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count,
        )  # fmt: skip
    elif src_code == F16:
        _from_float(
            f16_to_f32, types.uint16, 2, F16_TO_Q8_0_REFERENCE, F16_TO_Q8_0_SIMD, F16_TO_Q4_0, F16_TO_Q4_0_PACKED,
            src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count,
        )  # fmt: skip
    elif src_code == BF16:
        _from_float(
            _bf16_to_f32, types.uint16, 2, BF16_TO_Q8_0_REFERENCE, BF16_TO_Q8_0_SIMD, BF16_TO_Q4_0, BF16_TO_Q4_0_PACKED,
            src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count,
        )  # fmt: skip
    elif src_code == I32:
        _elements(_i32_to_f32, types.int32, 4, src, src_step, _same, types.float32, 4, dst, dst_step, count)
    elif src_code == Q4_0:
        _decode_blocks(_decode_q4_0, _decode_q4_0_packed, 16, src, src_step, src_packed, src_n, dst, dst_step, count)
    else:
        _decode_blocks(_decode_q8_0, _decode_q8_0, 32, src, src_step, src_packed, src_n, dst, dst_step, count)


@inlined
def widen_run(code, src, src_step, dst, count):
    """`count` elements of f32, f16 or bf16 -> float32 without gaps. It is small: for kernels that compute in
    float32."""
    if code == F32:
        copy_run(4, src, src_step, dst, 4, count)
    elif code == F16:
        _elements(f16_to_f32, types.uint16, 2, src, src_step, _same, types.float32, 4, dst, 4, count)
    else:
        _elements(_bf16_to_f32, types.uint16, 2, src, src_step, _same, types.float32, 4, dst, 4, count)


@inlined
def decode_run(code, src, packed, n_packed, dst, count):
    """A row of `count` elements of f32, f16, bf16, q8_0 or q4_0 -> float32, both without gaps."""
    if code == Q8_0_REFERENCE:
        _decode_blocks(_decode_q8_0, _decode_q8_0, 32, src, 34, packed, n_packed, dst, 128, count // 32)
    elif code == Q4_0:
        _decode_blocks(_decode_q4_0, _decode_q4_0_packed, 16, src, 18, packed, n_packed, dst, 128, count // 32)
    else:
        widen_run(code, src, types.int64(4 if code == F32 else 2), dst, count)


@intrinsic
def _call_to_float(typing_context, function, source, target, count):
    """Calls ggml's to_float of a type, by its address: `count` elements as float32."""

    def emit(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


@inlined
def decode_row(code, to_float, src, packed, n_packed, dst, count):
    """As `decode_run`; for any other type, calls ggml's to_float at the address `to_float`, which is 0 for the types
    above."""
    if to_float:
        _call_to_float(to_float, src, dst, count)
    else:
        decode_run(code, src, packed, n_packed, dst, count)


@inlined
def narrow_run(src, code, dst, dst_step, count):
    """`count` float32 without gaps -> f32, f16 or bf16, dst_step bytes from one element to the next."""
    if code == F32:
        copy_run(4, src, 4, dst, dst_step, count)
    elif code == F16:
        _elements(_same, types.float32, 4, src, 4, f32_to_f16, types.uint16, 2, dst, dst_step, count)
    else:
        _elements(_same, types.float32, 4, src, 4, _f32_to_bf16, types.uint16, 2, dst, dst_step, count)


@inlined
def round_run(code, x, work, n):
    """Rounds n float32 without gaps, in place, to f32, f16, bf16 or q8_0 and back. `work` holds 2 * n bytes, and at
    least 34."""
    if code in (F16, BF16):
        narrow_run(x, code, work, 2, n)
        widen_run(code, work, 2, x, n)
    elif code != F32:
        for block in range(n // _BLOCK):
            at = x + block * 128
            if code == Q8_0_SIMD:
                F32_TO_Q8_0_SIMD(at, work, work + 2)
            else:
                F32_TO_Q8_0_REFERENCE(at, work, work + 2)
            _decode_q8_0(work, work + 2, at)


@inlined
def flush(stage, filled, target, everything):
    """Stores the bytes in a stage to target, past the caches: whole cache lines of the target, or everything.

    The rest moves to the start of the stage. Returns how many bytes the rest has, and the address where it belongs.
    """
    n = filled if everything else filled - (target + filled) % LINE
    stream(stage, target, n)
    if n < filled:
        copy(stage + n, stage, filled - n)
    return filled - n, target + n


class Convert(NamedTuple):
    """Parameters of `convert`. Steps in bytes; streams: dst is stored past the caches."""

    src_code: int
    src: int
    src_step: int
    dst_code: int
    dst: int
    dst_step: int
    streams: int


@compiled
def convert(p, begin, end, stage):
    """Units [begin, end) (blocks or elements) of two arrays without gaps, by `convert_run`. With `streams`, dst is
    built in a stage of STAGE_SIZE bytes and stored past the caches."""
    of = record_at(p, Convert)
    src_code, src_step, dst_code, dst_step = of.src_code, of.src_step, of.dst_code, of.dst_step
    if not of.streams:
        x, y = of.src + begin * src_step, of.dst + begin * dst_step
        convert_run(src_code, x, src_step, 0, 0, dst_code, y, dst_step, 0, 0, end - begin)
        return 0
    filled, target = 0, of.dst + begin * dst_step
    while begin < end:
        count = min((STAGE_SIZE - filled) // dst_step, end - begin)
        to = stage + filled
        convert_run(src_code, of.src + begin * src_step, src_step, 0, 0, dst_code, to, dst_step, 0, 0, count)
        begin += count
        filled, target = flush(stage, filled + count * dst_step, target, begin == end)
    stream_ends()
    return 0
