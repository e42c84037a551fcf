"""aclnnGetRows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.documents.aclnn.executors import (
    AclOpExecutor,
    Bound,
    FirstPhase,
    first_phase,
    nothing,
    second_phase,
)
from ggml_backend_npu.documents.aclnn.moves import compiled_move, reference_numerics, with_copies
from ggml_backend_npu.documents.aclnn.operands import (
    BITS,
    BLOCKS,
    TYPES,
    Operand,
    Tensors,
    group_size,
    groups_of,
    operand_of,
    require_apart,
    require_no_scale,
    require_writable,
)
from ggml_backend_npu.documents.aclnn.refusals import RefusedError, invalid, require
from ggml_backend_npu.documents.status import Status
from ggml_backend_npu.ops import movers
from ggml_backend_npu.ops.kernels import groups


def aclnnGetRowsGetWorkspaceSize(
    src: Tensors,
    indices: NDArray[np.int32],
    scale: NDArray[np.float32] | None,
    antiquantGroupSize: int,
    out: NDArray[Any],
) -> FirstPhase:
    """out[i, j, k, l] = float32(src[i, j, r, l]) with r = indices[0, i, j, k]; quants times their scale.

    src      (a, b, c, d) of float32, float16, int32, int8, int4, q8_0 or q4_0; any strides
    indices  int32 (1, a, b, x) or (a, b, x), each from 0 to c - 1; any strides
    scale    float32 (a, b, c, d / group size): scale[i, j, r, l // group size] belongs to src[i, j, r, l]. Needed for
             int8 and int4, None for q8_0 and q4_0, ignored for other types
    antiquantGroupSize  elements of a row that share a scale: divides d; 0: one scale per row. 32 or 0 for q8_0 and
             q4_0, ignored for other types
    out      float32 (a, b, x, d), any strides under which no two elements overlap; no bytes of the other tensors.
             int32, bit for bit, where src is int32

    Returns (status, 0, executor for `aclnnGetRows`); 161001 where src, indices or out is None, 161002 for any other
    argument that is not as above. An int32 beyond 2**24 is rounded to even.

    Source: GET_ROWS of the requirement; ggml_compute_forward_get_rows.
    """
    return first_phase("aclnnGetRows", lambda: _get_rows(src, indices, scale, antiquantGroupSize, out))


def aclnnGetRows(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnGetRowsGetWorkspaceSize` checked; writes `out`.

    Returns 361001 where an index was changed since and names no row now: nothing is written then, and the executor
    stays valid; 161001 where executor is None, or workspace is None with a size; 161002 where the executor was made for
    another call, is used or destroyed.
    """
    return second_phase("aclnnGetRows", workspace, workspaceSize, executor)


def _get_rows(src: Any, indices: Any, scale: Any, size: Any, out: Any) -> Bound:
    source = operand_of("src", src, TYPES)
    ids = operand_of("indices", indices, ("i32",), ranks=(4, 3))
    target = operand_of("out", out, ("f32", "i32") if source.type == "i32" else ("f32",))
    a, b, n_rows, d = source.shape
    x = ids.shape[-1]
    require(
        ids.shape in ((1, a, b, x), (a, b, x)),
        f"indices has shape {ids.shape}: must be (1, {a}, {b}, x) for src of shape {source.shape}",
    )
    require(
        target.shape == (a, b, x, d),
        f"out has shape {target.shape}: must be {(a, b, x, d)} for src of shape {source.shape}, {x} indices a matrix",
    )
    inputs = [source, ids]
    if source.type in BITS:
        quants, scales = groups_of(source, scale, group_size(size, source))
        inputs.append(scales)
    elif source.type in BLOCKS:
        require_no_scale(source, scale, size)
    require_writable(target)
    require_apart(target, *inputs)
    changed = partial(_bad_index, ids, n_rows)
    bad = changed()
    if bad is not None:
        raise RefusedError(invalid(bad))
    if target.size == 0:
        return nothing, changed
    if source.type in BITS:
        return with_copies(groups.bind_dequantize(target.tensor, quants, ids.tensor), inputs, target), changed
    move = None
    if source.type not in BLOCKS or target.tensor.has_contiguous_rows():
        move = compiled_move(target.tensor, source.tensor, src_ids=ids.tensor)
    move = move or partial(
        movers.get_rows.define, target.tensor, source.tensor, ids.tensor, numerics=reference_numerics()
    )
    return with_copies(move, inputs, target), changed


def _bad_index(ids: Operand, n_rows: int) -> str | None:
    """What is wrong with the first index that names no row; None where all name one."""
    rows = ids.view()
    rows = rows[0] if rows.ndim == 4 else rows
    if rows.size == 0 or (rows.min() >= 0 and rows.max() < n_rows):
        return None
    i, j, k = (int(index) for index in np.unravel_index(((rows < 0) | (rows >= n_rows)).argmax(), rows.shape))
    return (
        f"indices has {rows[i, j, k]} at [{i}, {j}, {k}] of (a, b, x): must be 0 or more and below src's {n_rows} rows"
    )
