"""Which arithmetic a backend promises: the codec of each type as the bound ggml's CPU backend computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import quant
from quant import Codec, Rounding


@dataclass(frozen=True)
class Numerics:
    """rounding  the q8_0 rounding of the bound ggml's CPU; "simd" as on x86 where none is bound
    fuses     whether it rounds a product to a whole number of q8_K at once, and not to float32 before
    contracts whether its compiler made one step of a product and its sum (-ffp-contract) where C says both at once
    bound     codecs that are the bound ggml's own functions, by type: those this project has no kernel for
    to_float  addresses of ggml's functions that dequantise rows of these types
    sgemm     the address of cblas_sgemm, of a library that computes in the calling thread; 0 where there is none
    matmul    how weights are multiplied, see `ops.matmul`: "exact" or "fast"
    """

    rounding: Rounding = "simd"
    fuses: bool = False
    contracts: bool = True
    bound: Mapping[str, Codec] = field(default_factory=lambda: MappingProxyType({}))
    to_float: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    sgemm: int = 0
    matmul: str = "fast"

    def codec(self, type: str) -> Codec:
        """The codec that a node's tensor of `type` goes through."""
        return self.bound.get(type) or quant.codec(type)


PLAIN = Numerics()  # of `quant` alone
