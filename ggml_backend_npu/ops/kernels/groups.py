"""Integers in groups that share a float32 scale: int8, or int4 two to a byte, with the scales in a tensor of their own.

The device layout of q8_0 and q4_0 (`quant.layout`) with groups of any size, as the `scale` and `antiquantGroupSize` of
aclnn calls describe it. `bind_dequantize` and `bind_quantize` bind a call to tensors: the definition in NumPy, or the
compiled kernel that equals it byte for byte. Quants are rounded as ggml's reference functions round them
(quantize_row_q8_0_ref, quantize_row_q4_0_ref), whatever the device's rounding is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels.sides import Side, locate, next_row, row_address, side_at
from quant import blocks
from quant.kernels.jit import (
    CFunction,
    array_at,
    bits_float,
    compiled,
    engine,
    f16_to_f32,
    float_bits,
    inlined,
    round_half_away,
    truncate_to_int32,
)
from quant.kernels.late import types
from quant.kernels.records import Dims, record_at
from quant.kernels.threads import Job, Work
from quant.runs import f32_to_f16

_CHUNK = 1 << 15  # elements converted at a time by the definitions, so that no temporary grows with the tensor

Call = Callable[[], None]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Groups:
    """A tensor of integers, and its scales.

    bits    of an integer: 8, or 4 in two's complement, the low nibble of a byte before the high one
    size    elements of a group, adjacent in a row; divides the row
    quants  i8, ne (d, c, b, a) of int8 or (d / 2, c, b, a) of pairs of int4; any strides
    scales  f32, ne (d / size, c, b, a)
    """

    bits: int
    size: int
    quants: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Groups per dimension, slowest first: (a, b, c, d / size)."""
        return self.scales.ne[::-1]

    def read(self, row: tuple[Indices, ...], columns: Indices) -> NDArray[np.int8]:
        """The integers at indices (i, j, k) and columns l."""
        view = self.quants.view()
        if self.bits == 8:
            quants: NDArray[np.int8] = view[(*row, columns)]
            return quants
        pairs = view.view(np.uint8)[(*row, columns // 2)]
        nibbles: NDArray[np.uint8] = np.where(columns % 2, pairs >> 4, pairs & 15)
        return np.subtract((nibbles ^ 8).view(np.int8), 8, dtype=np.int8)

    def write(self, row: tuple[Indices, ...], columns: Indices, quants: NDArray[np.int8]) -> None:
        """Sets the integers at indices (i, j, k) and columns l."""
        view = self.quants.view()
        if self.bits == 8:
            view[(*row, columns)] = quants
            return
        pairs, nibbles = view.view(np.uint8), quants.view(np.uint8) & 15
        for parity, kept, shift in ((0, 0xF0, 0), (1, 0x0F, 4)):
            half = columns % 2 == parity
            at = tuple(index[half] for index in np.broadcast_arrays(*row, columns // 2))
            pairs[at] = (pairs[at] & kept) | (nibbles[half] << shift)


def bind_dequantize(dst: Tensor, src: Groups, ids: Tensor | None = None) -> Call:
    """The call that fills dst: f32, of any strides; its rows are whole groups, and it shares no bytes with src.

    ids  i32, ne (x, b, a, 1), already checked: dst, ne (d, x, b, a), gets these rows of src. Without ids dst gets all
         elements in logical order; shapes may differ if the element counts agree.
    """
    if engine() == "reference":
        return partial(define_dequantize, dst, src, ids)
    rows = dst.ne[1:] if ids is not None else None
    return _bind(_dequantize, src, dst, _quants_side(src, ids, rows), _scales_side(src, ids, rows))


def bind_quantize(dst: Groups, src: Tensor) -> Call:
    """The call that fills quants and scales of dst from src: f32 or f16, whose rows are whole groups.

    All may have any strides. Shapes may differ if the element counts agree.
    """
    if engine() == "reference":
        return partial(define_quantize, dst, src)
    return _bind(_quantize, dst, src, _quants_side(dst), _scales_side(dst))


# definitions


def define_dequantize(dst: Tensor, src: Groups, ids: Tensor | None = None) -> None:
    """dst[i, j, k, l] = float32(quants[i, j, r, l]) * scales[i, j, r, l // size], r = ids[i, j, k].

    Without ids, element by element in logical order.
    """
    shape = (*dst.ne[:0:-1], dst.ne[0] // src.size)
    for numbers in _chunks(prod(shape), src.size):
        *row, group = _unravel(numbers, shape)
        if ids is None:
            *src_row, src_group = _unravel(numbers, src.shape)
        else:
            i, j, k = row
            src_row, src_group = [i, j, ids.view()[0, i, j, k].astype(np.int64)], group
        quants = src.read((*src_row,), _columns(src_group, src.size))
        with np.errstate(invalid="ignore", over="ignore"):
            values = quants.astype(np.float32) * src.scales.view()[(*src_row, src_group)]
        dst.view()[(*row, _columns(group, src.size))] = values


def define_quantize(dst: Groups, src: Tensor) -> None:
    """For each group x of src, in logical order, with float32 arithmetic:

    int8  d = max |x| / 127,                     quant = round(x / d), halves away from zero
    int4  d = m / -8, m the first largest by |x|, quant = min(15, trunc(x / d + 8.5)) - 8

    where x / d is x * (1 / d), and 0 if d is 0. The scale is d rounded to float16.
    """
    shape = (*src.ne[:0:-1], src.ne[0] // dst.size)
    for numbers in _chunks(prod(shape), dst.size):
        *src_row, src_group = _unravel(numbers, shape)
        *row, group = _unravel(numbers, dst.shape)
        x = src.view()[(*src_row, _columns(src_group, dst.size))].astype(np.float32)
        with np.errstate(all="ignore"):
            if dst.bits == 8:
                d = blocks.largest_magnitude(x) / np.float32(127)
                quants = blocks.low_byte(blocks.round_half_away(x * blocks.reciprocal(d)))
            else:
                d = _first_largest(x) / np.float32(-8)
                codes = blocks.low_byte(x * blocks.reciprocal(d) + np.float32(8.5))
                quants = np.minimum(codes, np.int8(15)) - np.int8(8)
            scales = d.astype(np.float16).astype(np.float32)
        dst.write((*row,), _columns(group, dst.size), quants)
        dst.scales.view()[(*row, group)] = scales


def _first_largest(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """For each row the first of its elements that are largest by magnitude, (n, 1); NaN is skipped, -0 is 0."""
    numbers = np.where(np.isnan(x), np.float32(0), x)
    return np.take_along_axis(numbers, np.abs(numbers).argmax(axis=1)[:, None], axis=1) + np.float32(0)


def _chunks(n_groups: int, size: int) -> Iterator[Indices]:
    """The numbers of all groups, some at a time."""
    step = max(1, _CHUNK // max(1, size))
    for begin in range(0, n_groups, step):
        yield np.arange(begin, min(begin + step, n_groups))


def _unravel(numbers: Indices, shape: tuple[int, ...]) -> tuple[Indices, ...]:
    """Indices of groups by their number in logical order, each (n, 1)."""
    return tuple(index[:, None] for index in np.unravel_index(numbers, shape))


def _columns(group: Indices, size: int) -> Indices:
    """The columns of each group's elements in their row: (n, 1) -> (n, size)."""
    return group * size + np.arange(size)


# kernels


class Grouped(NamedTuple):
    """Three sides in units of groups; addresses and strides of int4 count nibbles, not bytes.

    together  groups of a unit: those that share a byte
    quants_step, floats_step  bytes from an element to the next one
    half      the floats are float16
    """

    bits: int
    size: int
    together: int
    quants_step: int
    floats_step: int
    half: int
    quants: Side
    scales: Side
    floats: Side


def _rows_of(tensor: Tensor, first: int, rows: tuple[int, int, int] | None) -> Dims:
    return (first, *(rows or tensor.ne[1:]))


def _quants_side(of: Groups, ids: Tensor | None = None, rows: tuple[int, int, int] | None = None) -> Side:
    tensor, nibbles = of.quants, 8 // of.bits
    nb1, nb2, nb3 = (nb * nibbles for nb in tensor.nb[1:])
    nb = (of.size * tensor.nb[0], nb1, nb2, nb3)
    return side_at(tensor.address * nibbles, _rows_of(tensor, of.scales.ne[0], rows), nb, ids)


def _scales_side(of: Groups, ids: Tensor | None = None, rows: tuple[int, int, int] | None = None) -> Side:
    tensor = of.scales
    return side_at(tensor.address, _rows_of(tensor, tensor.ne[0], rows), tensor.nb, ids)


def _floats_side(tensor: Tensor, size: int) -> Side:
    return side_at(tensor.address, (tensor.ne[0] // size, *tensor.ne[1:]), (tensor.nb[0] * size, *tensor.nb[1:]))


def _bind(kernel: CFunction, of: Groups, floats: Tensor, quants: Side, scales: Side) -> Job:
    """The kernel over all groups."""
    together = 2 if of.bits == 4 and of.size % 2 else 1
    is_half, sides = floats.type == "f16", (quants, scales, _floats_side(floats, of.size))
    grouped = Grouped(of.bits, of.size, together, of.quants.nb[0], floats.nb[0], is_half, *sides)
    return Job(Work(kernel, grouped, floats.n_elements // of.size // together, 4 * floats.n_elements))


@inlined
def _adjacent(dtype, address, step, i):
    return array_at(address, dtype, 1)[i]


@inlined
def _apart(dtype, address, step, i):
    return array_at(address + i * step, dtype, 1)[0]


@inlined
def _put_adjacent(dtype, address, step, i, value):
    array_at(address, dtype, 1)[i] = value


@inlined
def _put_apart(dtype, address, step, i, value):
    array_at(address + i * step, dtype, 1)[0] = value


@inlined
def _same(x):
    return x


@inlined
def _start(side, unit):
    i0, i1, i2, i3 = locate(side, unit)
    return i0, i1, i2, i3, row_address(side, i1, i2, i3)


@inlined
def _here(side, at):
    return at[4] + at[0] * side.nb[0]


@inlined
def _pairs(side, at, size, step):
    """For a group of int4: the address of its first element's byte, and 1 if it is the high nibble, else 0."""
    high = at[0] * size % 2
    return (_here(side, at) - high * step) // 2, high


@inlined
def _next(side, at):
    """The next position. After the last one it is invalid, but the ids that it reads still exist."""
    if at[0] + 1 < side.ne[0]:
        return at[0] + 1, at[1], at[2], at[3], at[4]
    i1, i2, i3 = next_row(side, at[1], at[2], at[3])
    return 0, i1, i2, i3, row_address(side, i1, i2, i3)


@inlined
def _int4(nibble):
    return types.float32(types.int32(nibble ^ types.uint8(8)) - types.int32(8))


@inlined
def _dequantize_int8(quants, step, scale, floats, floats_step, size):
    if step == 1 and floats_step == 4:
        q = array_at(quants, types.int8, size)
        y = array_at(floats, types.float32, size)
        for i in range(size):
            y[i] = types.float32(q[i]) * scale
        return
    for i in range(size):
        q = _apart(types.int8, quants, step, i)
        array_at(floats + i * floats_step, types.float32, 1)[0] = types.float32(q) * scale


@inlined
def _dequantize_int4(pairs, high, step, scale, floats, floats_step, size):
    if high == 0 and size % 2 == 0 and step == 1 and floats_step == 4:
        q = array_at(pairs, types.uint8, size // 2)
        y = array_at(floats, types.float32, size)
        for i in range(size // 2):
            y[2 * i] = _int4(q[i] & types.uint8(15)) * scale
            y[2 * i + 1] = _int4(q[i] >> types.uint8(4)) * scale
        return
    for i in range(size):
        at = high + i
        pair = _apart(types.uint8, pairs, step, at // 2)
        nibble = pair >> types.uint8(4) if at % 2 else pair & types.uint8(15)
        array_at(floats + i * floats_step, types.float32, 1)[0] = _int4(nibble) * scale


@compiled
def _dequantize(p, begin, end, scratch):
    """`define_dequantize`. A unit is `together` groups."""
    of = record_at(p, Grouped)
    quants, scales, floats, size, together = of.quants, of.scales, of.floats, of.size, of.together
    begin, end = begin * together, end * together
    q, s, y = _start(quants, begin), _start(scales, begin), _start(floats, begin)
    for _ in range(begin, end):
        scale = array_at(_here(scales, s), types.float32, 1)[0]
        if of.bits == 8:
            _dequantize_int8(_here(quants, q), of.quants_step, scale, _here(floats, y), of.floats_step, size)
        else:
            pairs, high = _pairs(quants, q, size, of.quants_step)
            _dequantize_int4(pairs, high, of.quants_step, scale, _here(floats, y), of.floats_step, size)
        q, s, y = _next(quants, q), _next(scales, s), _next(floats, y)
    return 0


@inlined
def _magnitude(x):
    """Bits of |x|, which sort as |x| does; 0 for NaN."""
    bits = float_bits(x) & types.uint32(0x7FFFFFFF)
    return bits if bits <= types.uint32(0x7F800000) else types.uint32(0)


@inlined
def _quantize_group(load, put, widen, dtype, x, step, bits, quants, high, quants_step, size):
    """Returns the group's scale."""
    largest = types.uint32(0)
    for i in range(size):
        largest = max(largest, _magnitude(widen(load(dtype, x, step, i))))
    if bits == 8:
        d = bits_float(largest) / types.float32(127)
    else:
        extreme = types.float32(0)
        for i in range(size):
            value = widen(load(dtype, x, step, i))
            if largest and _magnitude(value) == largest:
                extreme = value
                break
        d = extreme / types.float32(-8)
    inverse = types.float32(1) / d if d != types.float32(0) else types.float32(0)
    if bits == 8:
        for i in range(size):
            code = types.int8(truncate_to_int32(round_half_away(widen(load(dtype, x, step, i)) * inverse)))
            put(types.int8, quants, quants_step, i, code)
    elif high == 0 and size % 2 == 0:
        for i in range(size // 2):
            low = _q4(widen(load(dtype, x, step, 2 * i)), inverse)
            upper = _q4(widen(load(dtype, x, step, 2 * i + 1)), inverse)
            put(types.uint8, quants, quants_step, i, low | types.uint8(upper << types.uint8(4)))
    else:
        for i in range(size):
            code = _q4(widen(load(dtype, x, step, i)), inverse)
            at = high + i
            pair = array_at(quants + at // 2 * quants_step, types.uint8, 1)
            if at % 2:
                pair[0] = (pair[0] & types.uint8(0x0F)) | types.uint8(code << types.uint8(4))
            else:
                pair[0] = (pair[0] & types.uint8(0xF0)) | code
    return f16_to_f32(f32_to_f16(d))


@inlined
def _q4(x, inverse):
    """The nibble of x: its code of 0 to 15, converted to two's complement."""
    code = types.int8(truncate_to_int32(x * inverse + types.float32(8.5)))
    return (types.uint8(min(code, types.int8(15))) ^ types.uint8(8)) & types.uint8(15)


@inlined
def _quantize_from(widen, dtype, itemsize, x, step, bits, quants, high, quants_step, size):
    if step == itemsize and quants_step == 1:
        return _quantize_group(_adjacent, _put_adjacent, widen, dtype, x, step, bits, quants, high, quants_step, size)
    return _quantize_group(_apart, _put_apart, widen, dtype, x, step, bits, quants, high, quants_step, size)


@compiled
def _quantize(p, begin, end, scratch):
    """`define_quantize`. A unit is `together` groups."""
    of = record_at(p, Grouped)
    quants, scales, floats, together = of.quants, of.scales, of.floats, of.together
    bits, size, quants_step, step = of.bits, of.size, of.quants_step, of.floats_step
    begin, end = begin * together, end * together
    x, q, s = _start(floats, begin), _start(quants, begin), _start(scales, begin)
    for _ in range(begin, end):
        to, high = _here(quants, q), types.int64(0)
        if bits == 4:
            to, high = _pairs(quants, q, size, quants_step)
        if of.half:
            scale = _quantize_from(
                f16_to_f32, types.uint16, 2, _here(floats, x), step, bits, to, high, quants_step, size
            )
        else:
            scale = _quantize_from(_same, types.float32, 4, _here(floats, x), step, bits, to, high, quants_step, size)
        array_at(_here(scales, s), types.float32, 1)[0] = scale
        x, q, s = _next(floats, x), _next(quants, q), _next(scales, s)
    return 0
