"""OUT_PROD: sums of outer products, a tile of dst at a time, in the order in which ggml's CPU adds them."""

from __future__ import annotations

import numpy as np
from numba import types

from ggml_backend_npu.checks import Exact, Make, Probe, Types
from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.ops import exact, probes
from ggml_backend_npu.ops.functions import fused_multiply_add
from ggml_backend_npu.ops.movers import DECODED, convert, raw
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows
from ggml_backend_npu.ops.sums import BOUND
from ggml_backend_npu.registry import Call, op
from quant import codec
from quant.kernels.jit import array_at, compiled, copy, inlined, keep, parameters, values
from quant.kernels.matrices import LANES, multiply
from quant.kernels.threads import Job, Work
from quant.runs import CODES, decode_row

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

    The products of an element are added one after the other, each fused with its addition. Equals
    ggml_compute_forward_out_prod.
    """
    rows = convert(raw(a), a.type, "f32", numerics=numerics)
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


@compiled
def outer_products(p, begin, end):
    """Units [begin, end): a tile of dst, of _ROWS rows and _COLUMNS columns at most; columns of tiles outermost."""
    n0, n1, n2, depth, column_tiles, row_tiles, r2, r3 = values(p, 8)
    a, nb01, nb02, nb03, code, to_float, block_size, block_bytes = values(p + 8 * 8, 8)
    b, nb10, nb11, nb12, nb13, dst, nb1, nb2, nb3 = values(p + 8 * 16, 9)
    left, right = np.zeros((_ROWS, _DEPTH), np.float32), np.zeros((_DEPTH, _COLUMNS), np.float32)
    total = np.empty((_ROWS, _COLUMNS), np.float32)
    x, y, z = types.int64(left.ctypes.data), types.int64(right.ctypes.data), types.int64(total.ctypes.data)
    for unit in range(begin, end):
        matrix, tile = unit // (column_tiles * row_tiles), unit % (column_tiles * row_tiles)
        i2, i3 = matrix % n2, matrix // n2
        column, row = tile // row_tiles * _COLUMNS, tile % row_tiles * _ROWS
        n, m = min(_COLUMNS, n0 - column), min(_ROWS, n1 - row)
        rows_of_a = a + i2 // r2 * nb02 + i3 // r3 * nb03 + column // block_size * block_bytes
        columns_of_b = b + i2 * nb12 + i3 * nb13 + row * nb10
        total[:] = 0
        for k in range(0, depth, _DEPTH):
            count = min(_DEPTH, depth - k)
            for i in range(count):
                decode_row(code, to_float, rows_of_a + (k + i) * nb01, 0, 0, y + 4 * _COLUMNS * i, n)
            _columns_of(columns_of_b + k * nb11, nb10, nb11, count, m, x)
            wide = -(-n // LANES) * LANES
            multiply(x, 4 * _DEPTH, 4, y, 4 * _COLUMNS, z, 4 * _COLUMNS, -(-m // 4) * 4, count, wide)
        for i in range(m):
            to = dst + (row + i) * nb1 + i2 * nb2 + i3 * nb3 + 4 * column
            copy(z + 4 * _COLUMNS * i, to, 4 * n)
    keep(left)
    keep(right)
    keep(total)
    return 0


@out_prod.compiled
def _out_prod(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    to_float = 0 if a.type in CODES else numerics.to_float.get(a.type, 0)
    if a.packed is not None or not (a.type in CODES or to_float) or not a.n_elements:
        return None
    n0, n1, n2, n3 = dst.ne
    column_tiles, row_tiles = -(-n0 // _COLUMNS), -(-n1 // _ROWS)
    p = parameters(
        n0, n1, n2, a.ne[1], column_tiles, row_tiles, n2 // a.ne[2], n3 // a.ne[3],
        a.address, *a.nb[1:], CODES.get(a.type, -1), to_float, a.codec.block_size, a.codec.block_bytes,
        b.address, *b.nb, dst.address, *dst.nb[1:],
    )  # fmt: skip
    return Job(Work(outer_products, p, column_tiles * row_tiles * n2 * n3, dst.nbytes * a.ne[1], keep=(dst, a, b)))


@out_prod.formula
def _exact(a: Tensor, b: Tensor) -> Exact:
    x, y = exact.values(a), exact.values(b)
    rows = x.repeat(len(y) // len(x), axis=0).repeat(y.shape[1] // x.shape[1], axis=1)
    total: Exact = y.swapaxes(2, 3) @ rows
    return total


def _make(depth: int) -> Make:
    """A node of so many rows and columns; as many matrices of src0 as of src1."""

    def make(rng: probes.Rng, types: Types) -> Node:
        block = codec(types[1]).block_size
        width = max(70, block) // block * block
        a, b = probes.normal(rng, types[1], 1, 2, depth, width), probes.normal(rng, "f32", 1, 2, depth, 9)
        return probes.node("OUT_PROD", "f32", (1, 2, 9, width), a, b)

    return make


out_prod.nodes(_make(40))
out_prod.probes(lambda: [Probe("", probes.of_widths(_make))])
