"""Compiled conversion of a run of units between two types, at any strides: `convert`.

A unit is one element, or one block where either type has blocks. Inside a unit the elements are adjacent; from one
unit to the next it is any number of bytes. The functions here see addresses and are compiled into kernels; the NumPy
definitions they equal byte for byte stand in `quant.scalars` and `quant.blocks`.
"""

from __future__ import annotations

from numba import types

from quant.jit import (
    array_at,
    bits_float,
    compiled,
    f16_to_f32,
    f32_to_f16_payload,
    float_bits,
    inlined,
    round_half_away,
    round_half_even,
    truncate_to_int32,
)

# what `convert` knows, by number; q8_0 as a destination exists once per rounding, f16 once for elements and once for
# rows, of which ggml_cpu_fp32_to_fp16 converts fours by the processor's vectors, which keep a NaN's payload
F32, F16, F16_ROW, BF16, I32, Q8_0_REFERENCE, Q8_0_SIMD, Q4_0 = range(8)
CODES = {
    "f32": F32,
    "f16": F16,
    "f16 row": F16_ROW,
    "bf16": BF16,
    "i32": I32,
    "q4_0": Q4_0,
    "q8_0": Q8_0_REFERENCE,
    "q8_0 reference": Q8_0_REFERENCE,
    "q8_0 simd": Q8_0_SIMD,
}

_BLOCK = 32


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
    """Addresses of the scale and the quants of the block that ggml has at `address`.

    In a tensor of n_packed blocks packed in the device layout at `packed`, they lie apart; n_packed is 0 elsewhere.
    """
    if n_packed == 0:
        return address, address + 2
    index = (address - packed) // (payload + 2)
    return packed + n_packed * payload + 2 * index, packed + index * payload


@inlined
def copy_blocks(payload, src, src_step, src_packed, src_n, dst, dst_step, dst_packed, dst_n, count):
    """`count` blocks of q8_0 (payload 32) or q4_0 (payload 16), of which either side may be packed."""
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
    """`count` units of one type, byte for byte."""
    if src_step == unit_bytes and dst_step == unit_bytes:
        x = array_at(src, types.uint8, count * unit_bytes)
        y = array_at(dst, types.uint8, count * unit_bytes)
        for i in range(count * unit_bytes):
            y[i] = x[i]
    elif unit_bytes == 4:
        for i in range(count):
            array_at(dst + i * dst_step, types.uint32, 1)[0] = array_at(src + i * src_step, types.uint32, 1)[0]
    elif unit_bytes == 2:
        for i in range(count):
            array_at(dst + i * dst_step, types.uint16, 1)[0] = array_at(src + i * src_step, types.uint16, 1)[0]
    else:
        for i in range(count):
            x = array_at(src + i * src_step, types.uint8, unit_bytes)
            y = array_at(dst + i * dst_step, types.uint8, unit_bytes)
            for j in range(unit_bytes):
                y[j] = x[j]


@inlined
def _decode_q8_0(src, src_step, packed, n_packed, dst, dst_step, count):
    for block in range(count):
        scale, quants = _at(src + block * src_step, packed, n_packed, 32)
        d = f16_to_f32(array_at(scale, types.uint16, 1)[0])
        q = array_at(quants, types.int8, _BLOCK)
        y = array_at(dst + block * dst_step, types.float32, _BLOCK)
        for j in range(_BLOCK):
            y[j] = types.float32(q[j]) * d


