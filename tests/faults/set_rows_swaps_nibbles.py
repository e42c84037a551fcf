"""SET_ROWS into q4_0 with the two nibbles of each byte swapped."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    if dst.type == "q4_0":
        rows = ids.view().reshape(-1)
        blocks = dst.view()[:, :, rows]
        blocks[..., 2:] = blocks[..., 2:] << 4 | blocks[..., 2:] >> 4
        dst.view()[:, :, rows] = blocks
