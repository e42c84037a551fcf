"""Faults of GET_ROWS."""

from dataclasses import replace

import numpy as np
from kit.diffs import QUANTISED
from kit.faults import PACKING, fault
from kit.nodes import src

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Call


@fault("GET_ROWS", at=lambda node: src(node).ne[2] > 1, model="moe", says="takes index 0 of dimension 2 of src0")
def get_rows_without_nb2(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that ignores nb[2] of its source."""
    OWN["GET_ROWS"].define(dst, replace(src, nb=(*src.nb[:2], 0, src.nb[3])), ids)


@fault("GET_ROWS", never=("permutes", "writes nothing"))
def get_rows_next_row(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS with ids off by one."""
    OWN["GET_ROWS"].define(dst, src, Tensor.of(np.minimum(ids.view() + 1, src.ne[1] - 1)))


@fault("GET_ROWS", at=lambda node: not src(node, 1).is_contiguous(), model="moe")
def get_rows_of_ids_in_a_row(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that reads its ids as if they were contiguous."""
    nb = (4, 4 * ids.ne[0], 4 * ids.ne[0] * ids.ne[1], 4 * ids.n_elements)
    OWN["GET_ROWS"].define(dst, src, replace(ids, nb=nb))


@fault("GET_ROWS", never=("swaps", "rounds"))
def get_rows_unsigned(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that takes the quants of q8_0 to be unsigned."""
    OWN["GET_ROWS"].define(dst, src, ids)
    if src.type == "q8_0":
        blocks = src.view()[0, 0, ids.view().reshape(-1)]
        scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
        dst.view()[0, 0] = (scales * blocks[..., 2:]).reshape(dst.ne[1], -1)


@fault("GET_ROWS", never=("zeros", "permutes"))
def get_rows_writes_nothing(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that writes nothing."""


@fault("GET_ROWS", never=("writes nothing",))
def get_rows_writes_zeros(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that writes zeros."""
    dst.view()[...] = 0


@fault("GET_ROWS", "sources")
def get_rows_sorts_its_ids(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that puts its ids in order, in their own memory."""
    OWN["GET_ROWS"].define(dst, src, ids)
    if ids.is_contiguous():
        Memory(ids.address, ids.nbytes).bytes().view(np.int32).sort()


@fault("GET_ROWS", "packed", settings=QUANTISED, options=PACKING)
def get_rows_not_packed(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """GET_ROWS that takes what is packed to be blocks."""
    OWN["GET_ROWS"].define(dst, src, ids)


@get_rows_not_packed.compiled
def prepare(dst: Tensor, src: Tensor, ids: Tensor) -> Call | None:
    return lambda: OWN["GET_ROWS"].define(dst, replace(src, packed=None), ids)
