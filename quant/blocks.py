"""Block codecs of this project: definitions in NumPy, and compiled runs that equal them byte for byte.

`GGML_NPU_ENGINE=reference` computes with the definitions instead of the compiled runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant import conversions, runs
from quant.codec import Bytes, Codec, Floats, Rounding, codec, type_names
from quant.conversions import Blocks, Convert, Run, conversion
from quant.kernels.jit import engine
from quant.kernels.memory import empty
from quant.kernels.threads import Work
from quant.kernels.vectors import INT8, INT32, Value


def split(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """Cuts blocks (n, block bytes) into parts of the given sizes in bytes; each part is contiguous."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(sizes)[:-1], axis=1)]


def halves(x: Floats) -> Bytes:
    """float32 (n, 1) -> the bytes of its float16, (n, 2)."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint8)


def reciprocal(d: Floats) -> Floats:
    """1 / d, or 0 if d is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d == 0, np.float32(0), np.float32(1) / d)


def largest_magnitude(x: Floats) -> Floats:
    """max |x| of each block, (n, 1); NaN is ignored, also a signalling one, which an ARM's fmax makes a result."""
    largest: Floats = np.where(np.isnan(x), np.float32(0), np.abs(x)).max(axis=1, keepdims=True, initial=0)
    return largest


def last_largest_magnitude(x: Floats) -> Floats:
    """max |x| of each block, (n, 1), as C's `amax = MAX(amax, fabsf(v))` leaves it: NaN takes the place of all before
    it, and the next number takes its."""
    nan = np.isnan(x)
    forgotten = np.logical_or.accumulate(nan[:, ::-1], axis=1)[:, ::-1]  # a NaN comes here or later
    largest: Floats = np.where(forgotten, np.float32(0), np.abs(x)).max(axis=1, keepdims=True, initial=0)
    return np.where(nan[:, -1:], np.float32(np.nan), largest)


def round_half_away(x: Floats) -> Floats:
    """C's roundf: half goes away from zero."""
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(np.float32), x)


def low_byte(x: Floats) -> NDArray[np.int8]:
    """C's (int8_t) x of a float x, as compiled for x86: x becomes an int32, of which the low byte is kept."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.int32).astype(np.int8)


class Compiled(Codec):
    """A block codec that has a compiled run beside its definition, and a device layout (`quant.layout`).

    run  what the compiled conversions of its blocks are made from
    """

    run: Blocks

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        """Whether the compiled run computes, not the definition: `engine()` is "compiled"."""
        return engine() == "compiled"

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """As `Codec.encode`: by the compiled run of the rounding, or by `define_encode` with the engine "reference"."""
        if engine() == "reference":
            return self.define_encode(x, rounding)
        x = np.ascontiguousarray(x)
        blocks = empty((len(x), self.block_bytes), np.uint8)
        _convert(conversions.F32, x, self.run, blocks, rounding)
        return blocks

    def decode(self, blocks: Bytes) -> Floats:
        """As `Codec.decode`: by the compiled run, or by `define_decode` with the engine "reference"."""
        if engine() == "reference":
            return self.define_decode(blocks)
        blocks = np.ascontiguousarray(blocks)
        x = empty((len(blocks), self.block_size), np.float32)
        _convert(self.run, blocks, conversions.F32, x)
        return x

    def define_encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """The definition of `encode`, in NumPy."""
        raise NotImplementedError

    def define_decode(self, blocks: Bytes) -> Floats:
        """The definition of `decode`, in NumPy."""
        raise NotImplementedError

    def pack(self, quants: Bytes) -> NDArray[np.int8] | Bytes:
        """Quants of blocks, (n, bytes of them) -> quants of the device layout, of the same shape."""
        return quants.view(np.int8)

    def unpack(self, quants: NDArray[Any]) -> Bytes:
        """The inverse of `pack`."""
        return quants.view(np.uint8)


def compiled_types() -> tuple[str, ...]:
    """The names of the types that have a compiled run and a device layout."""
    return tuple(name for name in type_names() if isinstance(codec(name), Compiled))


def _convert(
    src_run: Run, src: NDArray[Any], dst_run: Run, dst: NDArray[Any], rounding: Rounding = "reference"
) -> None:
    """Converts rows of src, one block each, to rows of dst."""
    function = conversion(src_run, dst_run, rounding)
    assert function is not None
    streams = dst.nbytes > runs.CACHED
    of = Convert(function.address, address(src), src.strides[0], address(dst), dst.strides[0], streams)
    scratch = runs.STAGE_SIZE if streams else 0
    Work(conversions.convert, of, len(src), max(src.nbytes, dst.nbytes), scratch=scratch).run()


def address(array: NDArray[np.generic]) -> int:
    """The address of an array's first element."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


