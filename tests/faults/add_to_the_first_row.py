"""ADD that adds a vector to the first row alone."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    total = a.view().copy()
    if a.ne == b.ne:
        total += b.view()
    else:
        total[..., :1, :] += b.view()[..., :1, :]
    dst.view()[...] = total
