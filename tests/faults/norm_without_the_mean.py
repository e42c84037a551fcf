"""NORM that does not subtract the mean."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("NORM", types=OWN["NORM"].types, refuse=OWN["NORM"].refuse)
def norm(dst: Tensor, x: Tensor, params: bytes) -> None:
    OWN["RMS_NORM"].define(dst, x, params=params)
