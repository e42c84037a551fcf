"""RMS_NORM with an eps that is 1e-6 too large."""

import struct

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse)
def rms_norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    (eps,) = struct.unpack_from("f", params)
    OWN["RMS_NORM"].define(dst, x, params=struct.pack("f", eps + 1e-6) + params[4:])
