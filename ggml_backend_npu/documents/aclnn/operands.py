"""Arguments that are tensors, and groups of quants that share a scale."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.documents.aclnn.refusals import RefusedError, brief, invalid, null_argument, require
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.groups import Groups

BLOCK = 32  # elements of a block of q8_0 or q4_0
BLOCKS = ("q8_0", "q4_0")
BITS = {"int8": 8, "int4": 4}
QUANTISED = (*BLOCKS, *BITS)
TYPES = ("f32", "f16", "i32", *QUANTISED)
_TYPE_OF_DTYPE = {
    np.dtype(np.float32): "f32",
    np.dtype(np.float16): "f16",
    np.dtype(np.int32): "i32",
    np.dtype(np.int8): "int8",
}

_WORK = 1_000_000  # steps that a search for shared bytes may take; beyond that, bytes count as shared

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class AclTensor:
    """A tensor of int4, for which NumPy has no type.

    packed  uint8 (a, b, c, d / 2), any strides: two's complement, the low nibble of a byte holds the even element
    shape   (a, b, c, d) of the elements
    """

    packed: NDArray[np.uint8]
    shape: Shape


Tensors = NDArray[Any] | AclTensor | Tensor


@dataclass(frozen=True)
class Operand:
    """An argument that is a tensor.

    type    one of TYPES
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
        """Elements of a row."""
        return self.shape[-1]

    @property
    def size(self) -> int:
        """Elements of the tensor."""
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


def operand_of(name: str, value: Any, types: tuple[str, ...], ranks: tuple[int, ...] = (4,)) -> Operand:
    """Checks an argument: it must have one of these types and one of these ranks."""
    if value is None:
        raise RefusedError(null_argument(f"{name} is None: must be a tensor"))
    if isinstance(value, Tensor):
        operand = _blocks(name, value)
    elif isinstance(value, AclTensor):
        operand = _int4(name, value)
    elif isinstance(value, np.ndarray):
        operand = _array(name, value)
    else:
        raise RefusedError(
            invalid(f"{name} is of type {type(value).__name__}: must be an ndarray, an AclTensor or a Tensor")
        )
    require(operand.type in types, f"{name} is {operand.type}: must be {' or '.join(types)}")
    allowed = " or ".join(f"{rank}-D" for rank in ranks)
    require(len(operand.shape) in ranks, f"{name} has shape {operand.shape}: must be {allowed}")
    return operand


def _blocks(name: str, tensor: Tensor) -> Operand:
    require(tensor.type in BLOCKS, f"{name} is a Tensor of {tensor.type}: must be one of {' or '.join(BLOCKS)}")
    require(tensor.packed is None, f"{name} is a packed Tensor: its blocks must lie as ggml has them")
    return Operand(name, tensor.type, tensor.ne[::-1], tensor)


def _int4(name: str, value: AclTensor) -> Operand:
    packed = value.packed
    found = isinstance(packed, np.ndarray) and packed.dtype == np.uint8 and packed.ndim == 4
    require(found, f"{name}.packed is {brief(packed)}: must be uint8 of 4 axes")
    shape = (*packed.shape[:3], 2 * packed.shape[3])
    require(isinstance(value.shape, tuple), f"{name}.shape is {brief(value.shape)}: must be a tuple")
    require(
        value.shape == shape,
        f"{name} has shape {value.shape}: its bytes of shape {packed.shape} are int4 of shape {shape}, two to a byte",
    )
    return Operand(name, "int4", shape, *_memory(packed, "i8"))


def _array(name: str, array: NDArray[Any]) -> Operand:
    kind = _TYPE_OF_DTYPE.get(array.dtype, "")
    require(bool(kind), f"{name} is {brief(array)}: must be one of {', '.join(map(str, _TYPE_OF_DTYPE))}")
    require(array.ndim <= 4, f"{name} has shape {array.shape}: must be 4-D")
    return Operand(name, kind, array.shape, *_memory(array))


