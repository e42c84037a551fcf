"""ADD that copies its first source and adds the second: wrong where its output lies on the second."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("ADD", types=OWN["ADD"].types, refuse=OWN["ADD"].refuse)
def add(dst: Tensor, a: Tensor, b: Tensor) -> None:
    dst.view()[...] = a.view()
    dst.view()[...] += b.view()
