"""The attention and window operators of RBLN's "Triton Ops API", on NumPy arrays.

Source: https://docs.rbln.ai/latest/ko/software/model_serving/vllm_support/features/triton_rbln/api.html

    scores = scale * (q @ np.swapaxes(keys, -1, -2))            # (Nmb, Head, Group, Seq, Channel)
    p = dynamic_masked_softmax(scores, to_dynamic_index(cached), sink=sink)

Scores have 5 axes, (Nmb, Head, Group, Seq, Channel), or 4, (Nmb, Head x Group, Seq, Channel); they are float32, float16
or bfloat16, of any strides. Everything is computed in float32 and returned in the type of the scores, except statistics
of rows, which are float32. An `index` is an integer of 0 or more, or a vector of Nmb of them, one for each entry of
axis 0.

What is masked is excluded: its probability is 0, whatever it holds, and an axis that is masked altogether gives 0. The
document does not define its MASK_VALUE; as the maximum of such a row it is the lowest float32. A mask is of any type
that can be compared with 0. An axis may be -1, its default, although the document says `0 <= axis`; negative axes
therefore count from the end. Where it has no default, in insert, window_insert and window_slice, it is 0 or more.

The document's constraints hold unless strict=False says otherwise, where an operator has that argument.

Every operator raises ValueError, with a line that names the argument and its value, before it writes anything.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggml_backend_npu.documents import run
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.softmax import Floats, Rows, masked, masked_tile
from quant.kernels.jit import engine

__all__ = [
    "dynamic_flash_attn_tile",
    "dynamic_load",
    "dynamic_masked_softmax",
    "dynamic_store",
    "flash_attn_recompute",
    "flash_attn_tile",
    "insert",
    "masked_softmax",
    "nn_pad",
    "softmax",
    "to_dynamic_index",
    "window_insert",
    "window_slice",
    "window_softmax",
]

Array = NDArray[Any]
Index = int | Array  # of a buffer; or one for each entry of axis 0
Statistics = tuple[Floats, Array, Floats]

_BF16 = np.dtype(ml_dtypes.bfloat16)
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), _BF16)
_MARKED = (np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float16))

# arguments


def _shown(value: Any) -> str:
    """A value as text on one line."""
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]}..."


def _int(name: str, value: Any, least: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} {_shown(value)}: must be an integer") from None
    if least is not None and number < least:
        raise ValueError(f"{name} {number}: must be at least {least}")
    return number


def _axis(axis: Any, array: Array, from_end: bool = True) -> int:
    """The axis, counted from the first; from_end: it may be negative."""
    number = _int("axis", axis)
    if array.ndim == 0:
        raise ValueError(f"axis {number}: a single number has no axes")
    if not (-array.ndim if from_end else 0) <= number < array.ndim:
        raise ValueError(f"axis {number}: must be from {-array.ndim if from_end else 0} to {array.ndim - 1}")
    return number % array.ndim


def _array(name: str, value: Any) -> Array:
    """An array of numbers of any type. Raises ValueError for anything else."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        array = np.empty(0, object)
    if array.dtype.kind in "OSUMmV" and array.dtype.type.__module__ != ml_dtypes.bfloat16.__module__:
        raise ValueError(f"{name} {_shown(value)}: must be an array of numbers")
    return array


def _floats(name: str, value: Any) -> Array:
    array = _array(name, value)
    if array.dtype not in _FLOATS:
        raise ValueError(f"{name} of {array.dtype}: must be float32, float16 or bfloat16")
    return array


def _index(index: Any, n: int, most: int | None = None) -> Index:
    """A checked index: an int, or one for each of n entries."""
    entries = np.asarray(index)
    if entries.dtype.kind not in "iu":
        raise ValueError(f"index {_shown(index)}: must be an integer, or integers for {n} entries of axis 0")
    if entries.size != 1 and entries.shape != (n,):
        raise ValueError(f"index of shape {entries.shape}: must be one integer, or {n}, one for each entry of axis 0")
    for value in entries.reshape(-1).tolist():
        if value < 0 or (most is not None and value > most):
            bounds = "at least 0" if most is None else f"from 0 to {most}"
            raise ValueError(f"index {value}: must be {bounds}")
    return int(entries.reshape(-1)[0]) if entries.size == 1 else entries


