"""aclnnGetRows, aclnnCpy, aclnnDup: the two-phase calls of the GET_ROWS / CPY / DUP requirement, on NumPy arrays.

    status, size, executor = aclnnGetRowsGetWorkspaceSize(src, indices, scale, 32, out)
    status = aclnnGetRows(None, size, executor)

Tensors are 4-D, row-major, of any strides. None is copied, except one with an axis that runs backwards: that one is
copied at each run, as the kernels walk forwards.

- an ndarray of float32, float16, int32, or of int8: quants, whose scales are a tensor of their own
- an `AclTensor`: int4, two to a byte, whose scales are a tensor of their own
- an `ir.Tensor` made by `Tensor.of(bytes, "q8_0")` or `"q4_0"`: blocks as ggml has them, scales inside

The first phase checks everything: where it refuses, its executor is None and nothing has been written. The second phase
checks what can have changed since. Both return a `Status`, whose message names the argument and its value; a mistake of
the caller raises nothing.

    0       ACL_SUCCESS
    161001  ACLNN_ERR_PARAM_NULLPTR    a tensor, an executor or a workspace is None
    161002  ACLNN_ERR_PARAM_INVALID    an invalid type, shape, stride or value, or an executor not valid for this call
    361001  ACLNN_ERR_RUNTIME_ERROR    an index that was changed after the first phase names no row

No call needs a workspace: sizes are 0. Streams are accepted and ignored: a call has run when it returns.

Source: the requirement "get_rows, cpy, dup" of llama.cpp on 310P and 910B, with aclnn's calling convention. Where it
says nothing, numbers are ggml's: GET_ROWS and CPY of its CPU backend, quantised with the rounding of
quantize_row_*_ref.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.abi import codecs
from ggml_backend_npu.documents import run
from ggml_backend_npu.documents.status import Status
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import Numerics
from ggml_backend_npu.ops import groups, movers, strided
from ggml_backend_npu.ops.groups import Groups
from quant.kernels.jit import engine

_SUCCESS = Status(0, "ACL_SUCCESS")

_BLOCK = 32  # elements of a block of q8_0 or q4_0
_BLOCKS = ("q8_0", "q4_0")
_BITS = {"int8": 8, "int4": 4}
_QUANTISED = (*_BLOCKS, *_BITS)
_TYPES = ("f32", "f16", "i32", *_QUANTISED)
_TYPE_OF_DTYPE = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.int32): "i32",
    np.dtype(np.int8): "int8",
}

# which types a source is copied to
_COPIES: dict[str, tuple[str, ...]] = {
    "f32": ("f32", "f16", "i32", *_QUANTISED),
    "f16": ("f16", "f32", *_QUANTISED),
    "i32": ("i32", "f32"),
    **{name: (name, "f32") for name in _QUANTISED},
}

_WORK = 1_000_000  # steps that a search for shared bytes may take; beyond that, bytes count as shared

Shape = tuple[int, int, int, int]
Call = Callable[[], None]


@dataclass(frozen=True)
class AclTensor:
    """A tensor of int4, for which NumPy has no type.

    packed  uint8 (a, b, c, d / 2), any strides: two's complement, the low nibble of a byte holds the even element
    shape   (a, b, c, d) of the elements
    """

    packed: NDArray[np.uint8]
    shape: Shape


class AclOpExecutor:
    """What the first phase of a call passes to the second: valid for one run, or, if made repeatable, until destroyed.

    call  name of the call it was made for
    """

    def __init__(self, call: str, run: Call, changed: Callable[[], str | None]) -> None:
        self.call = call
        self._run: Call | None = run
        self._changed = changed
        self._repeatable = False
        self._ended = ""

    def _end(self, how: str) -> None:
        """Releases the tensors."""
        self._run, self._changed, self._ended = None, _unchanged, how


Tensors = NDArray[Any] | AclTensor | Tensor
FirstPhase = tuple[Status, int, AclOpExecutor | None]


class _RefusedError(Exception):
    """Ends the first phase."""

    def __init__(self, status: Status) -> None:
        super().__init__(str(status))
        self.status = status


def _null(message: str) -> Status:
    return Status(161001, "ACLNN_ERR_PARAM_NULLPTR", message)


def _invalid(message: str) -> Status:
    return Status(161002, "ACLNN_ERR_PARAM_INVALID", message)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _RefusedError(_invalid(message))


# tensors


@dataclass(frozen=True)
class _Operand:
    """An argument that is a tensor.

    type    one of _TYPES
    tensor  its memory; of i8 for int8 and for the bytes of int4
    lent    where an axis runs backwards: the array whose memory `tensor` is, and the caller's array
    """

    name: str
    type: str
    shape: tuple[int, ...]
    tensor: Tensor
    lent: tuple[NDArray[Any], NDArray[Any]] | None = None

    @property
    def row(self) -> int:
        return self.shape[-1]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self) -> NDArray[Any]:
        """The caller's elements, or the bytes of blocks."""
        return self.tensor.view() if self.lent is None else self.lent[1]

    def load(self) -> None:
        """Copies from the caller's array."""
        if self.lent is not None:
            self.lent[0][...] = self.lent[1]

    def store(self) -> None:
        """Copies to the caller's array."""
        if self.lent is not None:
            self.lent[1][...] = self.lent[0]


