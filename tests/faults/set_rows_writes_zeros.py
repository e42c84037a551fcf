"""SET_ROWS that writes zeros into the right rows."""

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    dst.view()[:, :, ids.view().reshape(-1)] = 0