def _each(index: Index, axis: int, *arrays: Array) -> Iterator[tuple[int, int, list[Array]]]:
    """(index, axis, arrays) of each part that has its own index."""
    if isinstance(index, int):
        yield index, axis, [*arrays]
        return
    if axis == 0:
        raise ValueError(f"index of shape {index.shape}: along axis 0 there is one index for all")
    for n, value in enumerate(index.tolist()):
        yield value, axis - 1, [array[n] for array in arrays]


def _part(axis: int, begin: int | None, end: int | None) -> tuple[slice, ...]:
    return (*[slice(None)] * axis, slice(begin, end))


def _same_but(axis: int, name: str, array: Array, data: Array) -> None:
    """Checks that an array has the rank, the type and, except for one axis, the shape of data."""
    if array.dtype != data.dtype:
        raise ValueError(f"{name} of {array.dtype}: must be of {data.dtype}, as data is")
    shape, needed = ([*each.shape] for each in (array, data))
    if len(shape) == len(needed):
        shape[axis] = needed[axis]
    if shape != needed:
        raise ValueError(f"{name} of shape {array.shape}: must be {data.shape} but for axis {axis}")


def _kind(dtype: np.dtype[Any]) -> str:
    return "float" if dtype == _BF16 or dtype.kind == "f" else "integer" if dtype.kind in "iu" else dtype.name


def _as(dtype: np.dtype[Any], value: Array) -> Array:
    """The same numbers in another type: any value, where the type has all of the value's type; otherwise only numbers
    that the type has, of its own kind."""
    beyond = value.dtype.kind in "iu" and value.itemsize == 8 and dtype.kind in "fc"  # NumPy calls that safe
    if np.can_cast(value.dtype, dtype, "safe") and not beyond:
        return value
    if _kind(dtype) == _kind(value.dtype):
        with np.errstate(all="ignore"):
            converted = value.astype(dtype)
        if ((converted == value) | ((converted != converted) & (value != value))).all():
            return converted
    raise ValueError(f"value of {value.dtype}: ptr is of {dtype}, which does not have all of its numbers")


# memory


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
    value, most = int(buffer.reshape(-1)[0]), _int("max", max, -1)
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
    source = _array("ptr", ptr)
    if index is None:
        return np.array(source, order="C")
    along = _axis(axis, source)
    loaded = np.zeros(source.shape, source.dtype)
    for length, at, (to, values) in _each(_index(index, len(source)), along, loaded, source):
        to[_part(at, 0, length)] = values[_part(at, 0, length)]
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
    values = _array("value", value)
    along = ptr.ndim if index is None else _axis(axis, ptr)
    fits = values.ndim == ptr.ndim and all(
        v == p or (v > p and i == along) for i, (v, p) in enumerate(zip(values.shape, ptr.shape, strict=True))
    )
    if not fits:
        raise ValueError(f"value of shape {values.shape}: does not fit ptr of shape {ptr.shape}")
    parts = [(ptr, values)]
    if index is not None:
        parts = []
        for length, at, (to, new) in _each(_index(index, len(ptr)), along, ptr, values):
            part = _part(at, 0, min(length, to.shape[at]))
            parts.append((to[part], new[part]))
    stored = [_as(ptr.dtype, new) for _, new in parts]
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
    array, new = _array("data", data), _array("updates", updates)
    along = _axis(axis, array, from_end=False)
    _same_but(along, "updates", new, array)
    size, n_new = array.shape[along], new.shape[along]
    if n_new > size:
        raise ValueError(f"updates of shape {new.shape}: longer along axis {along} than data of shape {array.shape}")
    at = _index(index, len(array))
    for first in np.ravel(at).tolist():
        if first >= size + (not strict):
            raise ValueError(f"index {first}: must be {'below' if strict else 'at most'} {size}, data's length")
        if strict and size - first < n_new:
            raise ValueError(f"index {first}: {n_new} updates from there do not fit into {size}")
    updated = np.array(array, order="C")
    for first, part, (to, values) in _each(at, along, updated, new):
        to[_part(part, first, first + n_new)] = values[_part(part, 0, size - first)]
    return updated


