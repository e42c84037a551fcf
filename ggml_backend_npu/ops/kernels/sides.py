"""The sides of kernels that walk through tensors in logical order: rows in order, or named by ids."""

from __future__ import annotations

from typing import NamedTuple

from ggml_backend_npu.ir import Tensor
from quant.kernels.jit import array_at, inlined
from quant.kernels.late import types
from quant.kernels.records import Dims


class Ids(NamedTuple):
    """Ids that name the rows of a side.

    address  0: there are none, rows come in order
    n_bytes  of an id
    nb       strides of the ids; ne: their dimensions 1 and 2
    n_rows   rows that ids may name
    """

    address: int = 0
    n_bytes: int = 0
    nb: tuple[int, int, int] = (0, 0, 0)
    ne: tuple[int, int] = (0, 0)
    n_rows: int = 0


class Side(NamedTuple):
    """A tensor of a walk: ne units, nb bytes in each dimension.

    packed, n_packed  address and blocks of the packed tensor that it lies in; 0: of none
    """

    address: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    ids: Ids = Ids()
    packed: int = 0
    n_packed: int = 0


@inlined
def row_id(side, i1, i2, i3):
    """The row that the id of row (i1, i2, i3) of a side names."""
    ids = side.ids
    address = ids.address + i1 * ids.nb[0] + (i2 % ids.ne[0]) * ids.nb[1] + (i3 % ids.ne[1]) * ids.nb[2]
    if ids.n_bytes == 8:
        return types.int64(array_at(address, types.int64, 1)[0])
    return types.int64(array_at(address, types.int32, 1)[0])


@inlined
def row_address(side, i1, i2, i3):
    """Address of row (i1, i2, i3) of a side; i1 goes through the side's ids, if it has any."""
    if side.ids.address:
        i1 = row_id(side, i1, i2, i3)
    return side.address + i1 * side.nb[1] + i2 * side.nb[2] + i3 * side.nb[3]


@inlined
def locate(side, unit):
    """The indices of a unit by its number in logical order, fastest first."""
    ne = side.ne
    i0 = unit % ne[0]
    row = unit // ne[0]
    i1 = row % ne[1]
    row //= ne[1]
    return i0, i1, row % ne[2], row // ne[2]


@inlined
def next_row(side, i1, i2, i3):
    """The indices of the row after row (i1, i2, i3)."""
    i1 += 1
    if i1 == side.ne[1]:
        i1 = 0
        i2 += 1
        if i2 == side.ne[2]:
            i2 = 0
            i3 += 1
    return i1, i2, i3


def side_at(address: int, ne: Dims, nb: Dims, ids: Tensor | None = None, n_rows: int = 0) -> Side:
    """A side of a walk: ne units and nb bytes per dimension, fastest first; ids, if given, name its n_rows rows."""
    if ids is None:
        return Side(address, *_merged(ne, nb))
    named = Ids(ids.address, ids.codec.block_bytes, ids.nb[:3], ids.ne[1:3], n_rows)
    return Side(address, ne, nb, named)


def _merged(ne: Dims, nb: Dims) -> tuple[Dims, Dims]:
    """Merges dimensions that follow each other without a gap into one: longer runs, the same order."""
    sizes, strides = [ne[0]], [nb[0]]
    for n, stride in zip(ne[1:], nb[1:], strict=True):
        if sizes[-1] == 1:
            sizes[-1], strides[-1] = n, stride
        elif n != 1 and stride == strides[-1] * sizes[-1]:
            sizes[-1] *= n
        elif n != 1:
            sizes.append(n)
            strides.append(stride)
    return padded(sizes, 1), padded(strides, 0)


def padded(numbers: list[int], by: int) -> Dims:
    """Up to four numbers, with `by` for each that is missing."""
    first, second, third, fourth = numbers + [by] * (4 - len(numbers))
    return first, second, third, fourth
