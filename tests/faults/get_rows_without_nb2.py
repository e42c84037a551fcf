"""GET_ROWS that ignores nb[2] of its source."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, replace(src, nb=(*src.nb[:2], 0, src.nb[3])), ids)