def _operand(name: str, value: Any, types: tuple[str, ...], ranks: tuple[int, ...] = (4,)) -> _Operand:
    """Checks an argument: it must have one of these types and one of these ranks."""
    if value is None:
        raise _RefusedError(_null(f"{name} is None: must be a tensor"))
    if isinstance(value, Tensor):
        operand = _blocks(name, value)
    elif isinstance(value, AclTensor):
        operand = _int4(name, value)
    elif isinstance(value, np.ndarray):
        operand = _array(name, value)
    else:
        raise _RefusedError(
            _invalid(f"{name} is of type {type(value).__name__}: must be an ndarray, an AclTensor or a Tensor")
        )
    _require(operand.type in types, f"{name} is {operand.type}: must be {' or '.join(types)}")
    allowed = " or ".join(f"{rank}-D" for rank in ranks)
    _require(len(operand.shape) in ranks, f"{name} has shape {operand.shape}: must be {allowed}")
    return operand


def _blocks(name: str, tensor: Tensor) -> _Operand:
    _require(tensor.type in _BLOCKS, f"{name} is a Tensor of {tensor.type}: must be one of {' or '.join(_BLOCKS)}")
    _require(tensor.packed is None, f"{name} is a packed Tensor: its blocks must lie as ggml has them")
    return _Operand(name, tensor.type, tensor.ne[::-1], tensor)


def _int4(name: str, value: AclTensor) -> _Operand:
    packed = value.packed
    found = isinstance(packed, np.ndarray) and packed.dtype == np.uint8 and packed.ndim == 4
    _require(found, f"{name}.packed is {_brief(packed)}: must be uint8 of 4 axes")
    shape = (*packed.shape[:3], 2 * packed.shape[3])
    _require(isinstance(value.shape, tuple), f"{name}.shape is {_brief(value.shape)}: must be a tuple")
    _require(
        value.shape == shape,
        f"{name} has shape {value.shape}: its bytes of shape {packed.shape} are int4 of shape {shape}, two to a byte",
    )
    return _Operand(name, "int4", shape, *_memory(packed, "i8"))


def _array(name: str, array: NDArray[Any]) -> _Operand:
    kind = _TYPE_OF_DTYPE.get(array.dtype, "")
    _require(bool(kind), f"{name} is {_brief(array)}: must be one of {', '.join(map(str, _TYPE_OF_DTYPE))}")
    _require(array.ndim <= 4, f"{name} has shape {array.shape}: must be 4-D")
    return _Operand(name, kind, array.shape, *_memory(array))


def _memory(array: NDArray[Any], type: str | None = None) -> tuple[Tensor, tuple[NDArray[Any], NDArray[Any]] | None]:
    if min(array.strides, default=0) >= 0:
        return Tensor.of(array, type), None
    forwards = np.empty(array.shape, array.dtype)
    return Tensor.of(forwards, type), (forwards, array)


def _brief(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape}"
    return f"of type {type(value).__name__}"


def _require_writable(operand: _Operand) -> None:
    view = operand.view()
    _require(view.flags.writeable, f"{operand.name} is read-only: it is written to")
    reach = view.itemsize
    if operand.size:
        for stride, n in sorted((abs(stride), n) for stride, n in zip(view.strides, view.shape, strict=True) if n > 1):
            _require(
                stride >= reach,
                f"{operand.name} has strides {view.strides} for shape {operand.shape}: "
                "its elements overlap, or lie between each other's rows",
            )
            reach += (n - 1) * stride


def _require_apart(written: _Operand, *others: _Operand) -> None:
    for other in others:
        _require(
            not _overlap(written, other),
            f"{written.name} overlaps {other.name} in memory: {written.name} is written to",
        )