# compiled


def magnitudes(x: Value) -> Value:
    """Bits of |x|; 0 for NaN, which is ignored as by C's `amax < fabsf(v)`."""
    bits = x.bits() & 0x7FFFFFFF
    return bits.where(bits.at_most(0x7F800000), 0)


def _last_largest(x: Value) -> Value:
    """max |x| of 32 elements, as `last_largest_magnitude`."""
    sizes = x.bits() & 0x7FFFFFFF
    forgotten = x.differs(x).bits()
    for step in (1, 2, 4, 8, 16):
        forgotten = forgotten | (forgotten >> step)
    largest = (sizes & 0).where(forgotten.conditions(), sizes).largest()
    return largest.where((forgotten >> 31).equals(0), 0x7FC00000).as_float()


def _reciprocal(d: Value) -> Value:
    """1 / d, or 0 if d is 0."""
    return (1.0 / d).where(d.differs(0.0), 0.0)


def _decode_q8_0(d: Value, quants: Value) -> Value:
    return quants.to_float() * d


def _encode_q8_0_reference(x: Value) -> tuple[Value, Value]:
    d = _last_largest(x) / 127.0
    return d, (x * _reciprocal(d)).rounded("round").to_int32().to(INT8)


def _encode_q8_0_simd(x: Value) -> tuple[Value, Value]:
    largest = magnitudes(x).largest().as_float()
    inverse = (127.0 / largest).where(largest.differs(0.0), 0.0)
    return largest / 127.0, (x * inverse).rounded("rint").to_int32().limited(-128, 127).to(INT8)


def _codes(quants: Value) -> Value:
    """The 32 codes of q4_0, 0 to 15."""
    return (quants & 15).followed_by(quants >> 4)


def _decode_q4_0(d: Value, quants: Value) -> Value:
    return (_codes(quants).to(INT32) - 8).to_float() * d


def _encode_q4_0(x: Value) -> tuple[Value, Value]:
    sizes = magnitudes(x)
    largest = sizes.largest()
    extreme = x.lane(sizes.equals(largest).bits().first_set()).where(largest.differs(0), 0.0)
    d = extreme / -8.0
    codes = (x * _reciprocal(d) + 8.5).to_int32().to(INT8).limited(-128, 15)
    return d, codes.lanes_from(0, 1, 16) | (codes.lanes_from(16, 1, 16) << 4)


def _pack_q4_0(quants: Value) -> Value:
    codes = _codes(quants)
    return (codes.lanes_from(0, 2, 16) | (codes.lanes_from(1, 2, 16) << 4)) ^ 0x88


def _unpack_q4_0(quants: Value) -> Value:
    pairs = quants ^ 0x88
    codes = (pairs & 15).interleaved(pairs >> 4)
    return codes.lanes_from(0, 1, 16) | (codes.lanes_from(16, 1, 16) << 4)


def _encode_q8_0_neon(x: Value) -> tuple[Value, Value]:
    d = magnitudes(x).largest().as_float() / 127.0
    return d, (x * _reciprocal(d)).rounded("rint").to_int32().to(INT8)


