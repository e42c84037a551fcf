"""dst = f(x, y), element by element, compiled: a tile of a row at a time, of any float types and strides.

y is repeated to the size of x, or left out. The functions are those of `elements`, each a C function that the kernel
calls for a tile. As in ggml's CPU backend, `functions.gelu` and `gelu_quick` of f32 and f16 are looked up in tables of
half floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.kernels import functions
from ggml_backend_npu.ops.kernels.elements import Constants, Elementwise, look_up, look_up_gated
from ggml_backend_npu.ops.kernels.functions import Floats
from quant.kernels.jit import array_at, call_elementwise, compiled, inlined
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.records import Dims, Place, index_of, place_in, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.runs import CODES, narrow_run, widen_run

_TILE = 2048  # elements

_NOWHERE = Place(0, (0, 0, 0, 0))


class Operand(NamedTuple):
    """An operand. Its rows have ne[0] elements and repeat. code: its type's number in CODES."""

    code: int = 0
    place: Place = _NOWHERE
    ne: Dims = (0, 0, 0, 0)


class Compute(NamedTuple):
    """dst = function(x, y), in n_tiles tiles per row.

    function  the address of the C function of one of `elements`
    y         at address 0: there is none
    ids       int32 by dimensions 1 and 2 of x: which row of y, a matrix, belongs to a row of x; at address 0: there are
              none, y is repeated
    in_dst    a tile is computed where dst lies: its rows are float32 without gaps
    reads_x   x is read where it lies: its rows are float32 without gaps, as long as those of dst
    reads_y   the same of y, and it does not overlap dst
    """

    function: int
    constants: Constants
    n_tiles: int
    dst: Operand
    x: Operand
    y: Operand
    ids: Place
    in_dst: int
    reads_x: int
    reads_y: int


_CONSTANTS = 8 * place_in(Compute, "constants")


@inlined
def _load(operand, row, i0, to, n):
    """Elements [i0, i0 + n) of a row, which repeats, as float32."""
    width, nb0 = operand.ne[0], operand.place.nb[0]
    done = types.int64(0)
    while done < n:
        first = (i0 + done) % width
        count = min(width - first, n - done)
        widen_run(operand.code, row + first * nb0, nb0, to + 4 * done, count)
        done += count


@inlined
def _row_of_y(of, i1, i2, i3):
    """Address of the row of y that belongs to row (i1, i2, i3) of x."""
    if of.ids.address:
        at = of.ids.address + i1 * of.ids.nb[0] + i2 * of.ids.nb[1]
        return row_of(of.y.place, types.int64(array_at(at, types.int32, 1)[0]), 0, 0)
    return row_of(of.y.place, i1 % of.y.ne[1], i2 % of.y.ne[2], i3 % of.y.ne[3])


@compiled
def compute(p, begin, end, tiles):
    """A unit is a tile of a row. `tiles` holds a tile of x, and of dst, in float32, followed by one of y."""
    of = record_at(p, Compute)
    dst = of.dst
    for tile in range(begin, end):
        row, i0 = tile // of.n_tiles, tile % of.n_tiles * _TILE
        i1, i2, i3 = index_of(row, dst.ne[1], dst.ne[2])
        n = min(_TILE, dst.ne[0] - i0)
        out = row_of(dst.place, i1, i2, i3) + i0 * dst.place.nb[0]
        to = out if of.in_dst else tiles
        y = tiles + 4 * _TILE
        if of.reads_y:
            y = _row_of_y(of, i1, i2, i3) + 4 * i0
        elif of.y.place.address:
            _load(of.y, _row_of_y(of, i1, i2, i3), i0, y, n)
        x = row_of(of.x.place, i1, i2, i3)
        if of.reads_x:
            x += 4 * i0
        else:
            _load(of.x, x, i0, to, n)
            x = to
        call_elementwise(of.function, p + _CONSTANTS, to, x, y, n)
        if not of.in_dst:
            narrow_run(to, dst.code, out, dst.place.nb[0], n)
    return 0