def window_insert(data: ArrayLike, updates: ArrayLike, axis: int, index: ArrayLike) -> Array:
    """The first `index` elements of data along an axis, then updates, then zeros: as long as both together.

    data     any shape, any type
    updates  of data's type and, except for the axis, shape
    index    0 or more; at data's length or above, updates are appended

    The document does not say what follows the updates; window_softmax excludes it.
    """
    array, new = _array("data", data), _array("updates", updates)
    along = _axis(axis, array, from_end=False)
    _same_but(along, "updates", new, array)
    at = _index(index, len(array))
    size, n_new = array.shape[along], new.shape[along]
    updated = np.zeros((*array.shape[:along], size + n_new, *array.shape[along + 1 :]), array.dtype)
    for value, part, (to, old, values) in _each(at, along, updated, array, new):
        first = min(value, size)
        to[_part(part, 0, first)] = old[_part(part, 0, first)]
        to[_part(part, first, first + n_new)] = values
    return updated


def window_slice(data: ArrayLike, index: ArrayLike, axis: int, window_size: int, *, padded: bool = False) -> Array:
    """A copy of the `window_size` elements along an axis that end before `index`; of the first `index`, where these are
    fewer.

    data         any shape, any type, no shorter along the axis than the window
    index        0 or more; above data's length it counts as that length. If there is one per entry of axis 0, all must
                 give the same number of elements, unless padded
    padded       zeros follow where index < window_size, so that the result always fits a block of a window's length
    """
    array = _array("data", data)
    along, window = _axis(axis, array, from_end=False), _int("window_size", window_size, 1)
    at = _index(index, len(array))
    size = array.shape[along]
    if size < window:
        raise ValueError(f"window_size {window}: data of shape {array.shape} is shorter along axis {along}")
    lengths = {window} if padded else {min(value, window) for value in np.ravel(at).tolist()}
    if len(lengths) > 1:
        raise ValueError(f"index {_shown(index)}: slices of {sorted(lengths)} elements are no one array, unless padded")
    n = lengths.pop() if lengths else window
    sliced = np.zeros((*array.shape[:along], n, *array.shape[along + 1 :]), array.dtype)
    for value, part, (to, old) in _each(at, along, sliced, array):
        end = min(value, size)
        begin = max(0, end - window)
        to[_part(part, 0, end - begin)] = old[_part(part, begin, end)]
    return sliced


_MODES = {"constant": "constant", "reflect": "reflect", "edge": "edge", "replicate": "edge"}


def _pads(pad_size: Any) -> tuple[int, int]:
    sides = [pad_size, pad_size] if np.ndim(pad_size) == 0 else [*pad_size]
    if len(sides) != 2:
        raise ValueError(f"pad_size {_shown(pad_size)}: must be one number for both sides, or one for each")
    before, after = (_int("pad_size", side, 0) for side in sides)
    return before, after


def _constant(value: Any, dtype: np.dtype[Any]) -> Array:
    """The value in a type: rounded where the type has fractions, otherwise exact. Raises ValueError where that
    fails."""
    try:
        number: Any = None if isinstance(value, str | bytes) else np.asarray(value).item()
        if dtype in _FLOATS or dtype.kind in "fc":
            with np.errstate(over="ignore"):
                constant = np.array(float(number)).astype(dtype)
            holds = np.isfinite(constant) or not np.isfinite(number)
        else:
            constant = np.array(int(number), dtype)
            holds = constant == number
    except (TypeError, ValueError, OverflowError):
        holds = False
    if not holds:
        raise ValueError(f"value {_shown(value)}: must be a number that {dtype} has")
    return constant