class Q8_0(Compiled):
    """A float16 scale d, then 32 int8 quants (block_q8_0).

    encode  "reference": quantize_row_q8_0_ref; "simd": quantize_row_q8_0 of ggml-cpu/arch/x86/quants.c; "neon": that of
            arch/arm/quants.c, for blocks without NaN
    decode  dequantize_row_q8_0
    """

    name, block_size, block_bytes = "q8_0", 32, 34
    run = Blocks(
        "q8_0",
        32,
        32,
        _decode_q8_0,
        {"reference": _encode_q8_0_reference, "simd": _encode_q8_0_simd, "neon": _encode_q8_0_neon},
    )

    def define_encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 32 bytes: d = max |x| / 127 as float16, then x / d as int8; as quantize_row_q8_0(_ref)."""
        largest = last_largest_magnitude(x) if rounding == "reference" else largest_magnitude(x)
        d = largest / np.float32(127)
        with np.errstate(all="ignore"):
            if rounding == "reference":
                quants = low_byte(round_half_away(x * reciprocal(d)))
            elif rounding == "neon":
                quants = low_byte(np.rint(x * reciprocal(d)))
            else:
                inverse = np.where(largest == 0, np.float32(0), np.float32(127) / largest)
                quants = np.rint(x * inverse).astype(np.int32).clip(-128, 127).astype(np.int8)
        return np.hstack([halves(d), quants.view(np.uint8)])

    def define_decode(self, blocks: Bytes) -> Floats:
        """quant * d of blocks of 2 + 32 bytes, as dequantize_row_q8_0."""
        d, quants = split(blocks, 2, 32)
        with np.errstate(invalid="ignore"):
            return quants.view(np.int8).astype(np.float32) * d.view(np.float16).astype(np.float32)


class Q4_0(Compiled):
    """A float16 scale d, then 16 bytes: byte j holds elements j (low nibble) and j + 16 (high nibble), offset by 8
    (block_q4_0).

    encode  quantize_row_q4_0_ref, which ggml's x86 CPU backend runs too
    decode  dequantize_row_q4_0
    """

    name, block_size, block_bytes = "q4_0", 32, 18
    run = Blocks("q4_0", 32, 16, _decode_q4_0, {"": _encode_q4_0}, _pack_q4_0, _unpack_q4_0)

    def define_encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 16 bytes: d = the x of largest magnitude / -8 as float16, then nibbles; as
        quantize_row_q4_0_ref."""
        first_largest = np.where(np.isnan(x), 0, np.abs(x)).argmax(axis=1)
        extreme = x[np.arange(len(x)), first_largest, None]
        extreme = np.where(np.isnan(extreme) | (extreme == 0), np.float32(0), extreme)
        d: Floats = extreme / np.float32(-8)
        with np.errstate(all="ignore"):
            quants = np.minimum(low_byte(x * reciprocal(d) + np.float32(8.5)), 15).view(np.uint8)
        return np.hstack([halves(d), quants[:, :16] | (quants[:, 16:] << 4)])

    def define_decode(self, blocks: Bytes) -> Floats:
        """(nibble - 8) * d of blocks of 2 + 16 bytes, as dequantize_row_q4_0."""
        d, nibbles = split(blocks, 2, 16)
        quants = np.hstack([nibbles & 15, nibbles >> 4]).astype(np.int8) - np.int8(8)
        with np.errstate(invalid="ignore"):
            return quants.astype(np.float32) * d.view(np.float16).astype(np.float32)

    def pack(self, quants: Bytes) -> Bytes:
        """Two's complement int4, the even element in the low nibble."""
        codes = np.hstack(_nibbles(quants)) ^ np.uint8(8)
        return _bytes(codes[:, 0::2], codes[:, 1::2])

    def unpack(self, quants: NDArray[Any]) -> Bytes:
        """The inverse of `pack`."""
        codes = np.stack(_nibbles(quants.view(np.uint8)), axis=2).reshape(-1, 32) ^ np.uint8(8)
        return _bytes(codes[:, :16], codes[:, 16:])


def _nibbles(quants: Bytes) -> tuple[Bytes, Bytes]:
    """The low and the high nibbles of bytes."""
    return quants & np.uint8(15), quants >> np.uint8(4)


def _bytes(low: Bytes, high: Bytes) -> Bytes:
    """The bytes of low and high nibbles."""
    return low | (high << np.uint8(4))
