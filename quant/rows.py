"""Rows of any type in kernels that compute in float32: decoded, and rounded to a type and back."""

from __future__ import annotations

from quant import runs
from quant.blocks import Q4_0 as _Q4_0
from quant.blocks import Q8_0 as _Q8_0
from quant.codec import ROUNDINGS
from quant.conversions import block_decoder, block_encoder, decoding
from quant.dots import quants_q4, quants_q5
from quant.kernels.jit import inlined
from quant.kernels.late import intrinsic, ir, types
from quant.kernels.vectors import HALF, INT32, Address, part
from quant.runs import BF16, F16, F32, narrow_run, widen_run

# the types that these functions know, by number; q8_0 has one number for each rounding
Q8_0, Q8_0_SIMD, Q8_0_NEON, Q4_0, Q4_1, Q5_0, Q5_1 = range(len(runs.CODES), len(runs.CODES) + 7)
_ROUNDED = {"q8_0 reference": Q8_0, "q8_0 simd": Q8_0_SIMD, "q8_0 neon": Q8_0_NEON}
CODES = {**runs.CODES, "q8_0": Q8_0, **_ROUNDED, "q4_0": Q4_0, "q4_1": Q4_1, "q5_0": Q5_0, "q5_1": Q5_1}

_decode_q8_0, _decode_q4_0 = decoding(_Q8_0.run), decoding(_Q4_0.run)
_decode_block = block_decoder(_Q8_0.run)
_encode_reference, _encode_simd, _encode_neon = (block_encoder(_Q8_0.run, rounding) for rounding in ROUNDINGS)


def _decoder(unit, quants, *, has_minimum):
    """A part of kernels that decodes blocks of `unit` bytes, as dequantize_row_q4_1 and others of ggml do."""

    @part
    def decode(src: Address, dst: Address, count: Address) -> None:
        def step(i, _):
            block = src + i * unit
            codes, d = quants(block + (unit - 16)).to(INT32).to_float(), block.load(HALF).widened()
            x = codes * d + (block + 2).load(HALF).widened() if has_minimum else (codes - 16.0) * d
            (dst + i * 128).store(x)
            return ()

        count.count(step)

    return decode


_decode_q4_1 = _decoder(20, quants_q4, has_minimum=True)
_decode_q5_0, _decode_q5_1 = _decoder(22, quants_q5, has_minimum=False), _decoder(24, quants_q5, has_minimum=True)


@inlined
def decode_run(code, src, packed, n_packed, dst, count):
    """A row of `count` elements of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0 or q5_1 -> float32, both without gaps. The
    last three have no device layout."""
    if code == Q8_0:
        _decode_q8_0(src, 34, packed, n_packed, dst, 128, count // 32)
    elif code == Q4_0:
        _decode_q4_0(src, 18, packed, n_packed, dst, 128, count // 32)
    elif code == Q4_1:
        _decode_q4_1(src, dst, count // 32)
    elif code == Q5_0:
        _decode_q5_0(src, dst, count // 32)
    elif code == Q5_1:
        _decode_q5_1(src, dst, count // 32)
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
def round_run(code, x, work, n):
    """Rounds n float32 without gaps, in place, to f32, f16, bf16 or q8_0 and back. `work` holds 2 * n bytes, and at
    least 34."""
    if code in (F16, BF16):
        narrow_run(x, code, work, 2, n)
        widen_run(code, work, 2, x, n)
    elif code != F32:
        for block in range(n // 32):
            at = x + block * 128
            if code == Q8_0_SIMD:
                _encode_simd(at, work, work + 2)
            elif code == Q8_0_NEON:
                _encode_neon(at, work, work + 2)
            else:
                _encode_reference(at, work, work + 2)
            _decode_block(work, work + 2, at)
