"""ROPE with a base of 500000."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    OWN["ROPE"].define(dst, x, positions, factors, params=params[:20] + struct.pack("f", 5e5) + params[24:])