def nn_pad(input: ArrayLike, value: Any, axis: int, pad_size: Any, mode: str = "constant") -> Array:
    """The input with elements added before and after it along an axis, of its type.

    value     what is added in mode constant; a number that the type has, where the document says int
    pad_size  how many on each side: (left, right), or a number for both
    mode      constant; reflect: mirrored at the border, which is not repeated; edge, which the document also calls
              replicate: the border's element
    """
    array = _array("input", input)
    along = _axis(axis, array)
    before, after = _pads(pad_size)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"mode {_shown(mode)}: must be one of {', '.join(_MODES)}")
    size = array.shape[along]
    if _MODES[mode] != "constant" and size == 0:
        raise ValueError(f"mode {mode}: input of shape {array.shape} has nothing along axis {along}")
    if mode == "reflect" and max(before, after) >= size:
        raise ValueError(f"pad_size {max(before, after)}: mode reflect has {size - 1} elements to mirror")
    widths = [(0, 0)] * along + [(before, after)] + [(0, 0)] * (array.ndim - along - 1)
    if _MODES[mode] == "constant":
        return np.pad(array, widths, constant_values=_constant(value, array.dtype))
    return np.pad(array, widths, mode="edge" if _MODES[mode] == "edge" else "reflect")


# softmax


def _merged(x: Array) -> Array | None:
    """5 axes as 4, the second and third merged; None where that would be a copy."""
    n, head, group, seq, channel = x.shape
    apart = head != 1 and group != 1 and x.strides[1] != group * x.strides[2]
    return None if apart else x.reshape(n, head * group, seq, channel)


def _compiled(
    dst: Array,
    x: Array,
    marks: Array | None,
    sink: Floats | None,
    offsets: NDArray[np.int64] | None,
    window: int,
    statistics: tuple[Floats | None, Floats, Floats] | None,
) -> None:
    if any(stride < 0 for stride in x.strides):
        x = x.copy()
    if x.ndim == 5:
        merged, merged_marks = _merged(x), None if marks is None else _merged(marks)
        if merged is None or (marks is not None and merged_marks is None):
            for n in range(len(x)):
                part = None
                if statistics is not None:
                    before, maxima, sums = statistics
                    part = (None if before is None else before[n], maxima[n], sums[n])
                _compiled(
                    dst[n],
                    x[n],
                    None if marks is None else marks[n],
                    None if sink is None else sink[0],
                    None if offsets is None else np.full(x.shape[1], offsets[n]),
                    window,
                    part,
                )
            return
        x, dst, marks = merged, dst.reshape(merged.shape), merged_marks
        sink = None if sink is None else sink.reshape(1, -1, 1, 1)
    sinks = None if sink is None else np.broadcast_to(sink[..., 0], x.shape[:3])
    rows = Rows(
        Tensor.of(dst),
        Tensor.of(x),
        marks=marks,
        sinks=sinks,
        offsets=offsets,
        window=window,
        statistics=statistics,
    )
    run(rows.bind())


def _kept(x: Array, marks: Array | None, offsets: NDArray[np.int64] | None, window: int) -> NDArray[np.bool_]:
    """The mask of the elements that take part, with as many axes as x, to which it is broadcast."""
    kept = np.ones([1] * x.ndim, np.bool_) if marks is None else marks != 0
    if offsets is None:
        return kept
    position = offsets.reshape(-1, *[1] * (x.ndim - 1)) + np.arange(x.shape[-2])[:, None]
    column = np.arange(x.shape[-1])
    within = (column > position - window) if window else np.True_
    return kept & (column <= position) & within


def _softmax(
    x: Array,
    axis: int = -1,
    marks: Array | None = None,
    sink: Floats | None = None,
    offsets: NDArray[np.int64] | None = None,
    window: int = 0,
) -> Array:
    if axis % x.ndim != x.ndim - 1:  # a sink is a column of its own, which is not in the output
        kept = np.broadcast_to(_kept(x, marks, offsets, window), x.shape)
        along_last = _softmax(np.moveaxis(x, axis, -1), marks=np.moveaxis(kept, axis, -1))
        return np.moveaxis(along_last, -1, axis)
    if engine() == "reference":
        return masked(x.astype(np.float32), _kept(x, marks, offsets, window), sink).astype(x.dtype)
    output = np.empty(x.shape, x.dtype)
    _compiled(output, x, _broadcast(marks, x), sink, offsets, window, None)
    return output


