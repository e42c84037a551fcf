"""What the kernels of FLASH_ATTN_EXT (`ops.attention`) are told of a node, and what they have in common."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Tensor
from quant.codec import ROUNDINGS
from quant.dots import READY_Q8, SCALED_SUM, ready_q8, rounded_q8
from quant.kernels.jit import (
    array_at,
    copy,
    f16_to_f32,
    inlined,
)
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.records import Place, row_of
from quant.rows import CODES, decode_row, round_run

Floats = NDArray[np.float32]

CELLS = 64  # whose scores are computed together
EXCLUDED = 0xFC00  # -inf as a float16


class Source(NamedTuple):
    """q, k or v.

    shared  how many heads of q, and how many of its sequences, share one of this source
    code, to_float, packed, n_packed  of its rows, as `decode_row` takes them; for q, the code of what it is rounded to
    """

    place: Place
    shared: tuple[int, int]
    code: int
    to_float: int
    packed: int
    n_packed: int


class Attention(NamedTuple):
    """dk, dv are the row sizes of k and v in the kernels. An address of 0 means that there is none.

    n_groups  heads of k
    mask_ne  dimensions 2 and 3 of the mask
    sinks, slopes  addresses of one float32 per head
    n_minima  how many blocks a row of k has, if q is rounded to q8_1: after its elements, a row of k has the minima of
             its blocks, and one of q what float16 rounds off its sums of as many elements; 0: q is rounded to another
             type
    q8       then, how q8_1 rounds: the place in quant.ROUNDINGS
    scale    of a score; softcap: the cap on it after that, 0 for none
    dst      its address; dst has no gaps
    parts, n_parts  of `attend_in_halves`: where a row's sums are stored, and how many parts; 0: it finishes `dst`
    n_narrow  of `attend_in_halves`: the elements of a row of v that are multiplied and added as float16
    n_together  of `attend_in_halves`: how many heads, which share one of k and v, a unit has
    in_halves  of `attend_in_halves`: whether the products of q with a float16 k are added as float16
    n_rows   of `attend`: the most rows of a unit
    marks    of `attend`: where `mark_masks` stores what masks hold
    chunk    of `attend`: rows (query, head, sequence) of a chunk of ggml's, if its CPU multiplies matrices; 0: it
             takes cell by cell
    """

    dk: int
    dv: int
    n_cells: int
    n_queries: int
    n_heads: int
    n_sequences: int
    n_groups: int
    q: Source
    k: Source
    v: Source
    mask: Place
    mask_ne: tuple[int, int]
    sinks: int
    slopes: int
    scale: np.float32
    softcap: np.float32
    dst: int
    n_minima: int = 0
    q8: int = 0
    parts: int = 0
    n_parts: int = 0
    n_narrow: int = 0
    n_together: int = 1
    in_halves: int = 0
    n_rows: int = 0
    marks: int = 0
    chunk: int = 0


@inlined
def float_at(address):
    """The float32 at an address."""
    return array_at(address, types.float32, 1)[0]


@inlined
def row_at(source, i1, head, i3):
    """Address of a row of q, k or v."""
    return row_of(source.place, i1, head // source.shared[0], i3 // source.shared[1])


@inlined
def load_query(of, i1, head, i3, query, work):
    """A row of q, rounded, to `query`."""
    if of.n_minima == 0:
        copy(row_at(of.q, i1, head, i3), query, 4 * of.dk)
        round_run(of.q.code, query, work, of.dk)
        return
    n = 32 * of.n_minima
    row = array_at(query, types.float32, of.dk)
    ready_q8(row_at(of.q, i1, head, i3), work, of.n_minima, of.q8, types.int64(0))
    rounded_q8(work, query, of.n_minima)
    row[n:] = 0
    for b in range(of.n_minima):
        total = types.float32(0)
        for i in range(32 * b, 32 * b + 32):
            total += row[i]
        row[n + b] = float_at(work + READY_Q8 * b + SCALED_SUM) - total


@inlined
def decode(source, row, y, n):
    """A row of k or v as float32."""
    decode_row(source.code, source.to_float, row, source.packed, source.n_packed, y, n)


@inlined
def decode_key(of, row, y):
    """A row of k as float32, and the minima of its blocks where the kernels take them."""
    if of.n_minima == 0:
        decode(of.k, row, y, of.dk)
        return
    n = 32 * of.n_minima
    decode(of.k, row, y, n)
    minima = array_at(y + 4 * n, types.float32, of.dk - n)
    minima[:] = 0
    for b in range(of.n_minima):
        minima[b] = f16_to_f32(array_at(row + b * of.k.place.nb[0] + 2, types.uint16, 1)[0])


@inlined
def mask_row(of, i1, head, i3):
    """Address of a query's row of the mask; 0 without a mask."""
    if of.mask.address == 0:
        return types.int64(0)
    return row_of(of.mask, i1, head % of.mask_ne[0], i3 % of.mask_ne[1])


