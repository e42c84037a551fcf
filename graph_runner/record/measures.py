"""What is kept of a node's result: its hash, statistics, and a sketch that tells how far it is from another run's.

The sketch of n values x are seven sums of +x[i] or -x[i]; the signs depend on i alone, so two runs have the same. The
squared difference of two such sums is on average the sum of (x[i] - y[i])^2, whatever the values are (Alon, Matias and
Szegedy, The space complexity of approximating the frequency moments, 1996; Achlioptas, Database-friendly random
projections, 2003). `nmse` is the mean of seven, over the sum of x[i]^2. Signs come from a table, for each block of 512
values from another place of it on, and all of a block are turned or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml import structs
from quant.kernels.jit import (
    array_at,
    bits_float,
    call_kernel,
    callback,
    copy,
    f16_to_f32,
    float_bits,
    inlined,
    on_stack,
    reduced,
)
from quant.kernels.late import types

N_SUMS = 7
ROW = np.dtype(
    [
        ("hash", "<u8"), ("sketch", "<f4", N_SUMS), ("min", "<f4"), ("max", "<f4"), ("mean", "<f4"), ("norm", "<f4"),
        ("nan", "<u4"),
    ]
)  # fmt: skip
"""A node's result: xxh3-64 of its bytes, row by row without gaps; the sketch; min and max of what is not NaN; mean and
norm, in which what is not finite counts as 0; how many values are NaN."""
Rows = NDArray[Any]  # of ROW

UNDER = 5.65  # with 99% an NMSE is at most so often its estimate: 7 / the 1% quantile of chi-squared, 7 degrees
OVER = 2.64  # and with 99% at least its estimate divided by this: the 99% quantile / 7

CODES = {"f32": 0, "f16": 1, "bf16": 2, "i32": 3}  # types that are measured as they lie in memory; others have -1
ITSELF, GROWS, DECODED = 0, 1, 2  # what `result` returns

_HIGHEST, _LOWEST = 0x7FFFFFFF, -0x80000000
_REST, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_u32, _i32, _f32 = types.uint32, types.int32, types.float32


_BLOCK = 512  # values that are summed in float32, with signs from one place of the table on
_PLACES = 1024


def _signs() -> NDArray[np.float32]:
    """+1 and -1 at random, (N_SUMS, _PLACES + _BLOCK)."""
    n = N_SUMS * (_PLACES + _BLOCK)
    bits = _mixed(np.arange(n, dtype=np.uint64)) >> np.uint64(31)
    return np.where(bits, np.float32(-1), np.float32(1)).reshape(N_SUMS, -1)


def _mixed(x: Any) -> Any:
    """lowbias32 of 32 bits in 64 (Chris Wellons, Prospecting for hash functions, 2018)."""
    x = (x ^ (x >> np.uint64(16))) * np.uint64(0x7FEB352D) & np.uint64(0xFFFFFFFF)
    x = (x ^ (x >> np.uint64(15))) * np.uint64(0x846CA68B) & np.uint64(0xFFFFFFFF)
    return x ^ (x >> np.uint64(16))


_SIGNS = _signs()
_mix = inlined(_mixed)


@inlined
def _of_f32(address: Any, i: Any) -> Any:
    return array_at(address, types.float32, i + 1)[i]


@inlined
def _of_f16(address: Any, i: Any) -> Any:
    return f16_to_f32(array_at(address, types.uint16, i + 1)[i])


@inlined
def _of_bf16(address: Any, i: Any) -> Any:
    return bits_float(_u32(_u32(array_at(address, types.uint16, i + 1)[i]) << _u32(16)))


@inlined
def _of_i32(address: Any, i: Any) -> Any:
    return _f32(array_at(address, types.int32, i + 1)[i])


@reduced
def _add(value: Any, address: Any, begin: Any, n: Any, sums: Any, ends: Any) -> None:
    """Adds a block, values [begin, begin + n), to the sums, which are the sketch, the sum and the sum of squares; and
    to the ends, which are the least and the greatest value as integers in the same order, and the number of NaN."""
    a = b = c = d = e = f = g = total = squares = _f32(0)
    low, high, nan = _i32(_HIGHEST), _i32(_LOWEST), _i32(0)
    random = _mix(types.uint64(begin // _BLOCK))
    first = types.int64(random & types.uint64(_PLACES - 1))
    for i in range(n):
        x = value(address, begin + i)
        bits = float_bits(x)
        size = _u32(bits & _REST)
        is_nan = size > _INFINITY
        order = _i32(_i32(bits) ^ _i32(_i32(_i32(bits) >> _i32(31)) & _i32(_HIGHEST)))
        low = min(low, _i32(_HIGHEST) if is_nan else order)
        high = max(high, _i32(_LOWEST) if is_nan else order)
        nan += _i32(1) if is_nan else _i32(0)
        y = x if size < _INFINITY else _f32(0)
        a += y * _SIGNS[0, first + i]
        b += y * _SIGNS[1, first + i]
        c += y * _SIGNS[2, first + i]
        d += y * _SIGNS[3, first + i]
        e += y * _SIGNS[4, first + i]
        f += y * _SIGNS[5, first + i]
        g += y * _SIGNS[6, first + i]
        total += y
        squares += y * y
    for k, part in enumerate((a, b, c, d, e, f, g)):
        sums[k] += -part if (random >> types.uint64(16 + k)) & types.uint64(1) else part
    sums[7] += total
    sums[8] += squares
    ends[0] = min(ends[0], low)
    ends[1] = max(ends[1], high)
    ends[2] += nan


@inlined
def _add_all(value: Any, address: Any, n: Any, sums: Any, ends: Any) -> None:
    for begin in range(0, n, _BLOCK):
        _add(value, address, begin, min(_BLOCK, n - begin), sums, ends)


@inlined
def _float_of(order: Any) -> Any:
    bits = _i32(_i32(order) ^ _i32(_i32(_i32(order) >> _i32(31)) & _i32(_HIGHEST)))
    return bits_float(_u32(bits))


@inlined
def _measure(address: Any, n: Any, code: Any, row: Any) -> None:
    sums, ends = array_at(on_stack(9), types.float64, 9), array_at(on_stack(3), types.int64, 3)
    sums[:] = 0
    ends[0], ends[1], ends[2] = _HIGHEST, _LOWEST, 0
    if code == 0:
        _add_all(_of_f32, address, n, sums, ends)
    elif code == 1:
        _add_all(_of_f16, address, n, sums, ends)
    elif code == 2:
        _add_all(_of_bf16, address, n, sums, ends)
    else:
        _add_all(_of_i32, address, n, sums, ends)
    found = array_at(row + 8, types.float32, 11)
    for k in range(7):
        found[k] = sums[k]
    has_ends = ends[0] <= ends[1]
    found[7] = _float_of(ends[0]) if has_ends else _f32(0)
    found[8] = _float_of(ends[1]) if has_ends else _f32(0)
    found[9] = sums[7] / max(n, 1)
    found[10] = np.sqrt(sums[8])
    array_at(row + 52, types.uint32, 1)[0] = min(ends[2], 0xFFFFFFFF)


@callback(types.int64(types.int64, types.int64, types.int64, types.int64))
def measure(address: int, n: int, code: int, row: int) -> int:
    """Fills all of a row but its hash from n values at an address."""
    _measure(address, n, code, row)
    return 0


WORK = ("scratch", "capacity", "address", "size", "set_rows", "kinds", "data", "places")
"""The int64 that `result` works with: its scratch memory and how many bytes that has; where the bytes of the result lie
afterwards, and how many they are; the number of the op SET_ROWS; where each type has its block size, its bytes and its
code, an int64 each; the data of dst and of the indices of SET_ROWS, 0 if they lie where ggml says."""


@inlined
def _data(tensor: Any, given: Any) -> Any:
    return given if given else array_at(tensor + structs.DATA_AT, types.int64, 1)[0]


@callback(types.int64(types.int64, types.int64, types.int64))
def result(node: int, row: int, work: int) -> int:
    """Finds the bytes that a node has written, by the address of its ggml_tensor, and measures them.

    Bytes with gaps, and the rows that SET_ROWS has written, are put together in the scratch memory. Returns ITSELF;
    GROWS if that has not `size` bytes; or DECODED if the type is not among CODES, and nothing was measured.
    """
    w = array_at(work, types.int64, 8)
    ne, nb = array_at(node + 16, types.int64, 4), array_at(node + 48, types.int64, 4)
    kind = array_at(w[5] + 24 * array_at(node, types.int32, 1)[0], types.int64, 3)
    data = _data(node, w[6])
    is_set_rows = array_at(node + structs.OP_AT, types.int32, 1)[0] == w[4]
    source = array_at(node + structs.SRC_AT, types.int64, 2)
    like = array_at((source[0] if is_set_rows else node) + 16, types.int64, 4)
    n = ne[0] * like[1] * like[2] * like[3]
    line = ne[0] // kind[0] * kind[1]
    w[3] = n // kind[0] * kind[1]
    plain = not is_set_rows and (ne[0] == 1 or nb[0] == kind[1])
    plain = plain and (ne[1] == 1 or nb[1] == line)
    plain = plain and (ne[2] == 1 or nb[2] == line * ne[1])
    plain = plain and (ne[3] == 1 or nb[3] == line * ne[1] * ne[2])
    w[2] = data
    if n and not plain:
        if w[1] < w[3]:
            return GROWS
        w[2] = to = w[0]
        places = source[1] if is_set_rows else node
        at = _data(places, w[7])
        m, step = array_at(places + 16, types.int64, 4), array_at(places + 48, types.int64, 4)
        has_long = step[0] == 8
        for i3 in range(like[3]):
            for i2 in range(like[2]):
                for i1 in range(like[1]):
                    r = i1
                    if is_set_rows:
                        place = at + i1 * step[0] + i2 % m[1] * step[1] + i3 % m[2] * step[2]
                        r = array_at(place, types.int64, 1)[0] if has_long else array_at(place, types.int32, 1)[0]
                    begin = data + r * nb[1] + i2 * nb[2] + i3 * nb[3]
                    if nb[0] == kind[1] or ne[0] == kind[0]:
                        copy(begin, to, line)
                        to += line
                    else:
                        for i0 in range(ne[0]):
                            copy(begin + i0 * nb[0], to, kind[1])
                            to += kind[1]
    if kind[2] < 0:
        return DECODED
    _measure(w[2], n, kind[2], row)
    return ITSELF


ENTRY_BYTES = 8 + structs.TENSOR.size  # the address of a ggml_tensor, and what lies there
NOTES = ("begin", "size", "used", "ops", "python")
"""The int64 that `watch` works with: memory, how many bytes that has and how many are used; where each op has 1 if it
computes something, a byte each; the address of a cb_eval in Python."""


@inlined
def _note(tensor: Any, notes: Any) -> None:
    to = notes[0] + notes[2]
    array_at(to, types.int64, 1)[0] = tensor
    copy(tensor, to + 8, ENTRY_BYTES - 8)
    notes[2] += ENTRY_BYTES


@callback(types.boolean(types.intp, types.boolean, types.intp))
def watch(node: int, ask: bool, notes: int) -> bool:
    """cb_eval that wants each node which computes something, and hands it to the one in Python. Before a node runs, the
    ggml_tensors of its sources that no op computes are copied, and then its own; Python is asked if the memory does not
    suffice."""
    kept = array_at(notes, types.int64, 5)
    if not ask:
        return bool(call_kernel(kept[4], node, 0, 0, 0) & 0xFF)
    if kept[2] + ENTRY_BYTES * (structs.N_SRC + 1) > kept[1]:
        call_kernel(kept[4], node, 1, 0, 0)
    sources = array_at(node + structs.SRC_AT, types.int64, structs.N_SRC)
    for i in range(structs.N_SRC):
        if sources[i] and array_at(sources[i] + structs.OP_AT, types.int32, 1)[0] == 0:
            _note(sources[i], kept)
    _note(node, kept)
    op = array_at(node + structs.OP_AT, types.int32, 1)[0]
    return bool(array_at(kept[3] + op, types.uint8, 1)[0])


def nmse(a: Rows, b: Rows) -> NDArray[np.float64]:
    """Returns an estimate of the NMSE of each row of b beside that of a: sum of (x - y)^2 / sum of x^2. 0 if the hashes
    are equal; infinity if the numbers of NaN differ, or a sum is beyond float32."""
    with np.errstate(all="ignore"):
        squares = np.square(a["sketch"].astype(np.float64) - b["sketch"]).mean(axis=-1)
        power = np.square(a["norm"].astype(np.float64))
        found = np.where(power > 0, squares / power, np.square(b["norm"].astype(np.float64)))
    found[~np.isfinite(found) | (a["nan"] != b["nan"])] = np.inf
    found[a["hash"] == b["hash"]] = 0.0
    return found