def _broadcast(marks: Array | None, x: Array) -> Array | None:
    return None if marks is None else np.broadcast_to(marks, x.shape)


def _tile(
    x: Array, marks: Array | None, sink: Floats | None, offsets: NDArray[np.int64] | None, before: Floats | None
) -> Statistics:
    if engine() == "reference":
        maxima, e, sums = masked_tile(x.astype(np.float32), _kept(x, marks, offsets, 0), sink, before)
        return maxima, e.astype(x.dtype), sums
    e, maxima, sums = np.empty(x.shape, x.dtype), *(np.empty((*x.shape[:-1], 1), np.float32) for _ in range(2))
    _compiled(e, x, _broadcast(marks, x), sink, offsets, 0, (before, maxima, sums))
    return maxima, e, sums


def _scores(input: Any, axis: Any = -1) -> tuple[Array, int]:
    """Scores of 4 or 5 axes, and the number of the axis."""
    x = _floats("input", input)
    if x.ndim not in (4, 5):
        raise ValueError(f"input of shape {x.shape}: must have 4 axes or 5")
    along = _axis(axis, x)
    if x.shape[along] == 0:
        raise ValueError(f"input of shape {x.shape}: there is nothing along axis {along}")
    return x, along


def _marks(name: str, mask: Any, shape: tuple[int, ...], x: Array) -> Array:
    """A mask of this shape, of a type that the kernel reads; its first axis may be 1."""
    marks = _array(name, mask)
    if marks.ndim != len(shape) or marks.shape[0] not in (1, shape[0]) or marks.shape[1:] != shape[1:]:
        raise ValueError(f"{name} of shape {marks.shape}: must be {shape} for input of shape {x.shape}")
    if marks.dtype == _BF16:
        return marks.view(np.float16)  # zeros of both signs have the same bits
    return marks if marks.dtype in _MARKED else marks != 0


def _mask(mask: Any, x: Array) -> Array:
    """(Nmb, 1, 1, Seq, Channel) or (Nmb, 1, Seq, Channel)."""
    return _marks("mask", mask, (x.shape[0], *[1] * (x.ndim - 3), *x.shape[-2:]), x)


def _columns(mask: Any, x: Array) -> Array | None:
    """(Nmb, Channel), with axes added for broadcasting."""
    if mask is None:
        return None
    marks = _marks("mask", mask, (x.shape[0], x.shape[-1]), x)
    return np.expand_dims(marks, tuple(range(1, x.ndim - 1)))


def _sink(sink: Any, x: Array) -> Floats | None:
    """(1, Head, Group, 1, 1) or (1, Head x Group, 1, 1), as contiguous float32."""
    if sink is None:
        return None
    array, shape = _floats("sink", sink), (1, *x.shape[1:-2], 1, 1)
    if array.shape != shape:
        raise ValueError(f"sink of shape {array.shape}: must be {shape} for input of shape {x.shape}")
    return np.ascontiguousarray(array, np.float32)


def _before(row_max_i: Any, x: Array) -> Floats | None:
    if row_max_i is None:
        return None
    array, shape = _floats("row_max_i", row_max_i), (*x.shape[:-1], 1)
    if array.shape != shape:
        raise ValueError(f"row_max_i of shape {array.shape}: must be {shape} for input of shape {x.shape}")
    return np.ascontiguousarray(array, np.float32)


def _offsets(index: Any, x: Array, most: int) -> NDArray[np.int64]:
    return np.full(len(x), _index(index, len(x), most), np.int64)


def softmax(input: ArrayLike, axis: int = -1) -> Array:
    """e ** (x - max) / sum along an axis: float32, float16 or bfloat16 of any shape, in that type.

    A NaN, or nothing but -inf, along the axis gives NaN there.
    """
    x = _floats("input", input)
    along = _axis(axis, x)
    if x.shape[along] == 0:
        raise ValueError(f"input of shape {x.shape}: there is nothing along axis {along}")
    rows = np.moveaxis(x, along, -1)
    shape = rows.shape
    if rows.ndim < 4:
        rows = rows.reshape(*[1] * (4 - rows.ndim), *shape)
    elif rows.ndim > 5:
        rows = rows.reshape(prod(shape[:-4]), *shape[-4:])
    return np.moveaxis(_softmax(rows).reshape(shape), -1, along)


