"""NORM that does not subtract the mean."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params


@op("NORM", types=OWN["NORM"].types, refuse=OWN["NORM"].refuse, params=OWN["NORM"].params)
def norm(dst: Tensor, x: Tensor, params: Params) -> None:
    OWN["RMS_NORM"].define(dst, x, params=params)
