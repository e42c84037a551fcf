"""CONT that puts the heads of its source in the wrong order."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("CONT", types=OWN["CONT"].types, refuse=OWN["CONT"].refuse)
def cont(dst: Tensor, src: Tensor) -> None:
    dst.view()[...] = src.view()[:, :, ::-1].reshape(dst.ne[::-1])