def _overlap(one: _Operand, other: _Operand) -> bool:
    """Whether two tensors share bytes: exactly, not judged by their ends."""
    try:
        return np.shares_memory(one.view(), other.view(), max_work=_WORK)  # type: ignore[arg-type]  # stub: -1 or 0
    except np.exceptions.TooHardError:
        return True


def _same_view(one: _Operand, other: _Operand) -> bool:
    """Whether two tensors are the same elements in the same places."""
    one_view, other_view = one.view(), other.view()
    if (one.type, one.shape, _address(one_view)) != (other.type, other.shape, _address(other_view)):
        return False
    strides = zip(one_view.shape, one_view.strides, other_view.strides, strict=True)
    return all(n == 1 or a == b for n, a, b in strides)


def _address(array: NDArray[Any]) -> int:
    address, _ = array.__array_interface__["data"]
    return int(address)


# groups


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise _RefusedError(_invalid(f"{name} is {_brief(value)}: must be an int")) from None


def _group_size(value: Any, *sides: _Operand) -> int:
    """antiquantGroupSize as a number of elements, which must divide the rows of all sides; 0: a row of the first
    side."""
    size = _integer("antiquantGroupSize", value)
    _require(size >= 0, f"antiquantGroupSize is {size}: must be 0 or more")
    group = size or sides[0].row
    shown = f"{size}" if size else f"0, a row of {group} elements of {sides[0].name}"
    for side in sides:
        _require(
            group == side.row or (group > 0 and side.row % group == 0),
            f"antiquantGroupSize is {shown}: does not divide the {side.row} elements of a row of {side.name}",
        )
    return group


