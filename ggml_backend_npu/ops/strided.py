"""The compiled mover: walks two tensors in logical order, a run at a time, at any strides, one side by row ids.

GET_ROWS, SET_ROWS, CPY, DUP and CONT differ only in how a row is found: GET_ROWS reads rows by ids, SET_ROWS writes
them by ids, the others go in order. `mover` makes the bound call for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu import threads
from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import NUMERICS
from ggml_backend_npu.registry import KernelError
from quant import Rounding, codec
from quant.jit import array_at, compiled, inlined
from quant.runs import CODES, convert_run, copy_blocks, copy_run

_SAME = -1  # source code of a copy: both sides have one type

# the parameters of a walk: two sides, each
#   address, ne[4] in units, nb[4]; for a side by ids: address, bytes of an id, nb[3], ne[1], ne[2] and rows;
#   for a packed side: address and blocks of the packed tensor
_ADDRESS, NE, NB, _IDS, _ID_BYTES, _IDS_NB, _IDS_NE1, _IDS_NE2 = 0, 1, 5, 9, 10, 11, 14, 15
_N_ROWS, _PACKED, _N_PACKED = 16, 17, 18
_SIDE = 19

Parameters = NDArray[np.int64]


@inlined
def _row_id(side, i1, i2, i3):
    address = side[_IDS] + i1 * side[_IDS_NB]
    address += (i2 % side[_IDS_NE1]) * side[_IDS_NB + 1] + (i3 % side[_IDS_NE2]) * side[_IDS_NB + 2]
    if side[_ID_BYTES] == 8:
        return types.int64(array_at(address, types.int64, 1)[0])
    return types.int64(array_at(address, types.int32, 1)[0])


@inlined
def row_address(side, i1, i2, i3):
    """Where row (i1, i2, i3) of a side begins; i1 goes through the side's ids, where it has any."""
    if side[_IDS]:
        i1 = _row_id(side, i1, i2, i3)
    return side[_ADDRESS] + i1 * side[NB + 1] + i2 * side[NB + 2] + i3 * side[NB + 3]


@inlined
def locate(side, unit):
    """The indices of a unit in the logical order, fastest first."""
    i0 = unit % side[NE]
    row = unit // side[NE]
    i1 = row % side[NE + 1]
    row //= side[NE + 1]
    return i0, i1, row % side[NE + 2], row // side[NE + 2]


@inlined
def next_row(side, i1, i2, i3):
    """The indices of the row behind row (i1, i2, i3)."""
    i1 += 1
    if i1 == side[NE + 1]:
        i1 = 0
        i2 += 1
        if i2 == side[NE + 2]:
            i2 = 0
            i3 += 1
    return i1, i2, i3


@compiled
def walk(src, src_code, dst, dst_code, unit_bytes, begin, end):
    """Units [begin, end) of the logical order, from side src to side dst."""
    s0, s1, s2, s3 = locate(src, begin)
    d0, d1, d2, d3 = locate(dst, begin)
    src_row = row_address(src, s1, s2, s3)
    dst_row = row_address(dst, d1, d2, d3)
    unit = begin
    while unit < end:
        count = min(end - unit, src[NE] - s0, dst[NE] - d0)
        x = src_row + s0 * src[NB]
        y = dst_row + d0 * dst[NB]
        if src_code != _SAME:
            convert_run(
                src_code, x, src[NB], src[_PACKED], src[_N_PACKED],
                dst_code, y, dst[NB], dst[_PACKED], dst[_N_PACKED], count,
            )  # fmt: skip
        elif src[_N_PACKED] or dst[_N_PACKED]:
            copy_blocks(
                unit_bytes - 2, x, src[NB], src[_PACKED], src[_N_PACKED],
                y, dst[NB], dst[_PACKED], dst[_N_PACKED], count,
            )  # fmt: skip
        else:
            copy_run(unit_bytes, x, src[NB], y, dst[NB], count)
        unit += count
        s0 += count
        d0 += count
        if unit < end:
            if s0 == src[NE]:
                s0 = 0
                s1, s2, s3 = next_row(src, s1, s2, s3)
                src_row = row_address(src, s1, s2, s3)
            if d0 == dst[NE]:
                d0 = 0
                d1, d2, d3 = next_row(dst, d1, d2, d3)
                dst_row = row_address(dst, d1, d2, d3)


@compiled
def first_bad_id(side):
    """Where among a side's ids, in logical order, the first one lies that names no row; -1 where all do."""
    where = 0
    for i3 in range(side[_IDS_NE2]):
        for i2 in range(side[_IDS_NE1]):
            for i1 in range(side[NE + 1]):
                row = _row_id(side, i1, i2, i3)
                if row < 0 or row >= side[_N_ROWS]:
                    return where
                where += 1
    return -1


def side_at(address: int, ne: list[int], nb: list[int], ids: Tensor | None = None) -> Parameters:
    """A side of a walk: ne units and nb bytes per dimension, fastest first; where ids are given they name its rows."""
    parameters = np.zeros(_SIDE, np.int64)
    if ids is None:
        ne, nb = _merged(ne, nb)
    else:
        parameters[_IDS], parameters[_ID_BYTES] = ids.address, ids.codec.block_bytes
        parameters[_IDS_NB : _IDS_NB + 3] = ids.nb[:3]
        parameters[_IDS_NE1], parameters[_IDS_NE2] = ids.ne[1], ids.ne[2]
    parameters[_ADDRESS] = address
    parameters[NE : NE + 4] = ne
    parameters[NB : NB + 4] = nb
    return parameters