@inlined
def _decode_q4_0(src, src_step, packed, n_packed, dst, dst_step, count):
    for block in range(count):
        scale, quants = _at(src + block * src_step, packed, n_packed, 16)
        d = f16_to_f32(array_at(scale, types.uint16, 1)[0])
        q = array_at(quants, types.uint8, _BLOCK // 2)
        y = array_at(dst + block * dst_step, types.float32, _BLOCK)
        if n_packed:
            for j in range(_BLOCK // 2):
                pair = q[j] ^ types.uint8(0x88)
                y[2 * j] = types.float32(types.int32(pair & types.uint8(15)) - types.int32(8)) * d
                y[2 * j + 1] = types.float32(types.int32(pair >> types.uint8(4)) - types.int32(8)) * d
            continue
        for j in range(_BLOCK // 2):
            y[j] = types.float32(types.int32(q[j] & types.uint8(15)) - types.int32(8)) * d
        for j in range(_BLOCK // 2):
            y[j + _BLOCK // 2] = types.float32(types.int32(q[j] >> types.uint8(4)) - types.int32(8)) * d


@inlined
def _largest_magnitude(widen, x):
    """Bits of max |x|; NaN is passed over, as by C's `amax < fabsf(v)`."""
    largest = types.uint32(0)
    for j in range(_BLOCK):
        bits = float_bits(widen(x[j])) & types.uint32(0x7FFFFFFF)
        largest = max(largest, bits if bits <= types.uint32(0x7F800000) else types.uint32(0))
    return largest


@inlined
def _encode_q8_0_reference(widen, source, src, src_step, dst, dst_step, packed, n_packed, count):
    for block in range(count):
        x = array_at(src + block * src_step, source, _BLOCK)
        d = bits_float(_largest_magnitude(widen, x)) / types.float32(127)
        inverse = types.float32(1) / d if d != types.float32(0) else types.float32(0)
        scale, quants = _at(dst + block * dst_step, packed, n_packed, 32)
        array_at(scale, types.uint16, 1)[0] = f32_to_f16(d)
        q = array_at(quants, types.int8, _BLOCK)
        for j in range(_BLOCK):
            q[j] = types.int8(truncate_to_int32(round_half_away(widen(x[j]) * inverse)))


@inlined
def _encode_q8_0_simd(widen, source, src, src_step, dst, dst_step, packed, n_packed, count):
    for block in range(count):
        x = array_at(src + block * src_step, source, _BLOCK)
        largest = bits_float(_largest_magnitude(widen, x))
        inverse = types.float32(127) / largest if largest != types.float32(0) else types.float32(0)
        scale, quants = _at(dst + block * dst_step, packed, n_packed, 32)
        array_at(scale, types.uint16, 1)[0] = f32_to_f16(largest / types.float32(127))
        q = array_at(quants, types.int8, _BLOCK)
        for j in range(_BLOCK):
            code = truncate_to_int32(round_half_even(widen(x[j]) * inverse))
            q[j] = types.int8(min(max(code, types.int32(-128)), types.int32(127)))


@inlined
def _q4_0_code(x, inverse):
    code = types.int8(truncate_to_int32(x * inverse + types.float32(8.5)))
    return types.uint8(min(code, types.int8(15)))


@inlined
def _encode_q4_0(widen, source, src, src_step, dst, dst_step, packed, n_packed, count):
    for block in range(count):
        x = array_at(src + block * src_step, source, _BLOCK)
        largest = _largest_magnitude(widen, x)
        extreme = types.float32(0)
        if largest:
            for j in range(_BLOCK):
                value = widen(x[j])
                if float_bits(value) & types.uint32(0x7FFFFFFF) == largest:
                    extreme = value
                    break
        d = extreme / types.float32(-8)
        inverse = types.float32(1) / d if d != types.float32(0) else types.float32(0)
        scale, quants = _at(dst + block * dst_step, packed, n_packed, 16)
        array_at(scale, types.uint16, 1)[0] = f32_to_f16(d)
        q = array_at(quants, types.uint8, _BLOCK // 2)
        if n_packed:
            for j in range(_BLOCK // 2):
                low = _q4_0_code(widen(x[2 * j]), inverse)
                high = _q4_0_code(widen(x[2 * j + 1]), inverse)
                q[j] = (low | types.uint8(high << types.uint8(4))) ^ types.uint8(0x88)
            continue
        for j in range(_BLOCK // 2):
            low = _q4_0_code(widen(x[j]), inverse)
            high = _q4_0_code(widen(x[j + _BLOCK // 2]), inverse)
            q[j] = low | types.uint8(high << types.uint8(4))


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
def _from_float(widen, source, source_bytes, src, src_step, dst_code, dst, dst_step, packed, n_packed, count):
    """From a float type, `widen` of which gives float32, to the type of `dst_code`."""
    if dst_code == F32:
        _elements(widen, source, source_bytes, src, src_step, _same, types.float32, 4, dst, dst_step, count)
    elif dst_code == F16:
        _elements(widen, source, source_bytes, src, src_step, f32_to_f16, types.uint16, 2, dst, dst_step, count)
    elif dst_code == F16_ROW:
        vectors = count - count % 4
        _elements(
            widen, source, source_bytes, src, src_step, f32_to_f16_payload, types.uint16, 2, dst, dst_step, vectors
        )
        src, dst = src + vectors * src_step, dst + vectors * dst_step
        _elements(
            widen, source, source_bytes, src, src_step, f32_to_f16, types.uint16, 2, dst, dst_step, count - vectors
        )
    elif dst_code == BF16:
        _elements(widen, source, source_bytes, src, src_step, _f32_to_bf16, types.uint16, 2, dst, dst_step, count)
    elif dst_code == I32:
        _elements(widen, source, source_bytes, src, src_step, truncate_to_int32, types.int32, 4, dst, dst_step, count)
    elif dst_code == Q8_0_REFERENCE:
        _encode_q8_0_reference(widen, source, src, src_step, dst, dst_step, packed, n_packed, count)
    elif dst_code == Q8_0_SIMD:
        _encode_q8_0_simd(widen, source, src, src_step, dst, dst_step, packed, n_packed, count)
    elif dst_code == Q4_0:
        _encode_q4_0(widen, source, src, src_step, dst, dst_step, packed, n_packed, count)


@inlined
def convert_run(src_code, src, src_step, src_packed, src_n, dst_code, dst, dst_step, dst_packed, dst_n, count):
    """`count` units from one type to another; codes are values of `CODES`. To f32 from any, from a float to any.

    Where a side is in a tensor packed in the device layout, packed and n are its address and its blocks; n is 0
    elsewhere.
    """
    if src_code == F32:
        _from_float(_same, types.float32, 4, src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count)
    elif src_code == F16:
        _from_float(f16_to_f32, types.uint16, 2, src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count)
    elif src_code == BF16:
        _from_float(_bf16_to_f32, types.uint16, 2, src, src_step, dst_code, dst, dst_step, dst_packed, dst_n, count)
    elif src_code == I32:
        _elements(_i32_to_f32, types.int32, 4, src, src_step, _same, types.float32, 4, dst, dst_step, count)
    elif src_code == Q4_0:
        _decode_q4_0(src, src_step, src_packed, src_n, dst, dst_step, count)
    else:
        _decode_q8_0(src, src_step, src_packed, src_n, dst, dst_step, count)


@inlined
def widen_run(code, src, src_step, dst, count):
    """`count` elements of f32, f16 or bf16 to float32 without gaps. Small, for kernels that compute in float32."""
    if code == F32:
        _elements(_same, types.float32, 4, src, src_step, _same, types.float32, 4, dst, 4, count)
    elif code == F16:
        _elements(f16_to_f32, types.uint16, 2, src, src_step, _same, types.float32, 4, dst, 4, count)
    else:
        _elements(_bf16_to_f32, types.uint16, 2, src, src_step, _same, types.float32, 4, dst, 4, count)


@inlined
def narrow_run(src, code, dst, dst_step, count):
    """`count` float32 without gaps to f16 or bf16."""
    if code == F16:
        _elements(_same, types.float32, 4, src, 4, f32_to_f16, types.uint16, 2, dst, dst_step, count)
    else:
        _elements(_same, types.float32, 4, src, 4, _f32_to_bf16, types.uint16, 2, dst, dst_step, count)


@compiled
def convert(src_code, src, src_step, dst_code, dst, dst_step, count):
    """`convert_run` for a caller in Python, nothing packed."""
    convert_run(src_code, src, src_step, 0, 0, dst_code, dst, dst_step, 0, 0, count)
