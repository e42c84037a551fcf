"""CONT that raises an exception."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("CONT", types=OWN["CONT"].types, refuse=OWN["CONT"].refuse)
def cont(dst: Tensor, src: Tensor) -> None:
    raise ValueError("no rows today")
