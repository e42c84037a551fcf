"""SET_ROWS that clears a row which no id names: a gap between those that it is to write."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    dst.view()[:, :, ids.view().max() + 7] = 1