def masked_softmax(input: ArrayLike, mask: ArrayLike, sink: ArrayLike | None = None, axis: int = -1) -> Array:
    """softmax along an axis over the elements that the mask keeps.

    input  (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    mask   (Nmb or 1, 1, 1, Seq, Channel) or (Nmb or 1, 1, Seq, Channel), any type: 0 where input is excluded
    sink   (1, Head, Group, 1, 1) or (1, Head x Group, 1, 1), float: one more column, which counts in each row's sum and
           has no place in the output (the document's `output[...:-1]` is `output[..., :-1]`). It is added along the
           last axis whatever axis says, as in the document, and so has no effect along another one
    """
    x, along = _scores(input, axis)
    return _softmax(x, along, _mask(mask, x), _sink(sink, x))


def dynamic_masked_softmax(
    input: ArrayLike,
    index: ArrayLike,
    mask: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    axis: int = -1,
) -> Array:
    """softmax along an axis with a causal mask: row i of Seq has columns 0 to index + i, less what is masked.

    input  (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    index  how many tokens came before row 0: 0 to Channel
    mask   (Nmb or 1, Channel), any type: 0 where a column is excluded
    sink   see masked_softmax

    The document's own mask would hide the new tokens, as it is 1 below index only; here a given mask also applies to
    them. Its syntax line calls the operator causal_masked_softmax, its algorithm calls the index length.
    """
    x, along = _scores(input, axis)
    return _softmax(x, along, _columns(mask, x), _sink(sink, x), _offsets(index, x, x.shape[-1]))


def window_softmax(
    input: ArrayLike,
    index: ArrayLike,
    sink: ArrayLike | None = None,
    window_size: int | None = None,
    axis: int = -1,
    pad_c: int = -1,
    *,
    strict: bool = True,
) -> Array:
    """softmax along an axis over a window: row i of Seq has the window_size columns that end with index + i.

    input        (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel), Channel >= window_size + Seq
    index        how many tokens of the window came before row 0: 0 to window_size
    sink         see masked_softmax
    window_size  at least 128, and a multiple of 64; required, though the document has a default
    pad_c        any integer, without effect: nothing in the document's algorithm reads it
    strict       False: a window of 1 or more

    The document's own mask would hide the new tokens, as it is 1 below index only.
    """
    x, along = _scores(input, axis)
    logits = _sink(sink, x)
    if window_size is None:
        raise ValueError("window_size None: is required")
    window = _int("window_size", window_size, 1)
    if strict and (window < 128 or window % 64):
        raise ValueError(f"window_size {window}: must be at least 128 and a multiple of 64")
    _int("pad_c", pad_c)
    if x.shape[-1] < window + x.shape[-2]:
        raise ValueError(f"input of shape {x.shape}: a window of {window} and {x.shape[-2]} rows need more columns")
    return _softmax(x, along, None, logits, _offsets(index, x, window), window)


def flash_attn_tile(input: ArrayLike, mask: ArrayLike, row_max_i: ArrayLike | None = None) -> Statistics:
    """One tile of a flash attention: (row_max_global, row_exp_norm, row_sum_cur).

    input      (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    mask       (Nmb or 1, 1, 1, Seq, Channel) or (Nmb or 1, 1, Seq, Channel), any type: 0 where input is excluded
    row_max_i  (..., Seq, 1), float: row_max_global of the tile before; None for the first tile

    row_max_global  (..., Seq, 1), float32: the greatest score of the row so far; without any, the lowest float32
    row_exp_norm    input's shape and type: e ** (input - row_max_global)
    row_sum_cur     (..., Seq, 1), float32: its sum over the tile

    Reductions keep their axis, which the document's algorithm drops. A score of -inf counts for nothing, so that tiles
    give what the whole row would. A NaN of row_max_i, or of input where it is not masked, makes all three NaN in its
    row, as it makes the row of a softmax NaN.
    """
    x, _ = _scores(input)
    return _tile(x, _mask(mask, x), None, None, _before(row_max_i, x))


