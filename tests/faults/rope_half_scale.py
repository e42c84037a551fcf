"""ROPE with half its freq_scale."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    OWN["ROPE"].define(dst, x, positions, factors, params=params[:24] + struct.pack("f", 0.5) + params[28:])
