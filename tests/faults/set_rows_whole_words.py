"""SET_ROWS that leaves out the last elements of a row: a loop over whole words of 48."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    kept = dst.view()[:, :, ids.view().reshape(-1)].copy()
    OWN["SET_ROWS"].define(dst, src, ids)
    done = dst.ne[0] // 48 * 48
    dst.view()[:, :, ids.view().reshape(-1), done:] = kept[..., done:]
