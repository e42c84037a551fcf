"""GET_ROWS that takes what is packed to be blocks."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call


@op("GET_ROWS", types=OWN["GET_ROWS"].types, refuse=OWN["GET_ROWS"].refuse)
def get_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["GET_ROWS"].define(dst, src, ids)


@get_rows.compiled
def prepare(dst: Tensor, src: Tensor, ids: Tensor) -> Call | None:
    return lambda: OWN["GET_ROWS"].define(dst, replace(src, packed=None), ids)
