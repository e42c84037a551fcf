"""Faults of MUL_MAT_ID, ADD_ID, ARGSORT and SUM_ROWS: what chooses experts and what they compute."""

from dataclasses import replace

import numpy as np
from kit.faults import fault

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.routing import Argsort


@fault("ADD_ID", model="gpt-oss", never=("permutes",))
def add_id_next_expert(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> None:
    """ADD_ID with ids off by one."""
    OWN["ADD_ID"].define(dst, a, b, Tensor.of((ids.view() + 1) % b.ne[1]))


@fault("MUL_MAT_ID", model="moe", never=("permutes",))
def mul_mat_id_next_expert(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """MUL_MAT_ID with ids off by one."""
    OWN["MUL_MAT_ID"].define(dst, a, b, Tensor.of((ids.view() + 1) % a.ne[2]), numerics)


@fault("MUL_MAT_ID", model="moe", never=("permutes",))
def mul_mat_id_of_ids_in_a_row(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """MUL_MAT_ID that reads its ids as if they were contiguous."""
    nb = (4, 4 * ids.ne[0], 4 * ids.n_elements, 4 * ids.n_elements)
    OWN["MUL_MAT_ID"].define(dst, a, b, replace(ids, nb=nb), numerics)


@fault("MUL_MAT_ID", model="moe", never=("permutes",))
def mul_mat_id_half_an_expert(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """MUL_MAT_ID with half the stride between experts."""
    OWN["MUL_MAT_ID"].define(dst, replace(a, nb=(*a.nb[:2], a.nb[2] // 2, a.nb[3])), b, ids, numerics)


@fault("ARGSORT", model="moe")
def argsort_ascending(dst: Tensor, x: Tensor, params: Argsort) -> None:
    """ARGSORT in the other order."""
    OWN["ARGSORT"].define(dst, x, params=replace(params, order=1 - params.order))


@fault("SUM_ROWS", model="moe", says="gives nothing but numbers of f16")
def sum_rows_in_halves(dst: Tensor, x: Tensor) -> None:
    """SUM_ROWS in float16."""
    dst.view()[...] = x.view().astype(np.float16).sum(-1, keepdims=True, dtype=np.float16)
