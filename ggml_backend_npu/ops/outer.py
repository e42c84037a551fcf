"""OUT_PROD: sums of outer products, a tile of dst at a time, in the order in which ggml's CPU adds them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ggml.numerics import PLAIN, Numerics
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.functions import fused_multiply_add
from ggml_backend_npu.ops.movers import DECODED, convert
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import exact, probes
from ggml_backend_npu.registry.checks import Exact, Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.shapes import gaps, gaps_in_rows
from quant import codec
from quant.kernels.jit import array_at, compiled, copy, inlined
from quant.kernels.late import types
from quant.kernels.matrices import LANES, multiply
from quant.kernels.records import Dims, Place, record_at, row_of
from quant.kernels.threads import Job, Work
from quant.rows import CODES, decode_row

_ROWS, _COLUMNS, _DEPTH = 64, 256, 256  # of a tile of dst, and products that are added to it together


def _refuse_out_prod(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != (a.ne[0], b.ne[0], *b.ne[2:]) or a.ne[1] != b.ne[1]:
        return f"src0 of ne {a.ne}, src1 of ne {b.ne} do not fit dst of ne {dst.ne}"
    if any(n % m if m else n for n, m in zip(b.ne[2:], a.ne[2:], strict=True)):
        return f"src0 of ne {a.ne} does not repeat to src1 of ne {b.ne}"
    if a.type != "f32" and a.ne[2:] != b.ne[2:]:
        return f"src0 of ne {a.ne} and type {a.type} repeats to src1 of ne {b.ne}"
    return gaps_in_rows(src0=a) or gaps(dst=dst)


@op("OUT_PROD", types=[("f32", a, "f32") for a in ("f32", "f16", *DECODED)], refuse=_refuse_out_prod, bound=BOUND)
@np.errstate(all="ignore")
def out_prod(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[i3, i2] = b[i3, i2].T @ a[i3 / r3, i2 / r2], for r2, r3 = b.ne[2] / a.ne[2], b.ne[3] / a.ne[3].

    a (n, depth, ...), b (m, depth, b2, b3), dst (n, m, b2, b3). The products of an element are added one after the
    other, each fused with its addition. Equals ggml_compute_forward_out_prod.
    """
    rows = convert(a.view(), a.type, "f32", numerics=numerics)
    rows = rows.repeat(b.ne[3] // a.ne[3], axis=0).repeat(b.ne[2] // a.ne[2], axis=1) if rows.size else rows
    total = np.zeros(dst.view().shape, np.float32)
    for k in range(a.ne[1]):
        total = fused_multiply_add(rows[:, :, k, None, :], b.view()[:, :, k, :, None], total)
    dst.view()[...] = total


@inlined
def _columns_of(b, nb0, nb1, depth, m, to):
    """m columns of src1, `depth` elements of each, as rows of _DEPTH without gaps."""
    for i in range(m):
        row = array_at(to + 4 * _DEPTH * i, types.float32, depth)
        for k in range(depth):
            row[k] = array_at(b + i * nb0 + k * nb1, types.float32, 1)[0]


class OuterProducts(NamedTuple):
    """Sums of `depth` products; dst of ne, each of its matrices in column_tiles * row_tiles tiles.

    repeats         how many matrices of dst share one of src0, in dimensions 2 and 3
    code, to_float  of src0's rows, as `decode_row` takes them, in blocks of block_size elements and block_bytes bytes
    """

    ne: Dims
    depth: int
    column_tiles: int
    row_tiles: int
    repeats: tuple[int, int]
    src0: Place
    code: int
    to_float: int
    block_size: int
    block_bytes: int
    src1: Place
    dst: Place


_LEFT, _RIGHT, _TOTAL = 4 * _ROWS * _DEPTH, 4 * _DEPTH * _COLUMNS, 4 * _ROWS * _COLUMNS  # bytes that a tile is made in


@compiled
def outer_products(p, begin, end, scratch):
    """A unit is a tile of dst, of up to _ROWS rows and _COLUMNS columns; matrices are outermost, then columns of
    tiles."""
    of = record_at(p, OuterProducts)
    src0, src1, depth, code, to_float = of.src0, of.src1, of.depth, of.code, of.to_float
    row_tiles, n_tiles = of.row_tiles, of.column_tiles * of.row_tiles
    x, y, z = scratch, scratch + _LEFT, scratch + _LEFT + _RIGHT
    total = array_at(z, types.float32, _ROWS * _COLUMNS)
    array_at(scratch, types.float32, (_LEFT + _RIGHT) // 4)[:] = types.float32(0)
    for unit in range(begin, end):
        matrix, tile = unit // n_tiles, unit % n_tiles
        i2, i3 = matrix % of.ne[2], matrix // of.ne[2]
        column, row = tile // row_tiles * _COLUMNS, tile % row_tiles * _ROWS
        n, m = min(_COLUMNS, of.ne[0] - column), min(_ROWS, of.ne[1] - row)
        rows_of_a = row_of(src0, 0, i2 // of.repeats[0], i3 // of.repeats[1]) + column // of.block_size * of.block_bytes
        columns_of_b = row_of(src1, 0, i2, i3) + row * src1.nb[0]
        total[:] = types.float32(0)
        for k in range(0, depth, _DEPTH):
            count = min(_DEPTH, depth - k)
            for i in range(count):
                decode_row(code, to_float, rows_of_a + (k + i) * src0.nb[1], 0, 0, y + 4 * _COLUMNS * i, n)
            _columns_of(columns_of_b + k * src1.nb[1], src1.nb[0], src1.nb[1], count, m, x)
            wide = -(-n // LANES) * LANES
            multiply(x, 4 * _DEPTH, 4, y, 4 * _COLUMNS, z, 4 * _COLUMNS, -(-m // 4) * 4, count, wide)
        for i in range(m):
            copy(z + 4 * _COLUMNS * i, row_of(of.dst, row + i, i2, i3) + 4 * column, 4 * n)
    return 0


@out_prod.compiled
def _out_prod(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    to_float = 0 if a.type in CODES else numerics.to_float.get(a.type, 0)
    if a.packed is not None or not (a.type in CODES or to_float) or not a.n_elements:
        return None
    n0, n1, n2, n3 = dst.ne
    column_tiles, row_tiles = -(-n0 // _COLUMNS), -(-n1 // _ROWS)
    of = OuterProducts(
        ne=dst.ne,
        depth=a.ne[1],
        column_tiles=column_tiles,
        row_tiles=row_tiles,
        repeats=(n2 // a.ne[2], n3 // a.ne[3]),
        src0=a.place,
        code=CODES.get(a.type, -1),
        to_float=to_float,
        block_size=a.codec.block_size,
        block_bytes=a.codec.block_bytes,
        src1=b.place,
        dst=dst.place,
    )
    n_units, n_bytes, scratch = column_tiles * row_tiles * n2 * n3, dst.nbytes * a.ne[1], _LEFT + _RIGHT + _TOTAL
    return Job(Work(outer_products, of, n_units, n_bytes, scratch=scratch, keep=(dst, a, b)))


@out_prod.formula
def _exact(a: Tensor, b: Tensor) -> Exact:
    x, y = exact.values(a), exact.values(b)
    rows = x.repeat(len(y) // len(x), axis=0).repeat(y.shape[1] // x.shape[1], axis=1)
    total: Exact = y.swapaxes(2, 3) @ rows
    return total


def _make(depth: int) -> Make:
    """A node whose rows have `depth` products; as many matrices of src0 as of src1."""

    def make(rng: probes.Rng, types: Types) -> Node:
        block = codec(types[1]).block_size
        width = max(70, block) // block * block
        a, b = probes.normal(rng, types[1], 1, 2, depth, width), probes.normal(rng, "f32", 1, 2, depth, 9)
        return probes.node("OUT_PROD", "f32", (1, 2, 9, width), a, b)

    return make


out_prod.nodes(_make(40))
out_prod.probes(lambda: [Probe("", probes.of_widths(_make))])
