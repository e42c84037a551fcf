"""GET_ROWS that reads its ids as if they were contiguous."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    nb = (4, 4 * ids.ne[0], 4 * ids.ne[0] * ids.ne[1], 4 * ids.n_elements)
    OWN["GET_ROWS"].define(dst, src, replace(ids, nb=nb))
