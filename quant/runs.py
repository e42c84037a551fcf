"""Runs of elements in kernels: copied, widened to float32 and narrowed from it, at any strides; results stored past the
caches. The functions here take addresses and are compiled into kernels."""

from __future__ import annotations

from quant.kernels.jit import (
    LINE,
    array_at,
    bits_float,
    copy,
    f16_to_f32,
    f32_to_f16_payload,
    float_bits,
    inlined,
    stream,
)
from quant.kernels.late import types
from quant.kernels.processor import last_cache

F32, F16, BF16 = range(3)
CODES = {"f32": F32, "f16": F16, "bf16": BF16}  # the types that these functions know, by number

STAGE = 2048  # bytes that are collected in the L1 cache before they are stored past the other caches
STAGE_SIZE = STAGE + LINE  # bytes of the memory that they are collected in
CACHED = max(8 << 20, min(24 << 20, last_cache() * 3 // 4))  # bytes of a result that may well stay in the caches


@inlined
def f32_to_f16(x):
    """GGML_FP32_TO_FP16: as f32_to_f16_payload, but every NaN becomes 7e00 or fe00."""
    half = f32_to_f16_payload(x)
    if x != x:
        return types.uint16((half & types.uint16(0x8000)) | types.uint16(0x7E00))
    return half


@inlined
def same(x):
    """x"""
    return x


@inlined
def bf16_to_f32(bits):
    """ggml_compute_bf16_to_fp32."""
    return bits_float(types.uint32(bits) << types.uint32(16))


@inlined
def f32_to_bf16(x):
    """ggml_compute_fp32_to_bf16."""
    bits = float_bits(x)
    if (bits & types.uint32(0x7FFFFFFF)) > types.uint32(0x7F800000):
        return types.uint16((bits >> types.uint32(16)) | types.uint32(64))
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16))


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
def widen_run(code, src, src_step, dst, count):
    """`count` elements of f32, f16 or bf16 -> float32 without gaps. It is small: for kernels that compute in
    float32."""
    if code == F32:
        copy_run(4, src, src_step, dst, 4, count)
    elif code == F16:
        _elements(f16_to_f32, types.uint16, 2, src, src_step, same, types.float32, 4, dst, 4, count)
    else:
        _elements(bf16_to_f32, types.uint16, 2, src, src_step, same, types.float32, 4, dst, 4, count)


@inlined
def narrow_run(src, code, dst, dst_step, count):
    """`count` float32 without gaps -> f32, f16 or bf16, dst_step bytes from one element to the next."""
    if code == F32:
        copy_run(4, src, 4, dst, dst_step, count)
    elif code == F16:
        _elements(same, types.float32, 4, src, 4, f32_to_f16, types.uint16, 2, dst, dst_step, count)
    else:
        _elements(same, types.float32, 4, src, 4, f32_to_bf16, types.uint16, 2, dst, dst_step, count)


@inlined
def space_for(unit, filled):
    """How many units of so many bytes still go into a stage that is filled so far; elements by the 64, as many as a
    loop in vectors takes at once: what it leaves over it takes one by one."""
    n = (STAGE_SIZE - filled) // unit
    return n // 64 * 64 if unit <= 4 else n


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
