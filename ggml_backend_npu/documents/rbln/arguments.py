"""What the operators take: each function returns a checked argument, or raises ValueError in a line that names it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = int | Array  # of a buffer; or one for each entry of axis 0

BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BF16)


def shown(value: Any) -> str:
    """A value as text on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]}..."


def integer(name: str, value: Any, least: int | None = None) -> int:
    """An integer, of at least `least`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} {shown(value)}: must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name} {number}: must be at least {least}")
    return number


def axis_of(axis: Any, array: Array, from_end: bool = True) -> int:
    """The axis, counted from the first; from_end: it may be negative."""
    number = integer("axis", axis)
    if array.ndim == 0:
        raise ValueError(f"axis {number}: a single number has no axes")
    if not (-array.ndim if from_end else 0) <= number < array.ndim:
        raise ValueError(f"axis {number}: must be from {-array.ndim if from_end else 0} to {array.ndim - 1}")
    return number % array.ndim


def array_of(name: str, value: Any) -> Array:
    """An array of numbers of any type. Raises ValueError for anything else."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0, object)
    if array.dtype.kind in "OSUMmV" and array.dtype.type.__module__ != ml_dtypes.bfloat16.__module__:
        raise ValueError(f"{name} {shown(value)}: must be an array of numbers")
    return array


def floats_of(name: str, value: Any) -> Array:
    """An array of float32, float16 or bfloat16."""
    array = array_of(name, value)
    if array.dtype not in FLOATS:
        raise ValueError(f"{name} of {array.dtype}: must be float32, float16 or bfloat16")
    return array


def index_of(index: Any, n: int, most: int | None = None) -> Index:
    """A checked index: an int, or one for each of n entries."""
    entries = np.asarray(index)
    if entries.dtype.kind not in "iu":
        raise ValueError(f"index {shown(index)}: must be an integer, or integers for {n} entries of axis 0")
    if entries.size != 1 and entries.shape != (n,):
        raise ValueError(f"index of shape {entries.shape}: must be one integer, or {n}, one for each entry of axis 0")
    for value in entries.reshape(-1).tolist():
        if value < 0 or (most is not None and value > most):
            bounds = "at least 0" if most is None else f"from 0 to {most}"
            raise ValueError(f"index {value}: must be {bounds}")
    return int(entries.reshape(-1)[0]) if entries.size == 1 else entries


def each_entry(index: Index, axis: int, *arrays: Array) -> Iterator[tuple[int, int, list[Array]]]:
    """(index, axis, arrays) of each part that has its own index."""
    if isinstance(index, int):
        yield index, axis, [*arrays]
        return
    if axis == 0:
        raise ValueError(f"index of shape {index.shape}: along axis 0 there is one index for all")
    for n, value in enumerate(index.tolist()):
        yield value, axis - 1, [array[n] for array in arrays]


def part_of(axis: int, begin: int | None, end: int | None) -> tuple[slice, ...]:
    """The index of entries [begin, end) along an axis."""
    return (*[slice(None)] * axis, slice(begin, end))


def require_same_but(axis: int, name: str, array: Array, data: Array) -> None:
    """Checks that an array has the rank, the type and, except for one axis, the shape of data."""
    if array.dtype != data.dtype:
        raise ValueError(f"{name} of {array.dtype}: must be of {data.dtype}, as data is")
    shape, needed = ([*each.shape] for each in (array, data))
    if len(shape) == len(needed):
        shape[axis] = needed[axis]
    if shape != needed:
        raise ValueError(f"{name} of shape {array.shape}: must be {data.shape} but for axis {axis}")


def kind_of(dtype: np.dtype[Any]) -> str:
    """ "float" or "integer", else the name of the type."""
    return "float" if dtype == BF16 or dtype.kind == "f" else "integer" if dtype.kind in "iu" else dtype.name


def converted(dtype: np.dtype[Any], value: Array) -> Array:
    """The same numbers in another type: any value, where the type has all of the value's type; otherwise only numbers
    that the type has, of its own kind."""
    beyond = value.dtype.kind in "iu" and value.itemsize == 8 and dtype.kind in "fc"  # NumPy calls that safe
    if np.can_cast(value.dtype, dtype, "safe") and not beyond:
        return value
    if kind_of(dtype) == kind_of(value.dtype):
        with np.errstate(all="ignore"):
            converted = value.astype(dtype)
        if ((converted == value) | ((converted != converted) & (value != value))).all():
            return converted
    raise ValueError(f"value of {value.dtype}: ptr is of {dtype}, which does not have all of its numbers")
