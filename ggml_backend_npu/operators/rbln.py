"""The attention and window operators of RBLN's "Triton Ops API", on NumPy arrays.

Source: https://docs.rbln.ai/latest/ko/software/model_serving/vllm_support/features/triton_rbln/api.html

    scores = scale * (q @ np.swapaxes(keys, -1, -2))            # (Nmb, Head, Group, Seq, Channel)
    p = dynamic_masked_softmax(scores, to_dynamic_index(cached), sink=sink)

Scores have 5 axes, (Nmb, Head, Group, Seq, Channel), or 4, (Nmb, Head x Group, Seq, Channel); they are float32,
float16 or bfloat16, of any strides. Everything is computed in float32 and given in the type of the scores, but for
statistics of rows, which are float32. An `index` is an integer of 0 or more, or a vector of Nmb of them, one for each
entry of axis 0.

What is masked is excluded: its probability is 0, whatever it holds, and a row of which all is masked is 0. The
document's MASK_VALUE is nowhere defined; as the maximum of such a row it is the lowest float32. An axis may be -1, its
default, which the document's `0 <= axis` rules out; a mask, an index or a sink goes with the last axis only. Where it
has no default, in insert, window_insert and window_slice, it is 0 or more.

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

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.softmax import Floats, Rows, masked, masked_tile
from quant.jit import engine

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

# arguments


def _shown(value: Any) -> str:
    """A value in a line."""
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:76]}..."


def _int(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} {_shown(value)}: must be an integer") from None
    if number < least:
        raise ValueError(f"{name} {number}: must be at least {least}")
    return number


def _axis(axis: Any, array: Array, from_end: bool = True) -> int:
    """Which axis it is, counted from the first; from_end: it may be negative."""
    try:
        number = operator.index(axis)
    except TypeError:
        raise ValueError(f"axis {_shown(axis)}: must be an integer") from None
    if not (-array.ndim if from_end else 0) <= number < array.ndim:
        raise ValueError(f"axis {number}: must be from {-array.ndim if from_end else 0} to {array.ndim - 1}")
    return number % array.ndim


def _floats(name: str, value: Any) -> Array:
    array = np.asarray(value)
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
    """(index, axis, arrays) of each part that has an index of its own."""
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
    """An array of the rank, the type and, but for one axis, the shape of data."""
    if array.dtype != data.dtype:
        raise ValueError(f"{name} of {array.dtype}: must be of {data.dtype}, as data is")
    shape, needed = ([*each.shape] for each in (array, data))
    if len(shape) == len(needed):
        shape[axis] = needed[axis]
    if shape != needed:
        raise ValueError(f"{name} of shape {array.shape}: must be {data.shape} but for axis {axis}")


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

    index  how many; more than there are is all. None, which the document also calls length, for all of ptr, whatever
           axis says

    The document does not say what follows: zeros, as 0 * NaN in a product with probabilities would be NaN.
    """
    source = np.asarray(ptr)
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
    value  of ptr's shape, or longer along the axis, of which the rest is ignored; floats go into any floats
    index  how many; more than ptr has is all of ptr. None, which the document also calls length, for all of value,
           whatever axis says
    """
    if not isinstance(ptr, np.ndarray) or not ptr.flags.writeable:
        raise ValueError(f"ptr {type(ptr).__name__}: must be an array that can be written to")
    values = np.asarray(value)
    if not np.can_cast(values.dtype, ptr.dtype, "same_kind"):
        raise ValueError(f"value of {values.dtype}: ptr is of {ptr.dtype}")
    along = ptr.ndim if index is None else _axis(axis, ptr)
    fits = values.ndim == ptr.ndim and all(
        v == p or (v > p and i == along) for i, (v, p) in enumerate(zip(values.shape, ptr.shape, strict=True))
    )
    if not fits:
        raise ValueError(f"value of shape {values.shape}: does not fit ptr of shape {ptr.shape}")
    if index is None:
        ptr[...] = values
        return
    for length, at, (to, new) in _each(_index(index, len(ptr)), along, ptr, values):
        n = min(length, to.shape[at])
        to[_part(at, 0, n)] = new[_part(at, 0, n)]


def insert(data: ArrayLike, updates: ArrayLike, axis: int, index: ArrayLike, *, strict: bool = False) -> Array:
    """A copy of data in which updates stand instead of the elements from `index` on along an axis.

    data     any shape, any type
    updates  of data's type and, but for the axis, shape; along it no longer than data
    index    from 0 to data's length, of which the last leaves data as it is: kernels insert so into full partitions,
             though the document has index < length
    strict   updates of which some would fall behind the end are an error; they are dropped where it is False. None of
             them fit at the index of a full partition, which is no error in either case
    """
    array, new = np.asarray(data), np.asarray(updates)
    along = _axis(axis, array, from_end=False)
    _same_but(along, "updates", new, array)
    size, n_new = array.shape[along], new.shape[along]
    if n_new > size:
        raise ValueError(f"updates of shape {new.shape}: longer along axis {along} than data of shape {array.shape}")
    at = _index(index, len(array), size)
    for first in np.ravel(at).tolist():
        if strict and 0 < size - first < n_new:
            raise ValueError(f"index {first}: {n_new} updates from there do not fit into {size}")
    updated = np.array(array, order="C")
    for first, part, (to, values) in _each(at, along, updated, new):
        to[_part(part, first, first + n_new)] = values[_part(part, 0, size - first)]
    return updated


def window_insert(data: ArrayLike, updates: ArrayLike, axis: int, index: ArrayLike) -> Array:
    """The first `index` elements of data along an axis, then updates, then zeros: as long as both together.

    data     any shape, any type
    updates  of data's type and, but for the axis, shape
    index    0 or more; at data's length or above, updates are appended

    The document does not say what follows the updates; window_softmax excludes it.
    """
    array, new = np.asarray(data), np.asarray(updates)
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


def window_slice(data: ArrayLike, index: ArrayLike, axis: int, window_size: int) -> Array:
    """The `window_size` elements along an axis that end in front of `index`; what is there of them, then zeros.

    data         any shape, any type, no shorter along the axis than the window
    index        0 or more; above data's length it is that length

    The document gives fewer elements where index < window_size; the result goes into a block of a window's length.
    """
    array = np.asarray(data)
    along, window = _axis(axis, array, from_end=False), _int("window_size", window_size, 1)
    at = _index(index, len(array))
    size = array.shape[along]
    if size < window:
        raise ValueError(f"window_size {window}: data of shape {array.shape} is shorter along axis {along}")
    sliced = np.zeros((*array.shape[:along], window, *array.shape[along + 1 :]), array.dtype)
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
    """The value as the type has it: rounded where it has fractions, otherwise the very number."""
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
    """The input with elements added in front of and behind it along an axis, of its type.

    value     what is added in mode constant; a number that the type has, where the document says int
    pad_size  how many on each side: (left, right), or a number for both
    mode      constant; reflect: mirrored at the border, which is not repeated; edge, which the document also calls
              replicate: the border's element
    """
    array = np.asarray(input)
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
    """5 axes as 4, Head x Group one of them; None where that would be a copy."""
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
        merged = _merged(x)
        if merged is None:
            for n in range(len(x)):
                part = None
                if statistics is not None:
                    before, maxima, sums = statistics
                    part = (None if before is None else before[n], maxima[n], sums[n])
                _compiled(
                    dst[n],
                    x[n],
                    None if marks is None else np.broadcast_to(marks, (len(x), *marks.shape[1:]))[n],
                    None if sink is None else sink[0],
                    None if offsets is None else np.full(x.shape[1], offsets[n]),
                    window,
                    part,
                )
            return
        x, dst = merged, dst.reshape(merged.shape)
        marks = None if marks is None else marks[:, 0]
        sink = None if sink is None else sink.reshape(1, -1, 1, 1)
    if marks is not None:
        marks = np.broadcast_to(marks.view(np.float16) if marks.dtype == _BF16 else marks, x.shape)
    sinks = None if sink is None else np.broadcast_to(sink[..., 0], x.shape[:3])
    Rows(
        Tensor.of(dst),
        Tensor.of(x),
        marks=marks,
        sinks=sinks,
        offsets=offsets,
        window=window,
        statistics=statistics,
    ).bind()()


def _kept(x: Array, marks: Array | None, offsets: NDArray[np.int64] | None, window: int) -> NDArray[np.bool_]:
    kept = np.ones(x.shape, np.bool_) if marks is None else np.broadcast_to(marks != 0, x.shape)
    if offsets is None:
        return kept
    position = offsets.reshape(-1, *[1] * (x.ndim - 1)) + np.arange(x.shape[-2])[:, None]
    column = np.arange(x.shape[-1])
    within = (column > position - window) if window else np.True_
    return kept & (column <= position) & within


def _softmax(
    x: Array,
    marks: Array | None = None,
    sink: Floats | None = None,
    offsets: NDArray[np.int64] | None = None,
    window: int = 0,
) -> Array:
    if engine() == "reference":
        return masked(x.astype(np.float32), _kept(x, marks, offsets, window), sink).astype(x.dtype)
    output = np.empty(x.shape, x.dtype)
    _compiled(output, x, marks, sink, offsets, window, None)
    return output


def _tile(
    x: Array, marks: Array | None, sink: Floats | None, offsets: NDArray[np.int64] | None, before: Floats | None
) -> Statistics:
    if engine() == "reference":
        maxima, e, sums = masked_tile(x.astype(np.float32), _kept(x, marks, offsets, 0), sink, before)
        return maxima, e.astype(x.dtype), sums
    e, maxima, sums = np.empty(x.shape, x.dtype), *(np.empty((*x.shape[:-1], 1), np.float32) for _ in range(2))
    _compiled(e, x, marks, sink, offsets, 0, (before, maxima, sums))
    return maxima, e, sums


def _scores(input: Any, axis: Any = -1) -> Array:
    x = _floats("input", input)
    if x.ndim not in (4, 5):
        raise ValueError(f"input of shape {x.shape}: must have 4 axes or 5")
    if _axis(axis, x) != x.ndim - 1:
        raise ValueError(f"axis {axis}: mask, index and sink belong to the last axis of input of shape {x.shape}")
    if x.shape[-1] == 0:
        raise ValueError(f"input of shape {x.shape}: there is nothing along its last axis")
    return x


def _marks(name: str, mask: Any, shape: tuple[int, ...], x: Array) -> Array:
    """A mask of this shape; its first axis may be 1."""
    marks = np.asarray(mask)
    if marks.dtype not in (np.dtype(np.bool_), *_FLOATS):
        raise ValueError(f"{name} of {marks.dtype}: must be bool, float32, float16 or bfloat16")
    if marks.ndim != len(shape) or marks.shape[0] not in (1, shape[0]) or marks.shape[1:] != shape[1:]:
        raise ValueError(f"{name} of shape {marks.shape}: must be {shape} for input of shape {x.shape}")
    return marks


def _mask(mask: Any, x: Array) -> Array:
    """(Nmb, 1, 1, Seq, Channel) or (Nmb, 1, Seq, Channel)."""
    return _marks("mask", mask, (x.shape[0], *[1] * (x.ndim - 3), *x.shape[-2:]), x)


def _columns(mask: Any, x: Array) -> Array | None:
    """(Nmb, Channel), with axes for what it is broadcast to."""
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
    """softmax along the last axis of what the mask leaves.

    input  (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    mask   (Nmb or 1, 1, 1, Seq, Channel) or (Nmb or 1, 1, Seq, Channel), bool or float: 0 where input is excluded
    sink   (1, Head, Group, 1, 1) or (1, Head x Group, 1, 1), float: one more score of each row, which takes its share
           of the sum and has no place in the output (the document's `output[...:-1]` is `output[..., :-1]`)
    """
    x = _scores(input, axis)
    return _softmax(x, _mask(mask, x), _sink(sink, x))


def dynamic_masked_softmax(
    input: ArrayLike,
    index: ArrayLike,
    mask: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    axis: int = -1,
) -> Array:
    """softmax along the last axis of what is causal: row i of Seq has columns 0 to index + i, less what is masked.

    input  (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    index  how many tokens came before row 0: 0 to Channel
    mask   (Nmb or 1, Channel), bool or float: 0 where a column is excluded
    sink   see masked_softmax

    The document's own mask would hide the new tokens, as it is 1 below index only; a mask stays in force for them here.
    Its syntax line calls the operator causal_masked_softmax, its algorithm the index length.
    """
    x = _scores(input, axis)
    return _softmax(x, _columns(mask, x), _sink(sink, x), _offsets(index, x, x.shape[-1]))


def window_softmax(
    input: ArrayLike,
    index: ArrayLike,
    sink: ArrayLike | None = None,
    window_size: int | None = None,
    axis: int = -1,
    pad_c: int = -1,
    *,
    strict: bool = False,
) -> Array:
    """softmax along the last axis of a window: row i of Seq has the window_size columns that end with index + i.

    input        (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel), Channel >= window_size + Seq
    index        how many tokens of the window came before row 0: 0 to window_size
    sink         see masked_softmax
    window_size  1 or more; required, though the document has a default
    pad_c        -1: the document does not say what others would mean
    strict       the document's rule for the size of a window holds: at least 128, and a multiple of 64

    The document's own mask would hide the new tokens, as it is 1 below index only.
    """
    x = _scores(input, axis)
    logits = _sink(sink, x)
    if window_size is None:
        raise ValueError("window_size None: is required")
    window = _int("window_size", window_size, 1)
    if strict and (window < 128 or window % 64):
        raise ValueError(f"window_size {window}: must be at least 128 and a multiple of 64")
    if _int("pad_c", pad_c, -1) != -1:
        raise ValueError(f"pad_c {pad_c}: not supported, must be -1")
    if x.shape[-1] < window + x.shape[-2]:
        raise ValueError(f"input of shape {x.shape}: a window of {window} and {x.shape[-2]} rows need more columns")
    return _softmax(x, None, logits, _offsets(index, x, window), window)


def flash_attn_tile(input: ArrayLike, mask: ArrayLike, row_max_i: ArrayLike | None = None) -> Statistics:
    """One tile of a flash attention: (row_max_global, row_exp_norm, row_sum_cur).

    input      (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel)
    mask       (Nmb or 1, 1, 1, Seq, Channel) or (Nmb or 1, 1, Seq, Channel), bool or float: 0 where input is excluded
    row_max_i  (..., Seq, 1), float: row_max_global of the tile before; None for the first tile

    row_max_global  (..., Seq, 1), float32: the greatest score of the row so far; of none the lowest float32
    row_exp_norm    input's shape and type: e ** (input - row_max_global)
    row_sum_cur     (..., Seq, 1), float32: its sum over the tile

    Reductions keep their axis, which the document's algorithm drops. A score of -inf counts for nothing, so that tiles
    give what the whole row would.
    """
    x = _scores(input)
    return _tile(x, _mask(mask, x), None, None, _before(row_max_i, x))


def dynamic_flash_attn_tile(
    input: ArrayLike,
    index: ArrayLike,
    row_max_i: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    sink: ArrayLike | None = None,
) -> Statistics:
    """flash_attn_tile of what is causal: row i of Seq has columns 0 to index + i, less what is masked.

    index  how many of the tokens before row 0 are in this tile: 0 to Channel
    mask   (Nmb or 1, Channel), bool or float: 0 where a column is excluded
    sink   see masked_softmax; it is in the maximum and in the sum, so only one tile of a row may be given it

    The caller has to leave out a tile that begins behind the last row's token: its index is 0, as is that of a tile
    which begins with row 0.
    """
    x = _scores(input)
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
    """What came before a tile and the tile, relative to one maximum: (row_sum, attn_out) of both.

    row_*           (..., Seq, 1), float: of the rows before, and of the tile
    attn_out_*      (..., Seq, D), float: row_exp_norm @ values, not yet divided by the sums

    row_sum, attn_out  of the shape and type of row_sum_prev and attn_out_prev; attn_out / row_sum is the attention

    The document's `row_sum_global`, which is nowhere defined, is row_sum_cur.
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
