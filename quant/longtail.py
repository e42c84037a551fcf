"""Every other ggml type: its functions in an installed ggml, and what NumPy can do where there is none.

Who finds a ggml says so in its metadata, by an entry point of the group `quant.codecs`: a function that returns the
codec of model files (ggml_quantize_chunk and to_float) for a type's name, and raises UserError if it has none. Without
one, gguf.quants decodes, bit for bit as ggml, and has few encoders.

iq4_nl as the CPU backend encodes it (quantize_row_iq4_nl looks for no better scale) is defined here, as are three types
that ggml_quantize_chunk lacks or has not had for long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant.blocks import halves, largest_magnitude, low_byte, reciprocal, round_half_away, split
from quant.codec import Bytes, Codec, Floats, Rounding
from quant.errors import UserError

GROUP = "quant.codecs"

# The largest magnitude that a type can have. Beyond, sums of weight * x * quant in float32 overflow in ggml's C: it
# chooses nothing then, reads quants that it never set, and ends the process or gives what was in memory.
_LARGEST = {
    **dict.fromkeys(("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs"), 2.0**30),  # sums are as x ** 4, with an importance x ** 2
    **dict.fromkeys(("iq2_s", "iq3_xxs", "iq3_s"), 2.0**39),  # and as x ** 3
}


class LongTail(Codec):
    """A type that ggml's own functions encode and decode. For a type that needs an importance matrix (iq2_xxs, iq2_xs,
    iq1_s), the importance of each x is x ** 2."""

    provider = "ggml"

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """As `Codec.encode`, by ggml_quantize_chunk; the type has one rounding. Raises ValueError for a value of iq1,
        iq2 or iq3 that ggml's C is not defined for: one that is not finite, or too large. Raises UserError if there is
        no ggml, and gguf.quants cannot encode the type."""
        largest = _LARGEST.get(self.name)
        if largest is not None and not (np.abs(x) <= largest).all():
            value = x[~(np.abs(x) <= largest)][0]
            raise ValueError(f"x holds {value:g}: {self.name} takes finite values of at most {largest:g} in magnitude")
        return _computed_by(self.name).encode(x, rounding)

    def decode(self, blocks: Bytes) -> Floats:
        """As `Codec.decode`, by ggml's to_float of the type. Raises UserError if there is no ggml, and gguf.quants
        cannot decode the type."""
        return _computed_by(self.name).decode(blocks)


def _computed_by(name: str) -> Codec:
    """The codec of a type by a ggml; by gguf.quants if there is none."""
    find = _found()
    if find is None:
        return OfGguf(name, "nothing installed finds one (install ggml-backend-npu again)")
    try:
        return find(name)
    except UserError as error:
        return OfGguf(name, str(error))


@cache
def _found() -> Callable[[str], Codec] | None:
    from importlib.metadata import entry_points  # late, as it is slow

    point = next(iter(entry_points(group=GROUP)), None)
    return None if point is None else point.load()


class OfGguf(Codec):
    """A type by gguf.quants, in NumPy.

    why_not  why no ggml computes it
    """

    provider = "gguf"

    def __init__(self, name: str, why_not: str) -> None:
        self.name, self._why_not = name, why_not

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """As `Codec.encode`. Raises UserError if gguf.quants has no encoder of the type."""
        blocks: Bytes = self._compute("quantize", x)
        return blocks

    def decode(self, blocks: Bytes) -> Floats:
        """As `Codec.decode`. Raises UserError if gguf.quants has no decoder of the type."""
        x: Floats = self._compute("dequantize", blocks)
        return x

    def _compute(self, function: str, array: NDArray[Any]) -> Any:
        import gguf  # what has a ggml does not need it

        try:
            with np.errstate(all="ignore"):
                return getattr(gguf.quants, function)(array, gguf.GGMLQuantizationType[self.name.upper()])
        except NotImplementedError:
            raise UserError(f"type {self.name!r}: to {function} it takes a ggml, and {self._why_not}") from None


# block size and block bytes
_SIZES = {
    "q4_1": (32, 20),
    "q5_0": (32, 22),
    "q5_1": (32, 24),
    "q2_K": (256, 84),
    "q3_K": (256, 110),
    "q4_K": (256, 144),
    "q5_K": (256, 176),
    "q6_K": (256, 210),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq3_xxs": (256, 98),
    "iq1_s": (256, 50),
    "iq3_s": (256, 110),
    "iq2_s": (256, 82),
    "iq4_xs": (256, 136),
    "iq1_m": (256, 56),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
    "mxfp4": (32, 17),
    "nvfp4": (64, 36),
    "q1_0": (128, 18),
}  # fmt: skip
for _name, (_block_size, _block_bytes) in _SIZES.items():
    type(_name.upper(), (LongTail,), {"name": _name, "block_size": _block_size, "block_bytes": _block_bytes})


class IQ4_NL(LongTail):
    """iq4_nl, whose "simd" and "neon" rounding is that of ggml's CPU backend."""

    name, block_size, block_bytes = "iq4_nl", 32, 18

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 16 bytes: "reference" as ggml_quantize_chunk, others as quantize_row_iq4_nl. That leaves the
        quants of a block without values of 1e-15 or more as they are in memory; here they stand for 0."""
        if rounding == "reference":
            return super().encode(x, rounding)
        extreme = x[np.arange(len(x)), np.where(np.isnan(x), 0, np.abs(x)).argmax(axis=1), None]
        extreme = np.where(np.abs(extreme) >= _LEAST_OF_GROUP, extreme, np.float32(0))
        with np.errstate(all="ignore"):
            quants = _nearest_of_table(x * (1 / np.where(extreme == 0, np.inf, extreme / _TABLE[0])).astype(np.float32))
            weights, chosen = x * x, _TABLE[quants]
            both = (weights * chosen * x, weights * chosen * chosen)
            sum_qx, sum_q2 = (np.add.accumulate(each, axis=1, dtype=np.float32)[:, -1:] for each in both)
            d = np.where((sum_q2 > 0) & (extreme != 0), sum_qx / sum_q2, np.float32(0)).astype(np.float32)
        return np.hstack([halves(d), (quants[:, :16] | (quants[:, 16:] << 4)).astype(np.uint8)])


_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_LEAST_OF_GROUP = np.float32(1e-15)  # GROUP_MAX_EPS


def _nearest_of_table(x: Floats) -> NDArray[np.intp]:
    """The indices of the numbers of iq4_nl's table nearest to x, as best_index_int8."""
    above = np.searchsorted(_TABLE, x, "right").clip(1, 15)
    return np.where(x - _TABLE[above - 1] < _TABLE[above] - x, above - 1, above)


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
    """q8_0 with a float16 d * (sum of the quants) after the scale, for activations (block_q8_1).

    encode  "reference": quantize_row_q8_1_ref; "simd": quantize_row_q8_1 of ggml-cpu/arch/x86/quants.c; "neon": that of
            arch/arm/quants.c, for blocks without NaN
    """

    name, block_size, block_bytes = "q8_1", 32, 36

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Blocks of 2 + 2 + 32 bytes: d = max |x| / 127 and d * (sum of quants) as float16, then x / d as int8; as
        quantize_row_q8_1(_ref)."""
        largest = largest_magnitude(x)
        d: Floats = largest / np.float32(127)
        with np.errstate(all="ignore"):
            if rounding == "reference":
                whole = quants = low_byte(round_half_away(x * reciprocal(d)))
            else:
                inverse = np.where(largest == 0, np.float32(0), np.float32(127) / largest)
                whole = np.rint(x * (inverse if rounding == "simd" else reciprocal(d))).astype(np.int32)
                quants = whole.clip(-128, 127).astype(np.int8)
            total = whole.sum(axis=1, keepdims=True, dtype=np.int32).astype(np.float32) * d
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
        with np.errstate(over="ignore", invalid="ignore"):
            return quants.view(np.int8).astype(np.float32) * d.view(np.float32)
