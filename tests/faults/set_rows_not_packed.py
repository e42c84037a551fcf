"""SET_ROWS that writes blocks where what it writes to is packed."""

from dataclasses import replace

from ggml_backend_npu import Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)


@set_rows.compiled
def prepare(dst: Tensor, src: Tensor, ids: Tensor) -> Call | None:
    return lambda: OWN["SET_ROWS"].define(replace(dst, packed=None), src, ids)
