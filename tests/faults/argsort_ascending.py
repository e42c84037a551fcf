"""ARGSORT in the other order."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ARGSORT", types=OWN["ARGSORT"].types, refuse=OWN["ARGSORT"].refuse)
def argsort(dst: Tensor, x: Tensor, params: bytes) -> None:
    (order,) = struct.unpack_from("i", params)
    OWN["ARGSORT"].define(dst, x, params=struct.pack("i", 1 - order) + params[4:])
