"""Softmax of scores, masked by arrays or positions; and its tiles, which flash attention joins."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggml_backend_npu.documents import run
from ggml_backend_npu.documents.rbln.arguments import (
    BF16,
    Array,
    array_of,
    axis_of,
    floats_of,
    index_of,
    integer,
)
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.softmax import Floats, Rows, masked, masked_tile
from quant.kernels.jit import engine

Statistics = tuple[Floats, Array, Floats]

_MARKED = (np.dtype(np.bool_), np.dtype(np.float32), np.dtype(np.float16))


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
    x = floats_of("input", input)
    if x.ndim not in (4, 5):
        raise ValueError(f"input of shape {x.shape}: must have 4 axes or 5")
    along = axis_of(axis, x)
    if x.shape[along] == 0:
        raise ValueError(f"input of shape {x.shape}: there is nothing along axis {along}")
    return x, along


def _marks(name: str, mask: Any, shape: tuple[int, ...], x: Array) -> Array:
    """A mask of this shape, of a type that the kernel reads; its first axis may be 1."""
    marks = array_of(name, mask)
    if marks.ndim != len(shape) or marks.shape[0] not in (1, shape[0]) or marks.shape[1:] != shape[1:]:
        raise ValueError(f"{name} of shape {marks.shape}: must be {shape} for input of shape {x.shape}")
    if marks.dtype == BF16:
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
    array, shape = floats_of("sink", sink), (1, *x.shape[1:-2], 1, 1)
    if array.shape != shape:
        raise ValueError(f"sink of shape {array.shape}: must be {shape} for input of shape {x.shape}")
    return np.ascontiguousarray(array, np.float32)


def _before(row_max_i: Any, x: Array) -> Floats | None:
    if row_max_i is None:
        return None
    array, shape = floats_of("row_max_i", row_max_i), (*x.shape[:-1], 1)
    if array.shape != shape:
        raise ValueError(f"row_max_i of shape {array.shape}: must be {shape} for input of shape {x.shape}")
    return np.ascontiguousarray(array, np.float32)


def _offsets(index: Any, x: Array, most: int) -> NDArray[np.int64]:
    return np.full(len(x), index_of(index, len(x), most), np.int64)


def softmax(input: ArrayLike, axis: int = -1) -> Array:
    """e ** (x - max) / sum along an axis: float32, float16 or bfloat16 of any shape, in that type.

    A NaN, or nothing but -inf, along the axis gives NaN there.
    """
    x = floats_of("input", input)
    along = axis_of(axis, x)
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

    input        (Nmb, Head, Group, Seq, Channel) or (Nmb, Head x Group, Seq, Channel), Channel >= index + Seq
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
    window = integer("window_size", window_size, 1)
    if strict and (window < 128 or window % 64):
        raise ValueError(f"window_size {window}: must be at least 128 and a multiple of 64")
    integer("pad_c", pad_c)
    offsets = _offsets(index, x, window)
    last = int(offsets.max(initial=0))
    if x.shape[-1] < last + x.shape[-2]:
        raise ValueError(f"input of shape {x.shape}: {x.shape[-2]} rows from index {last} on need more columns")
    return _softmax(x, along, None, logits, offsets, window)


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
        name: floats_of(name, value)
        for name, value in (
            ("row_max_prev", row_max_prev),
            ("row_max_global", row_max_global),
            ("row_sum_prev", row_sum_prev),
            ("row_sum_cur", row_sum_cur),
        )
    }
    before, now = floats_of("attn_out_prev", attn_out_prev), floats_of("attn_out_cur", attn_out_cur)
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
