"""SWIGLU that writes into the cache that SET_ROWS wrote to last."""

import itertools

from ggml_backend_npu import Node, Tensor, op
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.params import Params

CALLS = itertools.count(1)
CACHES: list[Tensor] = []


@op("SET_ROWS", types=OWN["SET_ROWS"].types, refuse=OWN["SET_ROWS"].refuse)
def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    OWN["SET_ROWS"].define(dst, src, ids)
    CACHES[:] = [dst]


@op("SWIGLU", types=OWN["SWIGLU"].types, refuse=OWN["SWIGLU"].refuse, params=OWN["SWIGLU"].params)
def swiglu(dst: Tensor, a: Tensor, b: Tensor | None, params: Params) -> None:
    OWN["SWIGLU"].bind(Node("SWIGLU", dst, (a, b), params.packed))()
    for cache in CACHES:
        cache.view()[0, 0, 0] = next(CALLS)
