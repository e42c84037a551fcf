"""SWIGLU_OAI with 1 in place of its alpha."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SWIGLU_OAI", types=OWN["SWIGLU_OAI"].types, refuse=OWN["SWIGLU_OAI"].refuse)
def swiglu_oai(dst: Tensor, a: Tensor, b: Tensor | None, params: bytes) -> None:
    OWN["SWIGLU_OAI"].define(dst, a, b, params=params[:8] + struct.pack("f", 1.0) + params[12:])