def dynamic_flash_attn_tile(
    input: ArrayLike,
    index: ArrayLike,
    row_max_i: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sink: ArrayLike | None = None,
) -> Statistics:
    """flash_attn_tile with a causal mask: row i of Seq has columns 0 to index + i, less what is masked.

    index  how many of the tokens before row 0 are in this tile: 0 to Channel
    mask   (Nmb or 1, Channel), any type: 0 where a column is excluded
    sink   see masked_softmax; it counts in the maximum and in the sum, so only one tile of a row may be given it

    The caller must leave out a tile that begins after the last row's token: its index would be 0, which is also that of
    a tile that begins with row 0.
    """
    x, _ = _scores(input)
    marks, offsets = _columns(mask, x), _offsets(index, x, x.shape[-1])
    return _tile(x, marks, _sink(sink, x), offsets, _before(row_max_i, x))


def flash_attn_recompute(
    row_max_prev: ArrayLike,
    row_max_global: ArrayLike,
    row_sum_prev: ArrayLike,
    row_sum_cur: ArrayLike,
    attn_out_prev: ArrayLike,
    attn_out_cur: ArrayLike,
) -> tuple[Array, Array]:
    """Combines a tile with the tiles before it, relative to one maximum: (row_sum, attn_out) of both.

    row_*           (..., Seq, 1), float: of the rows before, and of the tile
    attn_out_*      (..., Seq, D), float: row_exp_norm @ values, not yet divided by the sums

    row_sum, attn_out  of the shape and type of row_sum_prev and attn_out_prev; attn_out / row_sum is the attention

    The document's `row_sum_global`, which it does not define, is row_sum_cur.
    """
    rows = {
        name: _floats(name, value)
        for name, value in (
            ("row_max_prev", row_max_prev),
            ("row_max_global", row_max_global),
            ("row_sum_prev", row_sum_prev),
            ("row_sum_cur", row_sum_cur),
        )
    }
    before, now = _floats("attn_out_prev", attn_out_prev), _floats("attn_out_cur", attn_out_cur)
    if before.ndim < 2:
        raise ValueError(f"attn_out_prev of shape {before.shape}: must have rows and columns")
    if now.shape != before.shape or now.dtype != before.dtype:
        like = f"{before.shape}, {before.dtype}, as attn_out_prev"
        raise ValueError(f"attn_out_cur of shape {now.shape}, {now.dtype}: must be of shape {like}")
    needed = (*before.shape[:-1], 1)
    for name, row in rows.items():
        if row.shape != needed:
            raise ValueError(f"{name} of shape {row.shape}: must be {needed} for attn_out_prev of shape {before.shape}")
    maximum, maximum_now, total, total_now = rows.values()
    with np.errstate(all="ignore"):
        difference = np.subtract(maximum, maximum_now, dtype=np.float32)
        factor = np.exp(np.where(maximum == maximum_now, np.float32(0), difference))
        return _scaled_sum(factor, total, total_now), _scaled_sum(factor, before, now)


def _scaled_sum(factor: Floats, x: Array, y: Array) -> Array:
    """factor * x + y in float32, as x's type."""
    output = np.empty(x.shape, x.dtype)
    if x.dtype == np.float32:
        np.multiply(factor, x, out=output)
        return np.add(output, y, out=output, casting="same_kind")
    operands: Any = [np.broadcast_to(factor, x.shape), x, y, output]
    roles: Any = [["readonly"], ["readonly"], ["readonly"], ["writeonly"]]
    in_float32: Any = [np.float32] * 4
    with np.nditer(
        operands, ["external_loop", "buffered", "zerosize_ok"], roles, in_float32, casting="same_kind"
    ) as pieces:
        for f, a, b, to in pieces:
            np.multiply(f, a, out=to)
            to += b
    return output
