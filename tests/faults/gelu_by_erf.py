"""GELU by the error function in place of tanh."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GELU", types=OWN["GELU"].types, refuse=OWN["GELU"].refuse)
def gelu(dst: Tensor, x: Tensor) -> None:
    OWN["GELU_ERF"].define(dst, x)
