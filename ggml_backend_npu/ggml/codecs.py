"""Codecs that call the bound ggml's own functions, and those of our codecs that agree with ggml's CPU backend.

Types that this project has no kernel for (the K and IQ quants, mxfp4, ...) go through the type traits of the very ggml
that runs the graph: exact by construction, on every processor, and also for types newer than any package. `quant` has
its long tail of types from here, by an entry point.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from types import MappingProxyType

import numpy as np

import quant
from ggml_backend_npu.ggml import float16, lib, structs
from ggml_backend_npu.ggml.lib import Ggml, TypeInfo
from ggml_backend_npu.ggml.numerics import PLAIN, Numerics, spread
from quant.blocks import compiled_types
from quant.codec import ROUNDINGS, Bytes, Codec, Floats, Rounding


class Bound(Codec):
    """A codec of ggml's: to_float of ggml_get_type_traits, from_float of ggml_get_type_traits_cpu."""

    provider = "ggml"

    def __init__(self, ggml: Ggml, info: TypeInfo) -> None:
        self.name, self.block_size, self.block_bytes = info.name, info.block_size, info.block_bytes
        to_float = ggml.ggml_get_type_traits(info.number).contents.to_float
        self.to_float_at: int = to_float or 0
        from_float = ggml.ggml_get_type_traits_cpu(info.number).contents.from_float
        self._to_float = structs.RowFunction(to_float) if to_float else None
        self._from_float = structs.RowFunction(from_float) if from_float else None

    @property
    def _of_quant(self) -> Codec:
        """The type's codec in `quant`; one that can do nothing for a type that is not there."""
        if self.name in quant.type_names():
            return quant.codec(self.name)
        nothing = Codec()
        nothing.name = self.name
        return nothing

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Quantises x, (n, block_size) float32, to (n, block_bytes) bytes by from_float.

        Without a from_float it does what the codec of `quant` does.
        """
        if self._from_float is None:
            return self._of_quant.encode(x, rounding)
        x = np.ascontiguousarray(x)
        blocks = np.zeros((len(x), self.block_bytes), np.uint8)
        self._from_float(_pointer(x), _pointer(blocks), x.size)
        return blocks

    def decode(self, blocks: Bytes) -> Floats:
        """Dequantises blocks, (n, block_bytes) bytes, to (n, block_size) float32 by to_float.

        Without a to_float it does what the codec of `quant` does.
        """
        if self._to_float is None:
            return self._of_quant.decode(blocks)
        blocks = np.ascontiguousarray(blocks)
        x = np.empty((len(blocks), self.block_size), np.float32)
        self._to_float(_pointer(blocks), _pointer(x), x.size)
        return x


class OfFiles(Bound):
    """A codec of ggml's as model files are made: to_float of ggml_get_type_traits, and ggml_quantize_chunk."""

    def __init__(self, ggml: Ggml, info: TypeInfo) -> None:
        super().__init__(ggml, info)
        self._quantize = partial(ggml.ggml_quantize_chunk, info.number)
        self._needs_importance = ggml.ggml_quantize_requires_imatrix(info.number)

    def encode(self, x: Floats, rounding: Rounding) -> Bytes:
        """Quantises x, (n, block_size) float32, to (n, block_bytes) bytes, as one row of ggml_quantize_chunk: only so
        each block has an importance matrix of its own, x ** 2. A type that needs none has none."""
        x = np.ascontiguousarray(x)
        blocks = np.zeros((len(x), self.block_bytes), np.uint8)
        importance = _pointer(np.square(x)) if self._needs_importance else None
        if x.size:  # ggml divides by the length of a row
            self._quantize(_pointer(x), _pointer(blocks), 0, 1, x.size, importance)
        return blocks


def _pointer(array: Bytes | Floats) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


@cache
def of_files(name: str) -> Codec:
    """The codec of model files of a type, by the ggml of this process when it is first asked for. That ggml's private
    layouts are not read. Raises UnknownGgmlError if there is none, or it lacks the type."""
    ggml = lib.unchecked()
    for info in ggml.types.values():
        if info.name == name:
            return OfFiles(ggml, info)
    raise lib.UnknownGgmlError(f"ggml {ggml.version} has no type {name}")


def _probe() -> Floats:
    """Blocks on which the roundings differ: exact ties, values next to a tie, and values of every scale."""
    ties = np.arange(-127, 129, dtype=np.float32).reshape(-1, 32) / 2
    ties[:, 0] = 127
    largest = np.linspace(1, 2, 512, dtype=np.float32)[:, None]
    nearly = (np.arange(32, dtype=np.float32) % 15 - 7.5) * (largest / 8) * (1 - np.arange(1, 33) % 9 * 2.0**-23)
    halfway = (np.arange(32, dtype=np.float32) + np.float32(0.5)) * (largest / np.float32(127))
    nearly[:, 0] = halfway[:, 0] = largest[:, 0]
    values = spread(512 * 32).reshape(512, 32)
    return np.concatenate(
        [ties, nearly.astype(np.float32), halfway, values * np.logspace(-30, 30, 512, dtype=np.float32)[:, None]]
    )


def _fuses(codec: Bound) -> bool:
    """Whether this ggml's quantize_row_q8_K multiplies and adds in one step, as compilers may (-ffp-contract): products
    next to a half show it."""
    largest = np.linspace(1, 2, 64, dtype=np.float32)[:, None]
    x = ((np.arange(256, dtype=np.float32) - 128) + np.float32(0.5)) * (largest / np.float32(127))
    x[:, 0], x[:, 255] = largest[:, 0], 0
    return not np.array_equal(codec.encode(x, "reference"), quant.codec("q8_K").encode(x, "reference"))


@cache
def bound() -> Numerics:
    """The numerics of the CPU backend of this process's ggml; those of `quant` alone where that ggml is not known.

    Where it rounds q8_0 or q4_0 in a way that `quant` does not have, as a q4_0 compiled for FMA does, its own function
    encodes.
    """
    try:
        ggml = lib.ggml()
    except lib.UnknownGgmlError:
        return PLAIN
    ggml.ggml_cpu_init()
    codecs = {info.name: Bound(ggml, info) for info in ggml.types.values()}
    found: dict[str, Codec] = {
        name: codec
        for name, codec in codecs.items()
        if name in quant.type_names() and quant.codec(name).is_quantized and quant.codec(name).run is None
    }
    to_float = {name: codecs[name].to_float_at for name in found}
    rounding = PLAIN.rounding
    probe = _probe()
    for name in codecs.keys() & compiled_types():
        cpu = codecs[name].encode(probe, "reference")
        agreeing = [r for r in ROUNDINGS if np.array_equal(cpu, quant.codec(name).encode(probe, r))]
        if not agreeing:
            found[name] = codecs[name]
        elif name == "q8_0":
            rounding = agreeing[0]
    return Numerics(
        rounding, _fuses(codecs["q8_K"]), ggml.contracts, MappingProxyType(found), MappingProxyType(to_float),
        has_blas=True, halves=float16.step(ggml), dots_in_halves=float16.adds(ggml, 1),
        blocks_in_halves=float16.adds(ggml, 8),
    )  # fmt: skip
