"""Numbers in OpenVINO as ggml's CPU has them: blocks are decoded, and x is rounded for a product.

A plugin may compute float16 in float32, and then drops a conversion to it. So float16 is rounded by arithmetic, and
read from its bits by a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from openvino import opset15 as op

from quant import codec

Value = Any  # an output of a node of openvino
select = op.select

# bits of the mantissa, least exponent, and the largest that is rounded here
_F16 = 10, -14, 15
_BF16 = 7, -126, 103


def scalar(x: float) -> Value:
    return op.constant(np.float32(x))


def integers(x: Any) -> Value:
    return op.constant(np.asarray(x, np.int32))


def reshaped(x: Value, *shape: int) -> Value:
    return op.reshape(x, integers(shape), False)


def divided(a: Value, b: Value) -> Value:
    """Returns a / b, rounded once: a plugin is not to multiply by the inverse. a is no constant: OpenVINO 2026.4's CPU
    then gives b / a, if it fuses the division with what makes b."""
    node = op.divide(a, b)
    node.get_rt_info()["nonconvertable_divide_0"] = True
    return node


def _over(x: float, y: Value) -> Value:
    """Returns x / y, and 0 for a y of 0."""
    is_zero = op.equal(y, scalar(0))
    return select(is_zero, y, divided(select(is_zero, y, scalar(x)), y))


def _nearest(x: Value, format: tuple[int, int, int]) -> Value:
    """Returns x rounded to fewer bits, half to even, by a sum: in 1.5 * 2^(e + 23 - bits) + x the last bit is what the
    last one of the format is beside 2^e. It may be wrong by one, next to a power of 2, where both give the same."""
    bits, least, most = format
    large = (1.5 * 2.0 ** (np.arange(least, most + 1) + 23 - bits)).astype(np.float32)
    exponent = op.convert(op.floor(op.multiply(op.log(op.abs(x)), scalar(1 / np.log(2)))), "i32")
    place = op.subtract(op.minimum(op.maximum(exponent, integers(least)), integers(most)), integers(least))
    m = op.gather(op.constant(large), place, integers(0))
    found = op.subtract(op.add(x, m), m)
    return select(op.equal(found, scalar(0)), op.multiply(x, scalar(0)), found)  # -0


def to_f16(x: Value) -> Value:
    found = _nearest(x, _F16)
    return select(op.greater_equal(op.abs(found), scalar(65536)), op.multiply(x, scalar(np.inf)), found)


def to_bf16(x: Value) -> Value:
    """Rounds what is less than 2^104."""
    return select(op.greater(op.abs(x), scalar(2.0**104)), x, _nearest(x, _BF16))


# x for products: what ggml's CPU rounds it to for weights of a type


def _in_blocks(x: Value, size: int) -> Value:
    shape = list(x.get_output_shape(0))
    return reshaped(x, *shape[:-1], shape[-1] // size, size)


def _flat(x: Value) -> Value:
    *outer, n, size = x.get_output_shape(0)
    return reshaped(x, *outer, n * size)


def _quantised(x: Value) -> tuple[Value, Value]:
    """Returns the quants of q8_0, (..., blocks, 32), and the scales before they are rounded, (..., blocks, 1)."""
    x = _in_blocks(x, 32)
    most = op.reduce_max(op.abs(x), integers([-1]), keep_dims=True)
    return op.round(op.multiply(x, _over(127, most)), "half_to_even"), divided(most, scalar(127))


def _to_q8_0(x: Value) -> Value:
    q, d = _quantised(x)
    return _flat(op.multiply(q, to_f16(d)))


def _to_q8_1(x: Value) -> Value:
    """33 columns for each block: the last is its sum, rounded by itself."""
    q, d = _quantised(x)
    sums = to_f16(op.multiply(op.reduce_sum(q, integers([-1]), keep_dims=True), d))
    return _flat(op.concat([op.multiply(q, to_f16(d)), sums], -1))


def _to_q8_k(x: Value) -> Value:
    x = _in_blocks(x, 256)
    high, low = (reduce(x, integers([-1]), keep_dims=True) for reduce in (op.reduce_max, op.reduce_min))
    scale = _over(-127, select(op.greater_equal(high, op.negative(low)), high, low))
    q = op.minimum(op.round(op.multiply(x, scale), "half_to_even"), scalar(127))
    return _flat(op.multiply(q, _over(1, scale)))


ROUNDED: dict[str, Callable[[Value], Value]] = {
    "f32": lambda x: x,
    "f16": to_f16,
    "bf16": to_bf16,
    **dict.fromkeys(("q8_0", "q4_0", "q5_0"), _to_q8_0),
    **dict.fromkeys(("q4_1", "q5_1"), _to_q8_1),
    **dict.fromkeys(("q4_K", "q5_K", "q6_K"), _to_q8_k),
}


# bits


def of_bits(bits: Value, type: str) -> Value:
    """Returns the float32 of 16 bits, given as an integer."""
    all_bits, places = np.arange(1 << 16, dtype=np.uint16), op.convert(bits, "i32")
    if type == "f16":
        return op.gather(op.constant(all_bits.view(np.float16).astype(np.float32)), places, integers(0))
    table = (all_bits.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # of signalling NaN
        scales = np.where(np.abs(table) < 1, np.float32(2.0**64), np.float32(1))  # denormal constants become 0
        table *= scales
    found, scale = (op.gather(op.constant(each), places, integers(0)) for each in (table, 1 / scales))
    return op.multiply(found, scale)


def decoded(rows: Value, type: str) -> Value:
    """Returns the float32 of rows of blocks, uint8 (..., bytes)."""
    *outer, n = rows.get_output_shape(0)
    size = codec(type).block_bytes
    return _flat(DECODERS[type](reshaped(rows, *outer, n // size, size)))


def _bytes(b: Value, begin: int, end: int) -> Value:
    """Returns bytes of each block, as int32."""
    return op.convert(op.slice(b, integers([begin]), integers([end]), integers([1]), integers([-1])), "i32")


def _half(b: Value, at: int) -> Value:
    low, high = _bytes(b, at, at + 1), _bytes(b, at + 1, at + 2)
    return of_bits(op.add(low, op.multiply(high, integers(256))), "f16")


def _nibbles(b: Value, at: int) -> Value:
    q = op.convert(_bytes(b, at, at + 16), "f32")
    high = op.floor(op.multiply(q, scalar(1 / 16)))
    return op.concat([op.subtract(q, op.multiply(high, scalar(16))), high], -1)


def _signed(b: Value, at: int) -> Value:
    q = op.convert(_bytes(b, at, at + 32), "f32")
    return op.subtract(q, select(op.greater(q, scalar(127)), scalar(256), scalar(0)))


# uint8 (..., block bytes) -> float32 (..., block size)
DECODERS: dict[str, Callable[[Value], Value]] = {
    "q8_0": lambda b: op.multiply(_signed(b, 2), _half(b, 0)),
    "q4_0": lambda b: op.multiply(op.subtract(_nibbles(b, 2), scalar(8)), _half(b, 0)),
    "q4_1": lambda b: op.add(op.multiply(_nibbles(b, 4), _half(b, 0)), _half(b, 2)),
}
