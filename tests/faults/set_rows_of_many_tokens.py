"""SET_ROWS that writes nothing where there is one token."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    if src.ne[1] > 1:
        OWN["SET_ROWS"].define(dst, src, ids)
