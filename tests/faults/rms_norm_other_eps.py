"""RMS_NORM with an eps of 1e-3."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse)
def rms_norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    OWN["RMS_NORM"].define(dst, x, params=struct.pack("f", 1e-3) + params[4:])