@cache
def _table(function: Callable[[Floats, str], Floats]) -> NDArray[np.float16]:
    """The values of a function for every half float."""
    x = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        return function(x.astype(np.float32), "f16").astype(np.float16)


def bind_elementwise(
    function: Elementwise,
    dst: Tensor,
    x: Tensor,
    y: Tensor | None = None,
    *,
    a: float = 0,
    b: float = 0,
    table: NDArray[np.generic] | None = None,
    ids: Tensor | None = None,
) -> Job | None:
    """The call of a function of `elements`; None if dst overlaps a source but is not the same memory.

    a, b   its parameters
    table  more of them
    ids    which row of y belongs to a row of x, int32 by dimensions 1 and 2 of x; y is a matrix then
    """
    sources = [x] if y is None else [x, y]
    if any(dst.overlaps(source) and not _same_place(dst, source) for source in sources):
        return None
    in_vectors = function.in_vectors if x.type == "f32" else None
    n_bytes = function.cost * sum(tensor.n_elements * tensor.codec.block_bytes for tensor in (dst, *sources))
    flat = ids is None and (in_vectors is None or dst.ne[0] % LANES == 0)
    flat = flat and all(tensor.ne == dst.ne and tensor.is_contiguous() for tensor in (dst, *sources))
    ne = (dst.n_elements, 1, 1, 1) if flat else dst.ne
    n_tiles = -(-ne[0] // _TILE)
    of = Compute(
        function=(in_vectors or function.apply).address,
        constants=Constants(np.float32(a), np.float32(b), 0 if table is None else table.ctypes.data),
        n_tiles=n_tiles,
        dst=_operand(dst, ne[0], flat),
        x=_operand(x, ne[0], flat),
        y=Operand() if y is None else _operand(y, ne[0], flat),
        ids=_NOWHERE if ids is None else ids.place,
        in_dst=_is_plain(dst),
        reads_x=_is_plain(x) and x.ne[0] == dst.ne[0],
        reads_y=y is not None and _is_plain(y) and y.ne[0] == dst.ne[0] and not y.overlaps(dst),
    )
    n_units = n_tiles * ne[1] * ne[2] * ne[3]
    return Job(Work(compute, of, n_units, n_bytes, scratch=2 * 4 * _TILE, keep=(dst, *sources, table, ids)))


def bind_lookup(
    function: Callable[[Floats, str], Floats], exactly: Elementwise, dst: Tensor, x: Tensor, y: Tensor | None = None
) -> Job | None:
    """The call of `functions.gelu` or `gelu_quick`, times y if there is one: of f32 and f16 by a table, of bf16 by
    `exactly`; None as of `bind_elementwise`."""
    if x.type == "bf16":
        return bind_elementwise(exactly, dst, x, y)
    limit = 10 if x.type == "f32" and function is functions.gelu else math.nan
    return bind_elementwise(look_up if y is None else look_up_gated, dst, x, y, a=limit, table=_table(function))


def _operand(tensor: Tensor, n: int, flat: bool) -> Operand:
    """An operand with rows of n elements; flat: all of it is one row. A single element counts as n at one place."""
    nb, ne = tensor.nb, tensor.ne
    if flat:
        nb, ne = (tensor.codec.block_bytes, 0, 0, 0), (n, 1, 1, 1)
    elif ne[0] == 1:
        nb, ne = (0, *nb[1:]), (n, *ne[1:])
    return Operand(CODES[tensor.type], Place(tensor.address, nb), ne)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its rows are float32 without gaps."""
    return tensor.type == "f32" and tensor.nb[0] == 4


def _same_place(a: Tensor, b: Tensor) -> bool:
    return (a.address, a.type, a.ne, a.nb) == (b.address, b.type, b.ne, b.nb)
