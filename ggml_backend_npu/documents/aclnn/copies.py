"""aclnnCpy, aclnnDup."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.documents.aclnn.executors import (
    AclOpExecutor,
    Bound,
    Call,
    FirstPhase,
    first_phase,
    nothing,
    second_phase,
    unchanged,
)
from ggml_backend_npu.documents.aclnn.moves import compiled_move, reference_numerics, with_copies
from ggml_backend_npu.documents.aclnn.operands import (
    BITS,
    BLOCK,
    BLOCKS,
    QUANTISED,
    TYPES,
    Operand,
    Tensors,
    group_size,
    groups_of,
    operand_of,
    require_apart,
    require_no_scale,
    require_writable,
    same_view,
)
from ggml_backend_npu.documents.aclnn.refusals import require
from ggml_backend_npu.documents.status import Status
from ggml_backend_npu.ops import movers
from ggml_backend_npu.ops.kernels import groups

# which types a source is copied to
COPIES: dict[str, tuple[str, ...]] = {
    "f32": ("f32", "f16", "i32", *QUANTISED),
    "f16": ("f16", "f32", *QUANTISED),
    "i32": ("i32", "f32"),
    **{name: (name, "f32") for name in QUANTISED},
}


def aclnnCpyGetWorkspaceSize(
    self: Tensors, src: Tensors, scale: NDArray[np.float32] | None, antiquantGroupSize: int
) -> FirstPhase:
    """self = src, converted, element by element in logical order; shapes may differ where the element counts agree.

    self, src  (a, b, c, d) each, of float32, float16, int32, int8, int4, q8_0 or q4_0. src has any strides, self any
               under which no two elements overlap

               the same type                 bit for bit; of int8 and int4 only the quants
               float32 -> float16            nearest, ties to even; overflow to inf
               float32 -> int32              truncated
               float16, int32 -> float32     nearest, ties to even
               float32, float16 -> int8, int4, q8_0, q4_0  by groups, rounded as in ggml's reference functions
               int8, int4, q8_0, q4_0 -> float32           times their scale

    scale      float32 (a, b, c, d / group size), by rows of the int8 or int4 side. float -> int8, int4: an output, d of
               each group rounded to float16; int8, int4 -> float: an input. None where a side is q8_0 or q4_0;
               otherwise ignored
    antiquantGroupSize  elements of a row that share a scale. int8, int4: divides the rows of both sides; 0: one scale
               per row of that side; ignored where they are copied to themselves in the same shape. q8_0, q4_0: 32
               or 0, and the rows of both sides are whole blocks. Ignored for other types

    Returns (status, 0, executor for `aclnnCpy`); 161001 where self or src is None, 161002 for any other argument that
    is not as above, and where self and src share bytes; the same type in the same view is accepted, and nothing is
    done.

    Source: CPY of the requirement; ggml_compute_forward_dup, quantize_row_q8_0_ref, quantize_row_q4_0_ref.
    """
    return first_phase("aclnnCpy", lambda: _cpy(self, src, scale, antiquantGroupSize))


def aclnnCpy(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnCpyGetWorkspaceSize` checked; writes `self`, and `scale` where that is an output.

    Returns 161001 where executor is None, or workspace is None with a size; 161002 where the executor was made for
    another call, is used or destroyed.
    """
    return second_phase("aclnnCpy", workspace, workspaceSize, executor)


def aclnnDupGetWorkspaceSize(
    self: Tensors, src: Tensors, scale: NDArray[np.float32] | None, antiquantGroupSize: int
) -> FirstPhase:
    """self = src, bit for bit: `aclnnCpyGetWorkspaceSize`, but 161002 where self does not have src's type and shape.

    Returns (status, 0, executor for `aclnnDup`). Source: DUP of the requirement; ggml_dup.
    """
    return first_phase("aclnnDup", lambda: _dup(self, src, scale, antiquantGroupSize))


def aclnnDup(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnDupGetWorkspaceSize` checked; writes `self`. Returns what `aclnnCpy` returns."""
    return second_phase("aclnnDup", workspace, workspaceSize, executor)


def _dup(self: Any, src: Any, scale: Any, size: Any) -> Bound:
    target, source = operand_of("self", self, TYPES), operand_of("src", src, TYPES)
    require(target.type == source.type, f"self is {target.type}: must be {source.type} as src is")
    require(target.shape == source.shape, f"self has shape {target.shape}: must be {source.shape} as src has")
    return _copied(target, source, scale, size)


def _cpy(self: Any, src: Any, scale: Any, size: Any) -> Bound:
    return _copied(operand_of("self", self, TYPES), operand_of("src", src, TYPES), scale, size)


def _copied(target: Operand, source: Operand, scale: Any, size: Any) -> Bound:
    taken = COPIES[source.type]
    require(target.type in taken, f"self is {target.type}: src is {source.type}, which is copied to {', '.join(taken)}")
    require(
        target.size == source.size,
        f"self has shape {target.shape}: {target.size} elements, src of shape {source.shape} has {source.size}",
    )
    require_writable(target)
    if target.type == source.type:
        return _copied_bits(target, source, scale, size), unchanged
    require_apart(target, source)
    if target.type in BITS:
        return _quantised(target, source, scale, size), unchanged
    if source.type in BITS:
        return _dequantised(target, source, scale, size), unchanged
    if target.type in BLOCKS or source.type in BLOCKS:
        _require_blocks(target, source, scale, size)
    if source.size == 0:
        return nothing, unchanged
    move = None
    floats = source if target.type in BLOCKS else target if source.type in BLOCKS else None
    if floats is None or floats.tensor.has_contiguous_rows():
        move = compiled_move(target.tensor, source.tensor)
    move = move or partial(movers.copy, target.tensor, source.tensor, reference_numerics())
    return with_copies(move, [source], target), unchanged


def _copied_bits(target: Operand, source: Operand, scale: Any, size: Any) -> Call:
    if source.type in BLOCKS:
        _require_blocks(target, source, scale, size)
    elif source.type in BITS and target.shape != source.shape:
        group_size(size, source, target)
    if source.size == 0 or same_view(target, source):
        return nothing
    require_apart(target, source)
    move = compiled_move(target.tensor, source.tensor) or partial(
        movers.copy, target.tensor, source.tensor, reference_numerics()
    )
    return with_copies(move, [source], target)


def _quantised(target: Operand, source: Operand, scale: Any, size: Any) -> Call:
    quants, scales = groups_of(target, scale, group_size(size, target, source))
    require_writable(scales)
    require_apart(scales, target, source)
    if source.size == 0:
        return nothing
    return with_copies(groups.bind_quantize(quants, source.tensor), [source], target, scales)


def _dequantised(target: Operand, source: Operand, scale: Any, size: Any) -> Call:
    quants, scales = groups_of(source, scale, group_size(size, source, target))
    require_apart(target, scales)
    if source.size == 0:
        return nothing
    return with_copies(groups.bind_dequantize(target.tensor, quants), [source, scales], target)


def _require_blocks(target: Operand, source: Operand, scale: Any, size: Any) -> None:
    """Checks the rules of a copy where one side is blocks of ggml."""
    blocks = target if target.type in BLOCKS else source
    require_no_scale(blocks, scale, size)
    for side in (target, source):
        require(
            side.row % BLOCK == 0,
            f"{side.name} has rows of {side.row} elements: must be whole {blocks.type} blocks of {BLOCK}",
        )
