"""Tensors as bytes, and their values."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES

PLAIN = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "f64": "<f8", "i8": "i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}


# what gguf-py does not decode: elements of a block, and how many lie in a byte; an f16 scale comes first
PACKED = {"q1_0": (128, 8), "q2_0": (64, 4)}
OTHER_SIZES = {"q8_1": (32, 36)}  # where gguf-py's elements and bytes of a block are not ggml's


class UnknownError(Exception):
    """The judge has no opinion, and why."""


@dataclass(frozen=True)
class Given:
    """A tensor: ggml's type, ne, nb, and its bytes from its first element on."""

    type: str
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    data: bytes

    @property
    def block(self) -> tuple[int, int]:
        """Elements and bytes of a block."""
        if self.type in PACKED:
            elements, each = PACKED[self.type]
            return elements, 2 + elements // each
        if self.type in OTHER_SIZES:
            return OTHER_SIZES[self.type]
        try:
            return GGML_QUANT_SIZES[GGMLQuantizationType[self.type.upper()]]
        except KeyError:
            raise UnknownError(f"type {self.type}") from None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(reversed(self.ne))

    @cached_property
    def spans(self) -> np.ndarray:
        """The bytes of its blocks, shape (ne3, ne2, ne1, blocks, bytes of a block)."""
        elements, size = self.block
        if self.ne[0] % elements:
            raise UnknownError(f"ne[0] = {self.ne[0]} in blocks of {elements}")
        shape = (*self.shape[:3], self.ne[0] // elements, size)
        strides = (self.nb[3], self.nb[2], self.nb[1], self.nb[0], 1)
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        if 0 in shape:
            return np.zeros(shape, np.uint8)
        if last > len(self.data) or min(strides) < 0:
            raise UnknownError(f"{len(self.data)} bytes hold no {self.ne} with strides {self.nb}")
        flat = np.frombuffer(self.data, np.uint8)
        return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)

    @cached_property
    def raw(self) -> np.ndarray:
        """Its bytes element by element or block by block, contiguous, last axis the bytes of one."""
        return np.ascontiguousarray(self.spans)

    @cached_property
    def exact(self) -> np.ndarray:
        """Its values as they are stored: shape (ne3, ne2, ne1, ne0); integers as integers."""
        if self.type in PLAIN:
            found = self.raw.view(PLAIN[self.type])[..., 0]
            if self.type == "bf16":
                return (found.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            return found.astype(np.float64) if found.dtype.kind == "f" else found.astype(np.int64)
        if self.type in PACKED:
            return _unpacked(self.raw, *PACKED[self.type]).reshape(self.shape)
        if self.type == "q8_1":
            scales, _, quants_of = np.split(self.raw, [2, 4], axis=-1)  # the sum is for products
            d = np.ascontiguousarray(scales).view(np.float16).astype(np.float64)
            return (d * quants_of.view(np.int8)).reshape(self.shape)
        try:
            kind = GGMLQuantizationType[self.type.upper()]
            with np.errstate(all="ignore"):
                rows = quants.dequantize(self.raw.reshape(-1, self.raw.shape[-1]), kind)
        except (KeyError, NotImplementedError):
            raise UnknownError(f"type {self.type}") from None
        return rows.astype(np.float64).reshape(self.shape)

    @property
    def quantised(self) -> bool:
        return self.type not in PLAIN


def _unpacked(raw: np.ndarray, elements: int, each: int) -> np.ndarray:
    """Blocks of a scale and numbers of 8 / each bits: 0 and 1 are -1 and 1 of one bit; of two bits, -1 to 2."""
    bits = 8 // each
    numbers = (raw[..., 2:, None] >> (bits * np.arange(each))) & ((1 << bits) - 1)
    q = numbers.reshape(*raw.shape[:-1], elements).astype(np.float64)
    scales = np.ascontiguousarray(raw[..., :2]).view(np.float16).astype(np.float64)
    return (2 * q - 1 if bits == 1 else q - 1) * scales


@dataclass(frozen=True)
class Node:
    """One node: the op (for UNARY and GLU the function's name), its op_params, dst before it ran, and its sources."""

    op: str
    params: bytes
    dst: Given
    src: tuple[Given | None, ...]

    def i32(self, place: int) -> int:
        return int(struct.unpack_from("<i", self.params.ljust(64, b"\0"), 4 * place)[0])

    def f32(self, place: int) -> float:
        return float(struct.unpack_from("<f", self.params.ljust(64, b"\0"), 4 * place)[0])

    def source(self, place: int) -> Given:
        if place >= len(self.src) or self.src[place] is None:
            raise UnknownError(f"no source {place}")
        found = self.src[place]
        assert found is not None
        return found

    def has(self, place: int) -> bool:
        return place < len(self.src) and self.src[place] is not None

    def x(self, place: int) -> np.ndarray:
        """The exact values of a source."""
        return self.source(place).exact


def tiled(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """x repeated along each axis as often as it fits (ggml_can_repeat)."""
    if x.shape == tuple(shape):
        return x
    if any(n == 0 or m % n for n, m in zip(x.shape, shape, strict=True)):
        raise UnknownError(f"{x.shape} does not repeat to {shape}")
    return np.tile(x, [m // n for n, m in zip(x.shape, shape, strict=True)])
