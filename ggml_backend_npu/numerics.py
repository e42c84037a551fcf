"""Which arithmetic the device promises: the codec of each type as the bound ggml's CPU backend computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

import quant
from quant import Codec, Rounding


@dataclass
class Numerics:
    """rounding  the q8_0 rounding of the bound ggml's CPU; "simd" as on x86 until a ggml is bound
    fuses     whether its compiler made one step of a product and its sum (-ffp-contract), as q8_K shows
    bound     codecs that are the bound ggml's own functions, by type: those this project has no kernel for
    to_float  addresses of ggml's functions that dequantise rows of these types
    sgemm     the address of cblas_sgemm, of a library that computes in the calling thread; 0 where there is none
    """

    rounding: Rounding = "simd"
    fuses: bool = False
    bound: dict[str, Codec] = field(default_factory=dict)
    to_float: dict[str, int] = field(default_factory=dict)
    sgemm: int = 0

    def codec(self, type: str) -> Codec:
        """The codec that a node's tensor of `type` goes through."""
        return self.bound.get(type) or quant.codec(type)


NUMERICS = Numerics()
