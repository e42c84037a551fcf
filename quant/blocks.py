"""Block codecs of this project: definitions in NumPy, and compiled runs that equal them byte for byte.

`GGML_NPU_ENGINE=reference` computes with the definitions instead of the compiled runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant import runs
from quant.codec import Bytes, Codec, Floats, Rounding
from quant.kernels.jit import engine
from quant.kernels.memory import empty
from quant.kernels.threads import Work


def split(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """Cuts blocks (n, block bytes) into parts of the given sizes in bytes; each part is contiguous."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(sizes)[:-1], axis=1)]


def halves(x: Floats) -> Bytes:
    """float32 (n, 1) -> the bytes of its float16, (n, 2)."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).view(np.uint8)


def reciprocal(d: Floats) -> Floats:
    """1 / d, or 0 where d is 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(d == 0, np.float32(0), np.float32(1) / d)


def largest_magnitude(x: Floats) -> Floats:
    """max |x| of each block, (n, 1); NaN is ignored."""
    largest: Floats = np.fmax.reduce(np.abs(x), axis=1, keepdims=True, initial=0)
    return largest


def round_half_away(x: Floats) -> Floats:
    """C's roundf: half goes away from zero."""
    whole = np.trunc(x)
    return whole + np.copysign((np.abs(x - whole) >= 0.5).astype(np.float32), x)


def low_byte(x: Floats) -> NDArray[np.int8]:
    """C's (int8_t) x of a float x, as compiled for x86: x becomes an int32, of which the low byte is kept."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.int32).astype(np.int8)


class Compiled(Codec):
    """A block codec that has a compiled run beside its definition."""

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        """Whether the compiled run computes, not the definition: `engine()` is "compiled"."""
        return engine() == "compiled"

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """As `Codec.encode`: by the compiled run of the rounding, or by `define_encode` with the engine "reference"."""
        if engine() == "reference":
            return self.define_encode(x, rounding)
        code = runs.CODES.get(f"{self.name} {rounding}", runs.CODES[self.name])
        x = np.ascontiguousarray(x)
        blocks = empty((len(x), self.block_bytes), np.uint8)
        _convert(runs.F32, x, code, blocks)
        return blocks

    def decode(self, blocks: Bytes) -> Floats:
        """As `Codec.decode`: by the compiled run, or by `define_decode` with the engine "reference"."""
        if engine() == "reference":
            return self.define_decode(blocks)
        blocks = np.ascontiguousarray(blocks)
        x = empty((len(blocks), self.block_size), np.float32)
        _convert(runs.CODES[self.name], blocks, runs.F32, x)
        return x

    def define_encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """The definition of `encode`, in NumPy."""
        raise NotImplementedError

    def define_decode(self, blocks: Bytes) -> Floats:
        """The definition of `decode`, in NumPy."""
        raise NotImplementedError


def _convert(src_code: int, src: NDArray[Any], dst_code: int, dst: NDArray[Any]) -> None:
    """Converts rows of src, one block each, to rows of dst."""
    streams = dst.nbytes > runs.CACHED
    of = runs.Convert(src_code, address(src), src.strides[0], dst_code, address(dst), dst.strides[0], streams)
    scratch = runs.STAGE_SIZE if streams else 0
    Work(runs.convert, of, len(src), max(src.nbytes, dst.nbytes), scratch=scratch).run()


def address(array: NDArray[np.generic]) -> int:
    """The address of an array's first element."""
    pointer: int = array.__array_interface__["data"][0]
    return pointer


class Q8_0(Compiled):
    """A float16 scale d, then 32 int8 quants (block_q8_0).

    encode  "reference": quantize_row_q8_0_ref; "simd": quantize_row_q8_0 of ggml-cpu/arch/x86/quants.c
    decode  dequantize_row_q8_0
    """

    name, block_size, block_bytes = "q8_0", 32, 34

    def define_encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 32 bytes: d = max |x| / 127 as float16, then x / d as int8; as quantize_row_q8_0(_ref)."""
        largest = largest_magnitude(x)
        d = largest / np.float32(127)
        with np.errstate(all="ignore"):
            if rounding == "reference":
                quants = low_byte(round_half_away(x * reciprocal(d)))
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
