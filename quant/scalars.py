"""Types whose block is one element: floats and integers. They convert as ggml's CPU does (type_conversion_table)."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quant import conversions
from quant.codec import Bytes, Codec, Floats, Rounding


def quieted(x: Floats) -> Floats:
    """x with signalling NaNs made quiet, in place, as the processor's conversions do."""
    bits = x.view(np.uint32)
    bits[np.isnan(x)] |= np.uint32(0x0040_0000)
    return x


def without_payload(x: Floats) -> Floats:
    """x with every NaN made 7fc00000 or ffc00000: this is what remains of a NaN where ggml converts in plain C."""
    return np.where(np.isnan(x), np.copysign(np.float32(np.nan), x), x)


class Scalar(Codec):
    """A type that NumPy has: encode and decode are C casts."""

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """A block is one element: a C cast from float32 to the type."""
        assert self.dtype is not None
        with np.errstate(over="ignore", invalid="ignore"):
            return x.astype(self.dtype).view(np.uint8)

    def decode(self, blocks: Bytes) -> Floats:
        """A block is one element: a C cast from the type to float32."""
        assert self.dtype is not None
        return blocks.view(self.dtype).astype(np.float32)


class F32(Scalar):
    """GGML_TYPE_F32: encode and decode keep every bit."""

    name, block_bytes, dtype = "f32", 4, np.dtype(np.float32)
    run = conversions.F32


class F16(Scalar):
    """GGML_TYPE_F16 with ggml's from_float and to_float: nearest, ties to even, overflow to inf, subnormals kept. A NaN
    becomes 7e00 or fe00; with the rounding "simd" it keeps as much of its payload as fits, and is quiet."""

    name, block_bytes, dtype = "f16", 2, np.dtype(np.float16)
    run = conversions.F16

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """A block is the 2 bytes of one float16, as ggml_fp32_to_fp16_row; with "simd" as ggml_cpu_fp32_to_fp16 on x86
        with vectors (F16C)."""
        quiet = quieted(x.copy()) if rounding == "simd" else without_payload(x)
        with np.errstate(over="ignore"):
            return quiet.astype(np.float16).view(np.uint8)

    def decode(self, blocks: Bytes) -> Floats:
        """float16 -> float32, exact; a signalling NaN becomes quiet."""
        with np.errstate(invalid="ignore"):  # an ARM's conversion says that it met one
            return quieted(blocks.view(np.float16).astype(np.float32))


class BF16(Scalar):
    """GGML_TYPE_BF16: the upper half of a float32, nearest, ties to even, NaN made quiet (ggml_compute_fp32_to_bf16,
    ggml_compute_bf16_to_fp32)."""

    name, block_bytes = "bf16", 2
    run = conversions.BF16

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """ml_dtypes.bfloat16."""
        import ml_dtypes  # late: it takes 3 MB

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """A block is the 2 bytes of one bfloat16, as ggml_compute_fp32_to_bf16."""
        bits = np.ascontiguousarray(x).view(np.uint32)
        nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        quiet = (bits >> 16) | 64
        return np.where(np.isnan(x), quiet, nearest).astype(np.uint16).view(np.uint8)

    def decode(self, blocks: Bytes) -> Floats:
        """The 2 bytes become the upper half of a float32, as ggml_compute_bf16_to_fp32."""
        upper: NDArray[np.uint32] = blocks.view(np.uint16).astype(np.uint32)
        return (upper << 16).view(np.float32)


class F64(Scalar):
    """GGML_TYPE_F64: float64."""

    name, block_bytes, dtype = "f64", 8, np.dtype(np.float64)


class I8(Scalar):
    """GGML_TYPE_I8: int8."""

    name, block_bytes, dtype = "i8", 1, np.dtype(np.int8)


class I16(Scalar):
    """GGML_TYPE_I16: int16."""

    name, block_bytes, dtype = "i16", 2, np.dtype(np.int16)


class I32(Scalar):
    """GGML_TYPE_I32: int32."""

    name, block_bytes, dtype = "i32", 4, np.dtype(np.int32)
    run = conversions.I32


class I64(Scalar):
    """GGML_TYPE_I64: int64."""

    name, block_bytes, dtype = "i64", 8, np.dtype(np.int64)
