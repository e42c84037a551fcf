"""SCALE that ignores its factor and its bias."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SCALE", types=OWN["SCALE"].types, refuse=OWN["SCALE"].refuse)
def scale(dst: Tensor, x: Tensor, params: bytes) -> None:
    dst.view()[...] = x.view()