def _side(tensor: Tensor, ne: tuple[int, ...], unit: int, ids: Tensor | None) -> Parameters:
    """A tensor as a side of the walk over logical dimensions ne, in units of `unit` elements."""
    step = tensor.nb[0] * (unit // tensor.codec.block_size)
    parameters = side_at(tensor.address, [ne[0] // unit, *ne[1:]], [step, *tensor.nb[1:]], ids)
    if tensor.packed is not None:
        parameters[_PACKED], parameters[_N_PACKED] = tensor.packed.address, tensor.packed.n_blocks
    if ids is not None:
        parameters[_N_ROWS] = tensor.ne[1]
    return parameters


def _merged(ne: list[int], nb: list[int]) -> tuple[list[int], list[int]]:
    """Dimensions that follow each other without a gap become one: longer runs, the same order."""
    sizes, strides = [ne[0]], [nb[0]]
    for n, stride in zip(ne[1:], nb[1:], strict=True):
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = n, stride
        elif n != 1 and stride == strides[-1] * sizes[-1]:
            sizes[-1] *= n
        elif n != 1:
            sizes.append(n)
            strides.append(stride)
    missing = 4 - len(sizes)
    return sizes + [1] * missing, strides + [0] * missing


def code(type: str, rounding: Rounding | None = None) -> int | None:
    """What the compiled walk calls a type, under a q8_0 rounding or the one in force; None where it has none."""
    return CODES.get(f"{type} {rounding or NUMERICS.rounding}", CODES.get(type))


def mover(
    dst: Tensor,
    src: Tensor,
    src_ids: Tensor | None = None,
    dst_ids: Tensor | None = None,
    rounding: Rounding | None = None,
) -> Callable[[], None] | None:
    """The call that moves src to dst, reading or writing rows by ids; None where a type has no compiled run.

    rounding  of q8_0; the device's where it is None
    """
    dst_type = "f16 row" if dst_ids is not None and dst.type == "f16" else dst.type
    src_code, dst_code = code(src.type), code(dst_type, rounding)
    if src.type == dst.type:
        src_code = dst_code = _SAME
    if src_code is None or dst_code is None or (NUMERICS.bound.keys() & {src.type, dst.type} and src_code != _SAME):
        return None
    n_elements = src.n_elements if src_ids is None else dst.n_elements
    if n_elements == 0:
        return _nothing
    unit = max(src.codec.block_size, dst.codec.block_size)
    if src_ids is None and dst_ids is None:
        source, target = _side(src, _flat_if(src, unit), unit, None), _side(dst, _flat_if(dst, unit), unit, None)
    else:
        ne = dst.ne if dst_ids is None else src.ne
        source, target = _side(src, ne, unit, src_ids), _side(dst, ne, unit, dst_ids)
    n_units = n_elements // unit
    kernel = partial(walk, source, src_code, target, dst_code, codec(src.type).block_bytes)
    n_bytes = n_units * max(unit * _element_bytes(src), unit * _element_bytes(dst))
    if src_ids is not None:
        return partial(_checked, source, src_ids, partial(threads.split, kernel, n_units, int(n_bytes)))
    if dst_ids is not None:
        # in one thread: where an id comes twice, the last row in order stays
        return partial(_checked, target, dst_ids, partial(kernel, 0, n_units))
    return partial(threads.split, kernel, n_units, int(n_bytes))


def _flat_if(tensor: Tensor, unit: int) -> tuple[int, ...]:
    """ne, or one dimension where rows are no whole units: q -> f32 into a contiguous tensor of any shape."""
    return tensor.ne if tensor.ne[0] % unit == 0 else (tensor.n_elements, 1, 1, 1)


def _element_bytes(tensor: Tensor) -> float:
    return tensor.codec.block_bytes / tensor.codec.block_size


def make_ready() -> None:
    """Compiles the kernels of this module, or loads them: once, and not in the middle of a graph."""
    nothing = np.ones(_SIDE, np.int64)
    nothing[_IDS] = nothing[_IDS_NE1] = nothing[_N_PACKED] = 0
    walk(nothing, _SAME, nothing, _SAME, 1, 0, 0)
    first_bad_id(nothing)


def _nothing() -> None:
    pass


def _checked(side: Parameters, ids: Tensor, move: Callable[[], None]) -> None:
    where = first_bad_id(side)
    if where >= 0:
        raise bad_id(ids, where, int(side[_N_ROWS]))
    move()


def bad_id(ids: Tensor, where: int, n_rows: int) -> KernelError:
    """The error of the id at `where`, in logical order, that names none of n_rows rows."""
    i0, rest = where % ids.ne[0], where // ids.ne[0]
    i1, i2 = rest % ids.ne[1], rest // ids.ne[1]
    value = int(ids.view()[0, i2, i1, i0])
    return KernelError(f"row id {value} at {ids.name or 'ids'}[{i2}, {i1}, {i0}] is outside 0..{n_rows - 1}")
