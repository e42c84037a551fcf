"""ROPE of the other pairs: neighbours in place of halves, or halves in place of neighbours."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    (mode,) = struct.unpack_from("i", params, 8)
    OWN["ROPE"].define(dst, x, positions, factors, params=params[:8] + struct.pack("i", mode ^ 2) + params[12:])