def _groups(quants: _Operand, scale: Any, size: int) -> tuple[Groups, _Operand]:
    """Quants with their scales: one for every `size` elements of a row."""
    _require(scale is not None, f"scale is None: {quants.name} is {quants.type}, which needs one")
    scales = _operand("scale", scale, ("f32",))
    expected = (*quants.shape[:3], quants.row // size if size else 1)
    _require(
        scales.shape == expected,
        f"scale has shape {scales.shape}: must be {expected} for {quants.name} of shape {quants.shape} "
        f"in groups of {size}",
    )
    return Groups(_BITS[quants.type], size, quants.tensor, scales.tensor), scales


def _require_no_scale(blocks: _Operand, scale: Any, size: Any) -> None:
    where = f"{blocks.name} is {blocks.type} with scales inside"
    _require(scale is None, f"scale is {_brief(scale)}: must be None, {where}")
    group = _integer("antiquantGroupSize", size)
    _require(group in (0, _BLOCK), f"antiquantGroupSize is {group}: must be {_BLOCK} or 0, {where}")


# GET_ROWS


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
    return _first_phase("aclnnGetRows", lambda: _get_rows(src, indices, scale, antiquantGroupSize, out))


def aclnnGetRows(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnGetRowsGetWorkspaceSize` checked; writes `out`.

    Returns 361001 where an index was changed since and names no row now: nothing is written then, and the executor
    stays valid; 161001 where executor is None, or workspace is None with a size; 161002 where the executor was made for
    another call, is used or destroyed.
    """
    return _second_phase("aclnnGetRows", workspace, workspaceSize, executor)


Bound = tuple[Call, Callable[[], str | None]]


def _get_rows(src: Any, indices: Any, scale: Any, size: Any, out: Any) -> Bound:
    source = _operand("src", src, _TYPES)
    ids = _operand("indices", indices, ("i32",), ranks=(4, 3))
    target = _operand("out", out, ("f32", "i32") if source.type == "i32" else ("f32",))
    a, b, n_rows, d = source.shape
    x = ids.shape[-1]
    _require(
        ids.shape in ((1, a, b, x), (a, b, x)),
        f"indices has shape {ids.shape}: must be (1, {a}, {b}, x) for src of shape {source.shape}",
    )
    _require(
        target.shape == (a, b, x, d),
        f"out has shape {target.shape}: must be {(a, b, x, d)} for src of shape {source.shape}, {x} indices a matrix",
    )
    inputs = [source, ids]
    if source.type in _BITS:
        quants, scales = _groups(source, scale, _group_size(size, source))
        inputs.append(scales)
    elif source.type in _BLOCKS:
        _require_no_scale(source, scale, size)
    _require_writable(target)
    _require_apart(target, *inputs)
    changed = partial(_bad_index, ids, n_rows)
    bad = changed()
    if bad is not None:
        raise _RefusedError(_invalid(bad))
    if target.size == 0:
        return _nothing, changed
    if source.type in _BITS:
        return _run(groups.dequantizer(target.tensor, quants, ids.tensor), inputs, target), changed
    move = None
    if source.type not in _BLOCKS or target.tensor.has_contiguous_rows():
        move = _compiled(target.tensor, source.tensor, src_ids=ids.tensor)
    move = move or partial(movers.get_rows.define, target.tensor, source.tensor, ids.tensor, numerics=_numerics())
    return _run(move, inputs, target), changed


def _run(call: Call, inputs: Sequence[_Operand], *outputs: _Operand) -> Call:
    """The call, with copies of the tensors that run backwards."""
    if all(operand.lent is None for operand in (*inputs, *outputs)):
        return call

    def run() -> None:
        for operand in inputs:
            operand.load()
        call()
        for operand in outputs:
            operand.store()

    return run


def _bad_index(ids: _Operand, n_rows: int) -> str | None:
    """What is wrong with the first index that names no row; None where all name one."""
    rows = ids.view()
    rows = rows[0] if rows.ndim == 4 else rows
    if rows.size == 0 or (rows.min() >= 0 and rows.max() < n_rows):
        return None
    i, j, k = (int(index) for index in np.unravel_index(((rows < 0) | (rows >= n_rows)).argmax(), rows.shape))
    return (
        f"indices has {rows[i, j, k]} at [{i}, {j}, {k}] of (a, b, x): must be 0 or more and below src's {n_rows} rows"
    )


# CPY, DUP


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
    return _first_phase("aclnnCpy", lambda: _cpy(self, src, scale, antiquantGroupSize))


def aclnnCpy(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnCpyGetWorkspaceSize` checked; writes `self`, and `scale` where that is an output.

    Returns 161001 where executor is None, or workspace is None with a size; 161002 where the executor was made for
    another call, is used or destroyed.
    """
    return _second_phase("aclnnCpy", workspace, workspaceSize, executor)


def aclnnDupGetWorkspaceSize(
    self: Tensors, src: Tensors, scale: NDArray[np.float32] | None, antiquantGroupSize: int
) -> FirstPhase:
    """self = src, bit for bit: `aclnnCpyGetWorkspaceSize`, but 161002 where self does not have src's type and shape.

    Returns (status, 0, executor for `aclnnDup`). Source: DUP of the requirement; ggml_dup.
    """
    return _first_phase("aclnnDup", lambda: _dup(self, src, scale, antiquantGroupSize))


def aclnnDup(workspace: object, workspaceSize: int, executor: AclOpExecutor, stream: object = None) -> Status:
    """Runs what `aclnnDupGetWorkspaceSize` checked; writes `self`. Returns what `aclnnCpy` returns."""
    return _second_phase("aclnnDup", workspace, workspaceSize, executor)


def _dup(self: Any, src: Any, scale: Any, size: Any) -> Bound:
    target, source = _operand("self", self, _TYPES), _operand("src", src, _TYPES)
    _require(target.type == source.type, f"self is {target.type}: must be {source.type} as src is")
    _require(target.shape == source.shape, f"self has shape {target.shape}: must be {source.shape} as src has")
    return _copied(target, source, scale, size)


def _cpy(self: Any, src: Any, scale: Any, size: Any) -> Bound:
    return _copied(_operand("self", self, _TYPES), _operand("src", src, _TYPES), scale, size)


def _copied(target: _Operand, source: _Operand, scale: Any, size: Any) -> Bound:
    taken = _COPIES[source.type]
    _require(
        target.type in taken, f"self is {target.type}: src is {source.type}, which is copied to {', '.join(taken)}"
    )
    _require(
        target.size == source.size,
        f"self has shape {target.shape}: {target.size} elements, src of shape {source.shape} has {source.size}",
    )
    _require_writable(target)
    if target.type == source.type:
        return _copied_bits(target, source, scale, size), _unchanged
    _require_apart(target, source)
    if target.type in _BITS:
        return _quantised(target, source, scale, size), _unchanged
    if source.type in _BITS:
        return _dequantised(target, source, scale, size), _unchanged
    if target.type in _BLOCKS or source.type in _BLOCKS:
        _require_blocks(target, source, scale, size)
    if source.size == 0:
        return _nothing, _unchanged
    move = None
    floats = source if target.type in _BLOCKS else target if source.type in _BLOCKS else None
    if floats is None or floats.tensor.has_contiguous_rows():
        move = _compiled(target.tensor, source.tensor)
    move = move or partial(movers.copy, target.tensor, source.tensor, _numerics())
    return _run(move, [source], target), _unchanged


def _copied_bits(target: _Operand, source: _Operand, scale: Any, size: Any) -> Call:
    if source.type in _BLOCKS:
        _require_blocks(target, source, scale, size)
    elif source.type in _BITS and target.shape != source.shape:
        _group_size(size, source, target)
    if source.size == 0 or _same_view(target, source):
        return _nothing
    _require_apart(target, source)
    move = _compiled(target.tensor, source.tensor) or partial(movers.copy, target.tensor, source.tensor, _numerics())
    return _run(move, [source], target)


def _quantised(target: _Operand, source: _Operand, scale: Any, size: Any) -> Call:
    quants, scales = _groups(target, scale, _group_size(size, target, source))
    _require_writable(scales)
    _require_apart(scales, target, source)
    if source.size == 0:
        return _nothing
    return _run(groups.quantizer(quants, source.tensor), [source], target, scales)


def _dequantised(target: _Operand, source: _Operand, scale: Any, size: Any) -> Call:
    quants, scales = _groups(source, scale, _group_size(size, source, target))
    _require_apart(target, scales)
    if source.size == 0:
        return _nothing
    return _run(groups.dequantizer(target.tensor, quants), [source, scales], target)


def _require_blocks(target: _Operand, source: _Operand, scale: Any, size: Any) -> None:
    """Checks the rules of a copy where one side is blocks of ggml."""
    blocks = target if target.type in _BLOCKS else source
    _require_no_scale(blocks, scale, size)
    for side in (target, source):
        _require(
            side.row % _BLOCK == 0,
            f"{side.name} has rows of {side.row} elements: must be whole {blocks.type} blocks of {_BLOCK}",
        )


def _compiled(dst: Tensor, src: Tensor, src_ids: Tensor | None = None) -> Call | None:
    return strided.mover(dst, src, src_ids, numerics=_numerics()) if engine() == "compiled" else None


def _numerics() -> Numerics:
    """q8_0 is rounded as the reference functions round it."""
    return replace(codecs.bound(), rounding="reference")


# executors


def aclSetAclOpExecutorRepeatable(executor: AclOpExecutor) -> Status:
    """Makes an executor valid for any number of runs, on the contents of its tensors at the time, until it is
    destroyed.

    Returns 161001 where executor is None, 161002 where it is not an executor, or is used or destroyed.
    """
    refusal = _refusal(executor)
    if refusal is None:
        executor._repeatable = True
    return refusal or _SUCCESS


def aclDestroyAclOpExecutor(executor: AclOpExecutor) -> Status:
    """Ends an executor, which releases its tensors. One that is used, and not repeatable, has ended already.

    Returns 161001 where executor is None, 161002 where it is not an executor, or is used or destroyed.
    """
    refusal = _refusal(executor)
    if refusal is None:
        executor._end("destroyed")
    return refusal or _SUCCESS


def _refusal(executor: Any, call: str | None = None) -> Status | None:
    """Why an executor is not valid, or, where a call is given, not valid for it."""
    if executor is None:
        return _null("executor is None: must be one that a first phase gave")
    if not isinstance(executor, AclOpExecutor):
        return _invalid(f"executor is of type {type(executor).__name__}: must be one that a first phase gave")
    if call is not None and executor.call != call:
        return _invalid(f"executor is one of {executor.call}: must be one of {call}")
    if executor._ended:
        return _invalid(f"executor of {executor.call} is {executor._ended}: a new one comes from the first phase")
    return None


def _first_phase(call: str, bind: Callable[[], Bound]) -> FirstPhase:
    try:
        return _SUCCESS, 0, AclOpExecutor(call, *bind())
    except _RefusedError as refused:
        return refused.status, 0, None


def _second_phase(call: str, workspace: object, size: Any, executor: Any) -> Status:
    refusal = _refusal(executor, call)
    if refusal is not None:
        return refusal
    if not isinstance(size, int | np.integer) or size < 0:
        shown = size if isinstance(size, int | np.integer) else _brief(size)
        return _invalid(f"workspaceSize is {shown}: must be a number of bytes, 0 or more")
    if workspace is None and size > 0:
        return _null(f"workspace is None: workspaceSize is {size}")
    changed = executor._changed()
    if changed is not None:
        return Status(361001, "ACLNN_ERR_RUNTIME_ERROR", changed)
    run(executor._run)
    if not executor._repeatable:
        executor._end("used")
    return _SUCCESS


def _nothing() -> None:
    pass


def _unchanged() -> str | None:
    return None
