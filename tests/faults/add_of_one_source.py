"""ADD of one source too few."""

from ggml_backend_npu import Tensor, op


@op("ADD")
def add(dst: Tensor, a: Tensor) -> None:
    dst.view()[...] = a.view()
