"""SUB with its sources swapped."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SUB", types=OWN["SUB"].types, refuse=OWN["SUB"].refuse)
def sub(dst: Tensor, a: Tensor, b: Tensor) -> None:
    dst.view()[...] = b.view() - a.view()
