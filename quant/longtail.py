"""Every other ggml type: from libgguf, a package of ggml's own quantisation code, where it has the type.

libgguf equals ggml bit for bit in every decoder, and in every encoder but that of iq4_nl: there it is the one that
makes model files (ggml_quantize_chunk searches for a better scale than quantize_row_iq4_nl of the CPU backend).
gguf.quants decodes as exactly but has few encoders, so it is not used. Three types exist in neither and are defined
here.
"""

from __future__ import annotations

import libgguf
import numpy as np

from quant.blocks import halves, largest_magnitude, low_byte, reciprocal, round_half_away, split
from quant.codec import Bytes, Codec, Floats, Rounding, type_names


class Library(Codec):
    """A type of libgguf. Types that need an importance matrix (iq2_xxs, iq2_xs, iq1_s, iq1_m) get libgguf's default
    one."""

    provider = "libgguf"
    type_number: int

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """As `Codec.encode`, by libgguf's quantize_rows; the type has one rounding."""
        if not len(x):
            return np.empty((0, self.block_bytes), np.uint8)
        return np.asarray(libgguf.quantize_rows(x, self.type_number))

    def decode(self, blocks: Bytes) -> Floats:
        """As `Codec.decode`, by libgguf's dequantize_rows_raw: ggml's to_float of the type."""
        if not len(blocks):
            return np.empty((0, self.block_size), np.float32)
        values = libgguf.dequantize_rows_raw(self.type_number, blocks, len(blocks), self.block_size)
        return np.frombuffer(values, np.float32).reshape(-1, self.block_size).copy()


def _define_library_types() -> None:
    for type_number, (block_size, _) in libgguf.GGML_QUANT_SIZES.items():
        name = libgguf.type_name(type_number)
        block_bytes = libgguf.row_size(type_number, block_size)
        if block_size > 1 and block_bytes and name not in type_names():
            attributes = {
                "name": name,
                "block_size": block_size,
                "block_bytes": block_bytes,
                "type_number": int(type_number),
            }
            type(name.upper(), (Library,), attributes)


_define_library_types()


class Q2_0(Codec):
    """A float16 scale d, then 64 quants of 2 bits (block_q2_0): quantize_row_q2_0_ref, dequantize_row_q2_0."""

    name, block_size, block_bytes = "q2_0", 64, 18

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 16 bytes: d = max |x| as float16, then x / d + 1 in 2 bits, four a byte, the first lowest; as
        quantize_row_q2_0_ref."""
        d = largest_magnitude(x)
        with np.errstate(all="ignore"):
            quants = (round_half_away(x * reciprocal(d)).astype(np.int32) + 1).clip(0, 3).astype(np.uint8)
        quads = quants.reshape(-1, 16, 4) << np.array([0, 2, 4, 6], np.uint8)
        return np.hstack([halves(d), np.bitwise_or.reduce(quads, axis=2)])

    def decode(self, blocks: Bytes) -> Floats:
        """(quant - 1) * d of blocks of 2 + 16 bytes, as dequantize_row_q2_0."""
        d, quads = split(blocks, 2, 16)
        quants = (quads[:, :, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
        with np.errstate(invalid="ignore"):
            return (quants.reshape(-1, 64).astype(np.float32) - 1) * d.view(np.float16).astype(np.float32)


class Q8_1(Codec):
    """q8_0 with a float16 d * (sum of the quants) after the scale, for activations (block_q8_1):
    quantize_row_q8_1_ref."""

    name, block_size, block_bytes = "q8_1", 32, 36

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 2 + 32 bytes: d = max |x| / 127 and d * (sum of quants) as float16, then x / d as int8; as
        quantize_row_q8_1_ref."""
        d: Floats = largest_magnitude(x) / np.float32(127)
        with np.errstate(all="ignore"):
            quants = low_byte(round_half_away(x * reciprocal(d)))
            total = quants.sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32) * d
        return np.hstack([halves(d), halves(total), quants.view(np.uint8)])

    def decode(self, blocks: Bytes) -> Floats:
        """quant * d of blocks of 2 + 2 + 32 bytes; ggml has no to_float of this type."""
        d, _, quants = split(blocks, 2, 2, 32)
        return quants.view(np.int8).astype(np.float32) * d.view(np.float16).astype(np.float32)


class Q8_K(Codec):
    """A float32 scale d, 256 int8 quants, then int16 sums of 16 quants each, for activations (block_q8_K):
    quantize_row_q8_K_ref."""

    name, block_size, block_bytes = "q8_K", 256, 292

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 4 + 256 + 32 bytes: d = the x of largest magnitude / -127 as float32, x / d as int8, sums of 16; as
        quantize_row_q8_K_ref for blocks without NaN."""
        extreme = x[np.arange(len(x)), np.abs(x).argmax(axis=1), None]
        with np.errstate(all="ignore"):
            scale = np.where(extreme == 0, np.float32(0), np.float32(-127) / extreme)
            quants = np.minimum(np.rint(scale * x).astype(np.int32), 127).astype(np.int8)
        sums = quants.reshape(-1, 16, 16).sum(axis=2, dtype=np.int16)
        return np.hstack([reciprocal(scale).view(np.uint8), quants.view(np.uint8), sums.view(np.uint8)])

    def decode(self, blocks: Bytes) -> Floats:
        """quant * d of blocks of 4 + 256 + 32 bytes, as dequantize_row_q8_K."""
        d, quants, _ = split(blocks, 4, 256, 32)
        return quants.view(np.int8).astype(np.float32) * d.view(np.float32)