@inlined
def slope_of(of, head):
    """The slope of a head, which the mask is multiplied by."""
    return float_at(of.slopes + 4 * head) if of.slopes else types.float32(1)


@inlined
def capped(of, y, n):
    """n scores that are already divided by the cap: y = cap * tanh(y), if there is a cap."""
    cap = of.softcap
    if cap != 0:
        scores = array_at(y, types.float32, n)
        for i in range(n):
            scores[i] = cap * types.float32(math.tanh(scores[i]))


@inlined
def dst_row(of, i1, head, i3):
    """The row of dst of a query of a head."""
    return array_at(of.dst + 4 * of.dv * (head + of.n_heads * (i1 + of.n_queries * i3)), types.float32, of.dv)


@inlined
def bytes_to_round(dk: int) -> int:
    """Bytes that `load_query` works in."""
    return max(2 * dk + 34, dk // 32 * READY_Q8)


@inlined
def mark(mask, count):
    """What the mask at an address holds for `count` cells: bits for numbers other than 0, and whether it is not all
    -inf."""
    some, kept = types.uint16(0), types.uint16(0)
    cells = array_at(mask, types.uint16, count)
    for i in range(count):
        some |= cells[i] & types.uint16(0x7FFF)
        kept |= cells[i] ^ types.uint16(EXCLUDED)
    return some, kept


@inlined
def query_of(of, group, row):
    """The query and the head of one of the rows that share a head of k."""
    return row % of.n_queries, group * of.k.shared[0] + row // of.n_queries


@inlined
def all_finite(x, n):
    """Whether n float32 at an address are finite."""
    row = array_at(x, types.uint32, n)
    found = types.uint32(0)
    for i in range(n):
        found |= types.uint32((row[i] & types.uint32(0x7F800000)) == types.uint32(0x7F800000))
    return found == 0


def _source(x: Tensor, q: Tensor, code: int, to_float: int) -> Source:
    packed, n_packed = (0, 0) if x.packed is None else (x.packed.address, x.packed.n_blocks)
    return Source(x.place, (q.ne[2] // x.ne[2], q.ne[3] // x.ne[3]), code, to_float, packed, n_packed)


def attention(
    dst: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    *,
    scale: float,
    softcap: float,
    by_head: Floats | None,
    query_type: str,
    numerics: Numerics,
) -> Attention | None:
    """What the kernels are told of a node; None if a type has no kernel.

    by_head     the slope of each head, which the mask is multiplied by
    query_type  the type that q is rounded to
    """
    n_minima = q.ne[0] // 32 if query_type == "q8_1" else 0
    code = f"q8_0 {numerics.rounding}" if query_type in ("q8_0", "q8_1") else query_type
    to_float = {type: numerics.to_float.get(type, 0) for type in {k.type, v.type} - {*CODES}}
    if code not in CODES or 0 in to_float.values():
        return None
    factor = np.float32(scale) / np.float32(softcap) if softcap else np.float32(scale)
    keys, gains = (_source(x, q, CODES.get(x.type, -1), to_float.get(x.type, 0)) for x in (k, v))
    return Attention(
        dk=q.ne[0] + -(-n_minima // LANES) * LANES,
        dv=v.ne[0],
        n_cells=k.ne[1],
        n_queries=q.ne[1],
        n_heads=q.ne[2],
        n_sequences=q.ne[3],
        n_groups=k.ne[2],
        q=_source(q, q, CODES[code], 0),
        k=keys,
        v=gains,
        mask=Place(0, (0, 0, 0, 0)) if mask is None else mask.place,
        mask_ne=(0, 0) if mask is None else mask.ne[2:],
        sinks=0 if sinks is None else sinks.address,
        slopes=0 if by_head is None else by_head.ctypes.data,
        scale=factor,
        softcap=np.float32(softcap),
        dst=dst.address,
        n_minima=n_minima,
        q8=ROUNDINGS.index(numerics.rounding),
    )


def cost_of(of: Attention) -> int:
    """Multiplications and additions of a node."""
    return of.n_queries * of.n_heads * of.n_sequences * of.n_cells * (of.dk + of.dv)
