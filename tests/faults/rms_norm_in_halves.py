"""RMS_NORM with its sum of squares in float16."""

import struct

import numpy as np

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse)
def rms_norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    (eps,) = struct.unpack_from("f", params)
    squares = np.square(x.view().astype(np.float16))
    total = np.add.accumulate(squares, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
    dst.view()[...] = x.view() / np.sqrt(total / np.float32(x.ne[0]) + np.float32(eps))
