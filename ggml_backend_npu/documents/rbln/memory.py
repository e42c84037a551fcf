"""Operators that move parts of arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ggml_backend_npu.documents.rbln.arguments import (
    FLOATS,
    Array,
    array_of,
    axis_of,
    converted,
    each_entry,
    index_of,
    integer,
    part_of,
    require_same_but,
    shown,
)


def to_dynamic_index(data: ArrayLike, max: int = -1) -> int:
    """The index that a buffer holds.

    data  int32 or int16, one value of 0 or more
    max   what it may not exceed: the value itself is allowed, as the index of a full partition is. -1 for no bound

    A value above max is an error here; the document calls max a hint for the compiler.
    """
    buffer = np.asarray(data)
    if buffer.dtype not in (np.dtype(np.int32), np.dtype(np.int16)):
        raise ValueError(f"data of {buffer.dtype}: must be int32 or int16")
    if buffer.size != 1:
        raise ValueError(f"data of shape {buffer.shape}: must hold one value")
    value, most = int(buffer.reshape(-1)[0]), integer("max", max, -1)
    if value < 0:
        raise ValueError(f"data holds {value}: an index is at least 0")
    if 0 <= most < value:
        raise ValueError(f"data holds {value}: max is {most}")
    return value


def dynamic_load(ptr: ArrayLike, axis: int = -1, index: ArrayLike | None = None) -> Array:
    """A copy of the first `index` elements along an axis, followed by zeros: an array of the shape and type of ptr.

    index  how many; if there are fewer, all. None, which the document also calls length, for all of ptr, whatever axis
           says

    The document does not say what follows them: here zeros, as 0 * NaN in a product with probabilities would be NaN.
    """
    source = array_of("ptr", ptr)
    if index is None:
        return np.array(source, order="C")
    along = axis_of(axis, source)
    loaded = np.zeros(source.shape, source.dtype)
    for length, at, (to, values) in each_entry(index_of(index, len(source)), along, loaded, source):
        to[part_of(at, 0, length)] = values[part_of(at, 0, length)]
    return loaded


def dynamic_store(ptr: Array, value: ArrayLike, axis: int = -1, index: ArrayLike | None = None) -> None:
    """Writes the first `index` elements of value along an axis to ptr; the rest of ptr stays.

    ptr    written to; it may be a view
    value  of ptr's shape, or longer along the axis, where the rest is ignored. Of ptr's type; or of a type whose
           numbers ptr's type all has, as float32 has those of float16 and int16; or of ptr's kind, integers or floats,
           if ptr's type has the numbers that are stored. Nothing is rounded: that is for the caller to do
    index  how many; more than ptr has means all of ptr. None, which the document also calls length, for all of value,
           whatever axis says
    """
    if not isinstance(ptr, np.ndarray) or not ptr.flags.writeable:
        raise ValueError(f"ptr {type(ptr).__name__}: must be an array that can be written to")
    values = array_of("value", value)
    along = ptr.ndim if index is None else axis_of(axis, ptr)
    fits = values.ndim == ptr.ndim and all(
        v == p or (v > p and i == along) for i, (v, p) in enumerate(zip(values.shape, ptr.shape, strict=True))
    )
    if not fits:
        raise ValueError(f"value of shape {values.shape}: does not fit ptr of shape {ptr.shape}")
    parts = [(ptr, values)]
    if index is not None:
        parts = []
        for length, at, (to, new) in each_entry(index_of(index, len(ptr)), along, ptr, values):
            part = part_of(at, 0, min(length, to.shape[at]))
            parts.append((to[part], new[part]))
    stored = [converted(ptr.dtype, new) for _, new in parts]
    for (to, _), new in zip(parts, stored, strict=True):
        to[...] = new


def insert(data: ArrayLike, updates: ArrayLike, axis: int, index: ArrayLike, *, strict: bool = True) -> Array:
    """A copy of data in which updates replace the elements from `index` on along an axis.

    data     any shape, any type
    updates  of data's type and, except for the axis, shape; along it no longer than data
    index    0 or more, and below data's length along the axis
    strict   False: the index may be data's length, that of a full partition, and updates beyond the end are dropped,
             as in RBLN's own kernels; by default both are an error
    """
    array, new = array_of("data", data), array_of("updates", updates)
    along = axis_of(axis, array, from_end=False)
    require_same_but(along, "updates", new, array)
    size, n_new = array.shape[along], new.shape[along]
    if n_new > size:
        raise ValueError(f"updates of shape {new.shape}: longer along axis {along} than data of shape {array.shape}")
    at = index_of(index, len(array))
    for first in np.ravel(at).tolist():
        if first >= size + (not strict):
            raise ValueError(f"index {first}: must be {'below' if strict else 'at most'} {size}, data's length")
        if strict and size - first < n_new:
            raise ValueError(f"index {first}: {n_new} updates from there do not fit into {size}")
    updated = np.array(array, order="C")
    for first, part, (to, values) in each_entry(at, along, updated, new):
        to[part_of(part, first, first + n_new)] = values[part_of(part, 0, size - first)]
    return updated


def window_insert(data: ArrayLike, updates: ArrayLike, axis: int, index: ArrayLike) -> Array:
    """The first `index` elements of data along an axis, then updates, then zeros: as long as both together.

    data     any shape, any type
    updates  of data's type and, except for the axis, shape
    index    0 or more; at data's length or above, updates are appended

    The document does not say what follows the updates; window_softmax excludes it.
    """
    array, new = array_of("data", data), array_of("updates", updates)
    along = axis_of(axis, array, from_end=False)
    require_same_but(along, "updates", new, array)
    at = index_of(index, len(array))
    size, n_new = array.shape[along], new.shape[along]
    updated = np.zeros((*array.shape[:along], size + n_new, *array.shape[along + 1 :]), array.dtype)
    for value, part, (to, old, values) in each_entry(at, along, updated, array, new):
        first = min(value, size)
        to[part_of(part, 0, first)] = old[part_of(part, 0, first)]
        to[part_of(part, first, first + n_new)] = values
    return updated


def window_slice(data: ArrayLike, index: ArrayLike, axis: int, window_size: int, *, padded: bool = False) -> Array:
    """A copy of the `window_size` elements along an axis that end before `index`; of the first `index`, where these are
    fewer.

    data         any shape, any type, no shorter along the axis than the window
    index        0 or more; above data's length it counts as that length. If there is one per entry of axis 0, all must
                 give the same number of elements, unless padded
    padded       zeros follow where index < window_size, so that the result always fits a block of a window's length
    """
    array = array_of("data", data)
    along, window = axis_of(axis, array, from_end=False), integer("window_size", window_size, 1)
    at = index_of(index, len(array))
    size = array.shape[along]
    if size < window:
        raise ValueError(f"window_size {window}: data of shape {array.shape} is shorter along axis {along}")
    lengths = {window} if padded else {min(value, window) for value in np.ravel(at).tolist()}
    if len(lengths) > 1:
        raise ValueError(f"index {shown(index)}: slices of {sorted(lengths)} elements are no one array, unless padded")
    n = lengths.pop() if lengths else window
    sliced = np.zeros((*array.shape[:along], n, *array.shape[along + 1 :]), array.dtype)
    for value, part, (to, old) in each_entry(at, along, sliced, array):
        end = min(value, size)
        begin = max(0, end - window)
        to[part_of(part, 0, end - begin)] = old[part_of(part, begin, end)]
    return sliced


_MODES = {"constant": "constant", "reflect": "reflect", "edge": "edge", "replicate": "edge"}


def _pads(pad_size: Any) -> tuple[int, int]:
    sides = [pad_size, pad_size] if np.ndim(pad_size) == 0 else [*pad_size]
    if len(sides) != 2:
        raise ValueError(f"pad_size {shown(pad_size)}: must be one number for both sides, or one for each")
    before, after = (integer("pad_size", side, 0) for side in sides)
    return before, after


def _constant(value: Any, dtype: np.dtype[Any]) -> Array:
    """The value in a type: rounded where the type has fractions, otherwise exact. Raises ValueError where that
    fails."""
    try:
        number: Any = None if isinstance(value, str | bytes) else np.asarray(value).item()
        if dtype in FLOATS or dtype.kind in "fc":
            with np.errstate(over="ignore"):
                constant = np.array(float(number)).astype(dtype)
            holds = np.isfinite(constant) or not np.isfinite(number)
        else:
            constant = np.array(int(number), dtype)
            holds = constant == number
    except (TypeError, ValueError, OverflowError):
        holds = False
    if not holds:
        raise ValueError(f"value {shown(value)}: must be a number that {dtype} has")
    return constant


def nn_pad(input: ArrayLike, value: Any, axis: int, pad_size: Any, mode: str = "constant") -> Array:
    """The input with elements added before and after it along an axis, of its type.

    value     what is added in mode constant; a number that the type has, where the document says int
    pad_size  how many on each side: (left, right), or a number for both
    mode      constant; reflect: mirrored at the border, which is not repeated; edge, which the document also calls
              replicate: the border's element
    """
    array = array_of("input", input)
    along = axis_of(axis, array)
    before, after = _pads(pad_size)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"mode {shown(mode)}: must be one of {', '.join(_MODES)}")
    size = array.shape[along]
    if _MODES[mode] != "constant" and size == 0:
        raise ValueError(f"mode {mode}: input of shape {array.shape} has nothing along axis {along}")
    if mode == "reflect" and max(before, after) >= size:
        raise ValueError(f"pad_size {max(before, after)}: mode reflect has {size - 1} elements to mirror")
    widths = [(0, 0)] * along + [(before, after)] + [(0, 0)] * (array.ndim - along - 1)
    if _MODES[mode] == "constant":
        return np.pad(array, widths, constant_values=_constant(value, array.dtype))
    return np.pad(array, widths, mode="edge" if _MODES[mode] == "edge" else "reflect")
