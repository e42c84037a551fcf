"""The kernel of MUL_MAT and MUL_MAT_ID (`ops.matmul`): rows of matrices times the columns that belong to each."""

from __future__ import annotations

import sys
from typing import NamedTuple

import quant
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ir import Tensor
from quant import panels
from quant.dots import (
    CENTRES,
    DOTS,
    PACKED,
    READY_Q8,
    READY_Q8_K,
    Steps,
    ready_q8,
    ready_q8_k,
    rounded_q8,
    rounded_q8_k,
)
from quant.kernels.jit import LINE, array_at, compiled, copy, f32_to_f16_payload, inlined, on_stack
from quant.kernels.late import intrinsic, ir, types
from quant.kernels.matrices import LANES, dot
from quant.kernels.orders import (
    GROUP,
    HALVES,
    dots_f16,
    dots_f32,
    dots_in_halves,
    multiply_f16,
    multiply_f32,
    multiply_in_halves,
)
from quant.kernels.processor import dots_bytes
from quant.kernels.records import Place, address_of, place_in, record_at, row_of, shared_record_at, size_of
from quant.kernels.threads import Work
from quant.products import multiply_at, product
from quant.rows import CODES, decode_row, decode_run
from quant.runs import BF16, F16, F32, narrow_run, widen_run

MANY = 8  # columns from which on BLAS is the faster way
_MANY_OF_INTEGERS = 32  # the same beside integer dots, of a processor that does not multiply bytes
TILE_BYTES = 1 << 20  # of dequantised weights
_WEIGHT = 8  # a byte of weights is as much work as so many that are moved
_QUANTS_AT = {"q8_0": 2, "q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8}  # bytes from the start of a block
_NEAR_BYTES = 1 << 18  # of columns that stay in a processor's own caches
_CBLAS = 101, 111, 112  # row-major, as it is, transposed

# the type that ggml's CPU rounds columns to, for each type of weights (type_traits_cpu.vec_dot_type)
_ROUNDED = {
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q1_0 q2_0 q4_0 q5_0 q8_0 mxfp4 nvfp4 iq4_nl",
    "q8_1": "q4_1 q5_1",
    "q8_K": "q2_K q3_K q4_K q5_K q6_K iq2_xxs iq2_xs iq3_xxs iq3_s iq2_s iq1_s iq1_m iq4_xs tq1_0 tq2_0",
}
VEC_DOT = {weights: rounded for rounded, names in _ROUNDED.items() for weights in names.split()}

# how columns are rounded
_AS_IS, _TO_F16, _TO_BF16, _TO_Q8, _TO_Q8_K = range(5)
ROUNDINGS = {"f32": _AS_IS, "f16": _TO_F16, "bf16": _TO_BF16, "q8_0": _TO_Q8, "q8_1": _TO_Q8, "q8_K": _TO_Q8_K}


@intrinsic
def multiply_by_blas(typing_context, function, m, n, k, a, lda, b, ldb, c, ldc):
    """cblas_sgemm at an address: C (m, n) = A (m, k) times B (n, k) transposed; all row-major, steps in elements."""

    def emit(context, builder, signature, arguments):
        i32, pointer, one = ir.IntType(32), ir.IntType(64), ir.FloatType()
        kinds = [*[i32] * 6, one, pointer, i32, pointer, i32, one, pointer, i32]
        address, m, n, k, a, lda, b, ldb, c, ldc = arguments
        m, n, k, lda, ldb, ldc = (builder.trunc(value, i32) for value in (m, n, k, lda, ldb, ldc))
        flags = [ir.Constant(i32, flag) for flag in _CBLAS]
        call = builder.inttoptr(address, ir.FunctionType(ir.VoidType(), kinds).as_pointer())
        builder.call(call, [*flags, m, n, k, one(1), a, lda, b, ldb, one(0), c, ldc])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), emit


@inlined
def _step(addresses, count):
    """The distance of equally spaced addresses; 0 if they are not equally spaced, or there is only one."""
    if count < 2:
        return types.int64(0)
    step = addresses[1] - addresses[0]
    for i in range(2, count):
        if addresses[i] - addresses[i - 1] != step:
            return types.int64(0)
    return step


