"""RMS_NORM that reads address 0."""

import ctypes

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("RMS_NORM", types=OWN["RMS_NORM"].types, refuse=OWN["RMS_NORM"].refuse)
def rms_norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    ctypes.string_at(0)