def _memory(array: NDArray[Any], type: str | None = None) -> tuple[Tensor, tuple[NDArray[Any], NDArray[Any]] | None]:
    if min(array.strides, default=0) >= 0:
        return Tensor.of(array, type), None
    forwards = np.empty(array.shape, array.dtype)
    return Tensor.of(forwards, type), (forwards, array)


def require_writable(operand: Operand) -> None:
    """Checks that a tensor can be written to, and that no two of its elements overlap."""
    view = operand.view()
    require(view.flags.writeable, f"{operand.name} is read-only: it is written to")
    reach = view.itemsize
    if operand.size:
        for stride, n in sorted((abs(stride), n) for stride, n in zip(view.strides, view.shape, strict=True) if n > 1):
            require(
                stride >= reach,
                f"{operand.name} has strides {view.strides} for shape {operand.shape}: "
                "its elements overlap, or lie between each other's rows",
            )
            reach += (n - 1) * stride


def require_apart(written: Operand, *others: Operand) -> None:
    """Checks that a tensor that is written to shares no byte with others."""
    for other in others:
        require(
            not _overlap(written, other),
            f"{written.name} overlaps {other.name} in memory: {written.name} is written to",
        )


def _overlap(one: Operand, other: Operand) -> bool:
    """Whether two tensors share bytes: exactly, not judged by their ends."""
    try:
        return np.shares_memory(one.view(), other.view(), max_work=_WORK)  # type: ignore[arg-type]  # stub: -1 or 0
    except np.exceptions.TooHardError:
        return True


def same_view(one: Operand, other: Operand) -> bool:
    """Whether two tensors are the same elements in the same places."""
    one_view, other_view = one.view(), other.view()
    if (one.type, one.shape, _address(one_view)) != (other.type, other.shape, _address(other_view)):
        return False
    strides = zip(one_view.shape, one_view.strides, other_view.strides, strict=True)
    return all(n == 1 or a == b for n, a, b in strides)


def _address(array: NDArray[Any]) -> int:
    address, _ = array.__array_interface__["data"]
    return int(address)


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise RefusedError(invalid(f"{name} is {brief(value)}: must be an int")) from None


def group_size(value: Any, *sides: Operand) -> int:
    """antiquantGroupSize as a number of elements, which must divide the rows of all sides; 0: a row of the first
    side."""
    size = _integer("antiquantGroupSize", value)
    require(size >= 0, f"antiquantGroupSize is {size}: must be 0 or more")
    group = size or sides[0].row
    shown = f"{size}" if size else f"0, a row of {group} elements of {sides[0].name}"
    for side in sides:
        require(
            group == side.row or (group > 0 and side.row % group == 0),
            f"antiquantGroupSize is {shown}: does not divide the {side.row} elements of a row of {side.name}",
        )
    return group


def groups_of(quants: Operand, scale: Any, size: int) -> tuple[Groups, Operand]:
    """Quants with their scales: one for every `size` elements of a row."""
    require(scale is not None, f"scale is None: {quants.name} is {quants.type}, which needs one")
    scales = operand_of("scale", scale, ("f32",))
    expected = (*quants.shape[:3], quants.row // size if size else 1)
    require(
        scales.shape == expected,
        f"scale has shape {scales.shape}: must be {expected} for {quants.name} of shape {quants.shape} "
        f"in groups of {size}",
    )
    return Groups(BITS[quants.type], size, quants.tensor, scales.tensor), scales


def require_no_scale(blocks: Operand, scale: Any, size: Any) -> None:
    """Checks that a tensor of blocks, which hold their scales, comes without others, in groups of a block."""
    where = f"{blocks.name} is {blocks.type} with scales inside"
    require(scale is None, f"scale is {brief(scale)}: must be None, {where}")
    group = _integer("antiquantGroupSize", size)
    require(group in (0, BLOCK), f"antiquantGroupSize is {group}: must be {BLOCK} or 0, {where}")
