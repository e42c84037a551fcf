"""The arithmetic that a backend promises: each type's codec as the bound ggml's CPU backend computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

import quant
from ggml_backend_npu.ggml import blas
from quant import Codec, Rounding


def spread(count: int) -> NDArray[np.float32]:
    """Numbers between -3 and 3 without a pattern, to tell an arithmetic by. numpy.random, which has better ones, takes
    10 ms to load."""
    found: NDArray[np.float32] = (np.arange(count) * 0.6180339887 % 1 * 6 - 3).astype(np.float32)
    return found


@dataclass(frozen=True)
class Numerics:
    """The arithmetic of one backend.

    rounding   the q8_0 rounding of the bound ggml's CPU; "simd", as on x86, where none is bound
    fuses      whether q8_K rounds a product once, to a whole number, and not to float32 first
    halves     of how many elements at a time the CPU multiplies and adds float16 as float16, rounded once, in the sums
               of attention, as with AVX512-FP16 and NEON; 0: it does so in float32
    contracts  whether ggml's compiler fused a product and its sum (-ffp-contract) where one C expression has both
    bound      codecs that are the bound ggml's own functions, by type: for types that this project has no kernel for
    to_float   addresses of ggml's functions that dequantise rows of these types
    has_blas   whether there is a library of products of float32 that computes in the calling thread
    matmul     how weights are multiplied, see `ops.matmul`, and q, k and v, see `ops.attention`: "exact" or "fast"
    dots_in_halves    whether the CPU adds the products of its float16 dot products as float16, rounded once: in
                      MUL_MAT, convolutions and the scores of attention
    blocks_in_halves  the same of the blocks of float16 rows and columns that it multiplies
    """

    rounding: Rounding = "simd"
    fuses: bool = False
    contracts: bool = True
    bound: Mapping[str, Codec] = field(default_factory=lambda: MappingProxyType({}))
    to_float: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    has_blas: bool = False
    halves: int = 0
    matmul: str = "fast"
    dots_in_halves: bool = False
    blocks_in_halves: bool = False

    @property
    def sgemm(self) -> int:
        """The address of cblas_sgemm; 0 where there is none. The first who asks loads the library: many models need
        none of it."""
        return blas.sgemm() if self.has_blas else 0

    def codec(self, type: str) -> Codec:
        """The codec for a node's tensor of a type: ggml's own where it is bound, else that of `quant`."""
        return self.bound.get(type) or quant.codec(type)


PLAIN = Numerics()  # of `quant` alone