@inlined
def _round(rounding, q8, fused, work, k, row):
    """Rounds k float32 at `row` to the type of a rounding, in place."""
    if rounding == _TO_F16:
        x, y = array_at(row, types.float32, k), array_at(work, types.uint16, k)
        for i in range(k):
            y[i] = f32_to_f16_payload(x[i])
        widen_run(types.int64(F16), work, types.int64(2), row, k)
    elif rounding == _TO_BF16:
        narrow_run(row, types.int64(BF16), work, types.int64(2), k)
        widen_run(types.int64(BF16), work, types.int64(2), row, k)
    elif rounding == _TO_Q8:
        ready_q8(row, work, k // 32, q8, types.int64(0))
        rounded_q8(work, row, k // 32)
    elif rounding == _TO_Q8_K:
        ready_q8_k(row, work, k // 256, fused)
        rounded_q8_k(work, row, k // 256)


class Weights(NamedTuple):
    """Rows of src0 that are multiplied as integers.

    product  the address of the `quant.products.product` of their type; 0: they are not multiplied so
    centre   as `ready_q8` takes it
    scales, quants, steps  as `quant.dots.all_rows` takes them
    """

    product: int
    centre: int
    scales: Place
    quants: Place
    steps: Steps


class Products(NamedTuple):
    """n_matrices matrices of n_rows rows of k elements, in tiles of tile_rows; n_columns: the most columns of a matrix.

    code, packed, n_packed, to_float  of src0's rows, as `decode_row` takes them
    ne1         dimensions 1 to 3 of src1
    ids         the matrices that a token of src1 belongs to; 0: the i-th matrix of a batch has the i-th of its columns
    rounding    of columns, one of ROUNDINGS; rounds: whether columns that are not made integers are rounded
    line        bytes of a prepared column
    q8, fused   how ggml's own quantisers round: the place in quant.ROUNDINGS; whether q8_K rounds a product once
    sgemm       address of cblas_sgemm, for `least` columns or more; 0: never
    as_blocks   rows and columns are multiplied in ggml's blocks
    in_halves   products of float16 are added as float16
    """

    n_matrices: int
    n_rows: int
    k: int
    n_columns: int
    tile_rows: int
    src0: Place
    src0_ne2: int
    code: int
    packed: int
    n_packed: int
    to_float: int
    weights: Weights
    src1: Place
    ne1: tuple[int, int, int]
    src1_code: int
    dst: Place
    ids: Place
    ids_ne: tuple[int, int]
    rounding: int
    rounds: int
    line: int
    q8: int
    fused: int
    sgemm: int
    least: int
    as_blocks: int
    in_halves: int


def bytes_of_a_column(rounding: int, k: int) -> int:
    """Bytes in which a column of k elements is prepared."""
    ready = k // 256 * READY_Q8_K if rounding == _TO_Q8_K else k // 32 * READY_Q8
    return max(ready, 4 * k)


class _Left(NamedTuple):
    """What `products` leaves at the begin of its scratch memory for the next chunk: which matrix its columns belong to,
    counted from 1, and what is known of them."""

    matrix: int
    n_columns: int
    by_blas: int
    as_integers: int
    x_step: int


_LEFT = 8 * size_of(_Left)


def scratch_of(of: Products) -> int:
    """Bytes that `products` works in: what it leaves for the next chunk, two addresses and a line per column, a line, a
    tile or a panel of weights, a tile's results."""
    tile = max(4 * of.tile_rows * of.k, panels.bytes_of(of.k))
    return _LEFT + of.n_columns * (16 + of.line) + of.line + LINE + tile + 4 * of.tile_rows * max(of.n_columns, 1)


@inlined
def _find_columns(of, matrix, x, y):
    """Addresses of the columns that belong to a matrix, and of their results. Returns how many there are."""
    src1, dst, ne1, ids = of.src1, of.dst, of.ne1, of.ids
    count = 0
    if ids.address:
        for i in range(of.ids_ne[1]):
            for j in range(of.ids_ne[0]):
                if array_at(ids.address + i * ids.nb[1] + j * ids.nb[0], types.int32, 1)[0] == matrix:
                    x[count] = src1.address + j % ne1[0] * src1.nb[1] + i * src1.nb[2]
                    y[count] = dst.address + j * dst.nb[1] + i * dst.nb[2]
                    count += 1
        return count
    i02, i03 = matrix % of.src0_ne2, matrix // of.src0_ne2
    r2, r3 = ne1[1] // of.src0_ne2, ne1[2] // (of.n_matrices // of.src0_ne2)
    for i13 in range(i03 * r3, (i03 + 1) * r3):
        for i12 in range(i02 * r2, (i02 + 1) * r2):
            for i11 in range(ne1[0]):
                x[count] = row_of(src1, i11, i12, i13)
                y[count] = row_of(dst, i11, i12, i13)
                count += 1
    return count


@inlined
def _make_ready(of, x, count, columns, work, as_integers):
    """Prepares columns as the product reads them: as blocks of integers, or as float32, rounded. x then points to
    them."""
    for c in range(count):
        row, source = columns + c * of.line, x[c]
        x[c] = row
        if not as_integers:
            decode_run(of.src1_code, source, 0, 0, row, of.k)
            if of.rounds:
                _round(of.rounding, of.q8, of.fused, work, of.k, row)
            continue
        if of.src1_code != F32:
            decode_run(of.src1_code, source, 0, 0, work, of.k)
            source = work
        if of.rounding == _TO_Q8_K:
            ready_q8_k(source, row, of.k // 256, of.fused)
        else:
            ready_q8(source, row, of.k // 32, of.q8, of.weights.centre)


@inlined
def _multiply_blocks(of, at, x, y, count, first, rows):
    """As ggml's tinyBLAS: GROUP rows times as many columns as fit a processor's own caches."""
    at_where = on_stack(3)
    where = array_at(at_where, types.int64, 3)
    where[0], where[1] = of.src0.nb[1], of.k // (HALVES if of.in_halves else LANES)
    together = max(12, _NEAR_BYTES // (48 * of.k) * 12)
    for c in range(0, count, together):
        some = min(together, count - c)
        for r in range(0, rows, GROUP):
            row, where[2] = at + r * of.src0.nb[1], 4 * (first + r)
            if of.in_halves:
                multiply_in_halves(row, at_where, x + 8 * c, y + 8 * c, some)
            elif of.code == F16:
                multiply_f16(row, at_where, x + 8 * c, y + 8 * c, some)
            else:
                multiply_f32(row, at_where, x + 8 * c, y + 8 * c, some)


@inlined
def _multiply_rows(of, at, x, y, count, first, rows, tile):
    """Row by row: float16 and float32 in the order of ggml's dot products, other types dequantised."""
    step = of.src0.nb[1]
    if of.code in (F16, F32):
        for r in range(0, rows, GROUP):
            row, some = at + r * step, min(GROUP, rows - r)
            for c in range(count):
                if of.in_halves:
                    dots_in_halves(row, step, x[c], of.k, y[c] + 4 * (first + r), some)
                elif of.code == F16:
                    dots_f16(row, step, x[c], of.k, y[c] + 4 * (first + r), some)
                else:
                    dots_f32(row, step, x[c], of.k, y[c] + 4 * (first + r), some)
        return
    for r in range(rows):
        decode_row(of.code, of.to_float, at + r * step, of.packed, of.n_packed, tile, of.k)
        for c in range(count):
            array_at(y[c] + 4 * (first + r), types.float32, 1)[0] = dot(tile, x[c], of.k)


@inlined
def _multiply_tile(of, at, x, x_step, y, count, first, rows, tile, out):
    """By BLAS: a tile of dequantised rows times all columns."""
    weights, step, k = at, of.src0.nb[1] // 4, of.k
    if of.code != F32 or of.src0.nb[1] % 4 or of.to_float:
        weights, step = tile, k
        for r in range(rows):
            row = at + r * of.src0.nb[1]
            decode_row(of.code, of.to_float, row, of.packed, of.n_packed, tile + 4 * k * r, k)
    y_step = _step(y, count)
    if y_step >= 4 * rows and y_step % 4 == 0:
        multiply_by_blas(of.sgemm, count, rows, k, x[0], x_step // 4, weights, step, y[0] + 4 * first, y_step // 4)
    else:
        multiply_by_blas(of.sgemm, count, rows, k, x[0], x_step // 4, weights, step, out, rows)
        for c in range(count):
            copy(out + 4 * rows * c, y[c] + 4 * first, 4 * rows)


@compiled
def products(p, begin, end, scratch):
    """A unit is a tile of rows of a matrix of src0, times all columns that belong to the matrix; tiles are
    outermost."""
    of = record_at(p, Products)
    weights, src0, left = of.weights, of.src0, shared_record_at(scratch, _Left)
    x_at = scratch + _LEFT
    y_at = x_at + 8 * of.n_columns
    x, y = array_at(x_at, types.int64, of.n_columns), array_at(y_at, types.int64, of.n_columns)
    columns = y_at + 8 * of.n_columns
    work = columns + of.n_columns * of.line
    tile = (work + of.line + LINE - 1) // LINE * LINE
    out = tile + 4 * of.tile_rows * of.k
    unit = begin
    while unit < end:
        matrix, first = unit % of.n_matrices, unit // of.n_matrices * of.tile_rows
        n_units = end - unit if of.n_matrices == 1 and weights.product != 0 and of.sgemm == 0 else 1
        rows = min(n_units * of.tile_rows, of.n_rows - first)
        unit += n_units
        if left.matrix != matrix + 1:
            count = _find_columns(of, matrix, x, y)
            by_blas = of.sgemm != 0 and count >= of.least
            as_integers = weights.product != 0 and not by_blas
            x_step = _step(x, count)
            as_is = of.src1_code == F32 and not as_integers and (of.rounding == _AS_IS or not of.rounds)
            if not as_is or (by_blas and (x_step < 4 * of.k or x_step % 4)):
                _make_ready(of, x, count, columns, work, as_integers)
                x_step = of.line
            left.matrix, left.n_columns, left.x_step = matrix + 1, count, x_step
            left.by_blas, left.as_integers = by_blas, as_integers
        count, x_step = left.n_columns, left.x_step
        if count == 0:
            continue
        i2, i3 = matrix % of.src0_ne2, matrix // of.src0_ne2
        at = row_of(src0, first, i2, i3)
        if left.as_integers != 0:
            scales, quants = row_of(weights.scales, first, i2, i3), row_of(weights.quants, first, i2, i3)
            steps = address_of(weights.steps)
            multiply_at(weights.product, scales, quants, steps, first, rows, x_at, y_at, count, tile)
        elif of.as_blocks:
            _multiply_blocks(of, at, x_at, y_at, count, first, rows)
        elif left.by_blas != 0:
            _multiply_tile(of, at, x, x_step, y, count, first, rows, tile, out)
        else:
            _multiply_rows(of, at, x, y, count, first, rows, tile)
    return 0


# what a node binds


def least_for_blas(a: Tensor) -> int:
    """The least number of columns that go to BLAS."""
    if a.type in DOTS:
        return sys.maxsize if dots_bytes() else _MANY_OF_INTEGERS
    return MANY


def fits_blocks(type: str, k: int, n_rows: int, n_columns: int, numerics: Numerics) -> bool:
    """Whether ggml's CPU multiplies blocks of rows and columns of k elements (llamafile_sgemm), and that exactly."""
    in_halves = type == "f16" and numerics.blocks_in_halves
    least = 8 if in_halves else 4 if LANES == 4 else 2
    return n_columns >= least and k % (HALVES if in_halves else LANES) == 0 and n_rows % GROUP == 0


def _as_blocks(a: Tensor, b: Tensor, numerics: Numerics) -> bool:
    """Whether blocks are multiplied as ggml's CPU multiplies them. With vectors of AVX-512, of float16 that is faster
    than BLAS too."""
    together = b.is_contiguous() or b.type != a.type
    wanted = a.type in ("f16", "f32") if numerics.matmul == "exact" else a.type == "f16" and LANES == 16
    return wanted and together and fits_blocks(a.type, a.ne[0], a.ne[1], b.ne[1], numerics)


def bind(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor | None, numerics: Numerics) -> Work | None:
    """The product of a MUL_MAT, or with ids of a MUL_MAT_ID; None if no kernel has these types."""
    k, n_rows, n_matrices = a.ne[0], a.ne[1], a.ne[2] * a.ne[3]
    n_columns = b.ne[1] * b.ne[2] * b.ne[3] // n_matrices if ids is None else ids.n_elements
    to_float = 0 if a.type in CODES else numerics.to_float.get(a.type, 0)
    decodes = a.type in CODES or to_float != 0
    plain = b.type in ("f32", "f16", "bf16")
    as_integers = plain and a.type in DOTS
    if b.type not in CODES or not (decodes or as_integers):
        return None
    exact = numerics.matmul == "exact"
    blas = decodes and n_columns >= least_for_blas(a) and not (exact and (as_integers or a.type in ("f16", "f32")))
    as_blocks = ids is None and _as_blocks(a, b, numerics)
    sgemm = numerics.sgemm if blas and not as_blocks else 0
    if sgemm or as_blocks:
        tile_rows = min(256, max(64, TILE_BYTES // (4 * k)), -(-n_rows // 64) * 16)
    else:
        tile_rows = max(16, -(-n_rows // 128) * 16 if n_matrices > 1 else 16)
    rounding = ROUNDINGS[VEC_DOT[a.type]]
    of = Products(
        n_matrices=n_matrices,
        n_rows=n_rows,
        k=k,
        n_columns=n_columns,
        tile_rows=tile_rows,
        src0=a.place,
        src0_ne2=a.ne[2],
        code=CODES.get(a.type, -1),
        packed=0 if a.packed is None else a.packed.address,
        n_packed=0 if a.packed is None else a.packed.n_blocks,
        to_float=to_float,
        weights=_weights(a, exact=exact) if as_integers else _NO_WEIGHTS,
        src1=b.place,
        ne1=b.ne[1:],
        src1_code=CODES[b.type],
        dst=dst.place,
        ids=Place(0, (0, 0, 0, 0)) if ids is None else ids.place,
        ids_ne=(0, 0) if ids is None else ids.ne[:2],
        rounding=rounding,
        rounds=plain and exact,
        line=bytes_of_a_column(rounding, k),
        q8=quant.ROUNDINGS.index(numerics.rounding),
        fused=numerics.fuses,
        sgemm=sgemm,
        least=least_for_blas(a) if sgemm else 0,
        as_blocks=as_blocks,
        in_halves=exact and a.type == "f16" and (numerics.blocks_in_halves if as_blocks else numerics.dots_in_halves),
    )
    n_units = -(-n_rows // tile_rows) * n_matrices
    n_bytes = _WEIGHT * n_matrices * n_rows * (a.nb[1] + k * n_columns // 4)
    return Work(products, of, n_units, n_bytes, scratch=scratch_of(of), reads=_reads(a), keep=(dst, a, b, ids))


def _reads(a: Tensor) -> tuple[int, int]:
    """What a work reads in the order of its units: one matrix of weights whose rows lie side by side."""
    if a.packed is not None or a.ne[2] * a.ne[3] != 1 or not a.is_contiguous():
        return 0, 0
    return place_in(Products, "src0"), a.nbytes


def _weights(a: Tensor, *, exact: bool) -> Weights:
    """What the products of src0's rows as integers take of it."""
    unit, n_blocks, centre = a.codec.block_bytes, a.ne[0] // a.codec.block_size, CENTRES.get(a.type, 0)
    if a.packed is None:
        quants = Place(a.address + _QUANTS_AT.get(a.type, 0), a.nb)
        steps = Steps(unit, unit, a.nb[1], a.nb[1], n_blocks)
        return Weights(product(a.type, exact=exact).address, centre, a.place, quants, steps)
    payload, first = unit - 2, (a.address - a.packed.address) // unit
    _, row, matrix, batch = (nb // unit for nb in a.nb)
    at = a.packed.address + payload * a.packed.n_blocks + 2 * first
    scales = Place(at, (2, 2 * row, 2 * matrix, 2 * batch))
    quants = Place(a.packed.address + payload * first, (payload, payload * row, payload * matrix, payload * batch))
    steps = Steps(2, payload, 2 * row, payload * row, n_blocks)
    of_type = product(PACKED if a.type == "q4_0" else a.type, exact=exact)
    return Weights(of_type.address, centre, scales, quants, steps)


_NO_WEIGHTS = Weights(0, 0, Place(0, (0, 0, 0, 0)), Place(0, (0, 0, 0, 0)), Steps(0, 0, 0, 0, 0))
