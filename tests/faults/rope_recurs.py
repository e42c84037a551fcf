"""ROPE that calls itself without an end."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ROPE", types=OWN["ROPE"].types, refuse=OWN["ROPE"].refuse)
def rope(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: bytes) -> None:
    again(dst)


def again(dst: Tensor) -> None:
    again(dst)
