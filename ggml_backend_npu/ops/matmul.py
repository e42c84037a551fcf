"""MUL_MAT and MUL_MAT_ID: rows of src0 times columns of src1, of any type of weights.

GGML_NPU_MATMUL says how quantised weights are multiplied. exact: the columns are rounded to the type that ggml's CPU
rounds them to (`VEC_DOT`), so that the result is the CPU's but for the rounding of the sum; its very bytes where rows
are multiplied as integers, and, with AVX2 or AVX-512, of f16 and f32 weights (`quant.kernels.orders`; f32 rows in whole
64s). fast: the same for few columns of quantised weights; many are left as they are, and are multiplied with tiles of
dequantised weights, which is closer to the true product than the CPU, and not equal to it.

One kernel does both ops and both ways. A matrix of src0 meets the columns that it is for: those of its part of the
batch, or those whose ids name it. Rows of q8_0, q4_0, q4_1, q5_0, q5_1, q4_K and q6_K are multiplied as integers
(`quant.dots`), others dequantised, a row or a tile at a time; many columns go to BLAS (cblas_sgemm, which every thread
calls for tiles of its own).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.numerics import PLAIN, Numerics
from ggml_backend_npu.ops.movers import checked_ids
from ggml_backend_npu.ops.strided import ids_check
from ggml_backend_npu.registry import Call, op
from quant import codec, dequantize
from quant.dots import (
    DOTS,
    NO_DOTS,
    Q4_0_PACKED,
    READY_Q8,
    READY_Q8_K,
    dots,
    ready_q8,
    ready_q8_k,
    rounded_q8,
    rounded_q8_k,
)
from quant.kernels.jit import (
    array_at,
    compiled,
    copy,
    f32_to_f16_payload,
    inlined,
    keep,
    parameters,
    values,
)
from quant.kernels.matrices import LANES, dot
from quant.kernels.orders import GROUP, dots_f16, dots_f32, multiply_f16, multiply_f32
from quant.kernels.threads import Job, Work
from quant.runs import BF16, CODES, F16, F32, decode_row, decode_run, narrow_run, widen_run

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

_MANY, _MANY_OF_INTEGERS = 8, 32  # columns from which on BLAS is the faster way; if it stands beside integer dots
_TILE_BYTES = 1 << 20  # of dequantised weights
_NEAR_BYTES = 1 << 18  # of columns that stay in a processor's own caches
_WEIGHT = 8  # a byte of weights is as much work as so many that are moved
_QUANTS_AT = {"q8_0": 2, "q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8}  # bytes from a block's begin
_CBLAS = 101, 111, 112  # row-major, as it is, transposed

# how columns are rounded
_AS_IS, _TO_F16, _TO_BF16, _TO_Q8, _TO_Q8_K = range(5)
_ROUNDINGS = {"f32": _AS_IS, "f16": _TO_F16, "bf16": _TO_BF16, "q8_0": _TO_Q8, "q8_1": _TO_Q8, "q8_K": _TO_Q8_K}


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
    """How far equally spaced addresses lie apart; 0 where they are not, or where there is but one."""
    if count < 2:
        return types.int64(0)
    step = addresses[1] - addresses[0]
    for i in range(2, count):
        if addresses[i] - addresses[i - 1] != step:
            return types.int64(0)
    return step


@inlined
def _round(rounding, simd, fused, work, k, row):
    """k float32 at `row`, as the type of a rounding has them, in place."""
    if rounding == _TO_F16:
        x, y = array_at(row, types.float32, k), array_at(work, types.uint16, k)
        for i in range(k):
            y[i] = f32_to_f16_payload(x[i])
        widen_run(types.int64(F16), work, types.int64(2), row, k)
    elif rounding == _TO_BF16:
        narrow_run(row, types.int64(BF16), work, types.int64(2), k)
        widen_run(types.int64(BF16), work, types.int64(2), row, k)
    elif rounding == _TO_Q8:
        ready_q8(row, work, k // 32, simd)
        rounded_q8(work, row, k // 32)
    elif rounding == _TO_Q8_K:
        ready_q8_k(row, work, k // 256, fused)
        rounded_q8_k(work, row, k // 256)


@compiled
def products(p, begin, end):
    """Units [begin, end): a tile of rows of a matrix of src0, times all columns that are for it; tiles outermost."""
    n_matrices, n_rows, k, n_columns, tile_rows = values(p, 5)
    src0, nb01, nb02, nb03, ne02, code, packed, n_packed, to_float = values(p + 8 * 5, 9)
    dots_code, scales, quants, quant_row, quant_2, quant_3, scale_row, scale_2, scale_3 = values(p + 8 * 14, 9)
    src1, nb11, nb12, nb13, ne11, ne12, ne13, src1_code = values(p + 8 * 23, 8)
    dst, nb1, nb2, nb3, ids, ids_nb0, ids_nb1, ids_ne0, ids_ne1 = values(p + 8 * 31, 9)
    rounding, rounds, simd, fused, sgemm, least, as_blocks = values(p + 8 * 40, 7)
    steps = p + 8 * 47

    x, y = np.empty(n_columns, np.int64), np.empty(n_columns, np.int64)
    ready_bytes = k // 256 * READY_Q8_K if rounding == _TO_Q8_K else k // 32 * READY_Q8
    line = max(ready_bytes, 4 * k)
    columns_memory = np.empty(n_columns * line, np.uint8)
    columns = types.int64(columns_memory.ctypes.data)
    work_memory = np.empty(max(line, 4 * k), np.uint8)
    work = types.int64(work_memory.ctypes.data)
    tile_memory = np.empty(tile_rows * k, np.float32)
    tile = types.int64(tile_memory.ctypes.data)
    out_memory = np.empty(max(n_columns, 1) * tile_rows, np.float32)
    out = types.int64(out_memory.ctypes.data)
    where = np.empty(3, np.int64)
    known, count, by_blas, as_integers, y_step, x_step = types.int64(-1), 0, False, False, 0, 0

    for unit in range(begin, end):
        matrix, first = unit % n_matrices, unit // n_matrices * tile_rows
        rows = min(tile_rows, n_rows - first)
        i02, i03 = matrix % ne02, matrix // ne02
        if matrix != known:
            known, count = matrix, 0
            if ids:
                for i in range(ids_ne1):
                    for j in range(ids_ne0):
                        if array_at(ids + i * ids_nb1 + j * ids_nb0, types.int32, 1)[0] == matrix:
                            x[count] = src1 + j % ne11 * nb11 + i * nb12
                            y[count] = dst + j * nb1 + i * nb2
                            count += 1
            else:
                r2, r3 = ne12 // ne02, ne13 // (n_matrices // ne02)
                for i13 in range(i03 * r3, (i03 + 1) * r3):
                    for i12 in range(i02 * r2, (i02 + 1) * r2):
                        for i11 in range(ne11):
                            x[count] = src1 + i11 * nb11 + i12 * nb12 + i13 * nb13
                            y[count] = dst + i11 * nb1 + i12 * nb2 + i13 * nb3
                            count += 1
            by_blas = sgemm != 0 and count >= least
            as_integers = dots_code != NO_DOTS and not by_blas
            y_step, x_step = _step(y, count), _step(x, count)
            as_is = src1_code == F32 and not as_integers and (rounding == _AS_IS or not rounds)
            if not as_is or (by_blas and (x_step < 4 * k or x_step % 4)):
                for c in range(count):
                    row = columns + c * line
                    source = x[c]
                    if as_integers:
                        if src1_code != F32:
                            decode_run(src1_code, source, 0, 0, work, k)
                            source = work
                        if rounding == _TO_Q8_K:
                            ready_q8_k(source, row, k // 256, fused)
                        else:
                            ready_q8(source, row, k // 32, simd)
                    else:
                        decode_run(src1_code, source, 0, 0, row, k)
                        if rounds:
                            _round(rounding, simd, fused, work, k, row)
                    x[c] = row
                x_step = line
        if count == 0:
            continue
        at = src0 + i02 * nb02 + i03 * nb03 + first * nb01
        if as_integers:
            scale = scales + i02 * scale_2 + i03 * scale_3 + first * scale_row
            quant = quants + i02 * quant_2 + i03 * quant_3 + first * quant_row
            for c in range(count):
                dots(dots_code, scale, quant, steps, x[c], y[c] + 4 * first, rows)
        elif as_blocks:
            where[0], where[1] = nb01, k // LANES
            together = max(12, _NEAR_BYTES // (48 * k) * 12)
            for c in range(0, count, together):
                x_at, y_at = types.int64(x.ctypes.data) + 8 * c, types.int64(y.ctypes.data) + 8 * c
                for r in range(0, rows, GROUP):
                    row, where[2] = at + r * nb01, 4 * (first + r)
                    if code == F16:
                        multiply_f16(row, types.int64(where.ctypes.data), x_at, y_at, min(together, count - c))
                    else:
                        multiply_f32(row, types.int64(where.ctypes.data), x_at, y_at, min(together, count - c))
        elif not by_blas and code in (F16, F32):
            for r in range(0, rows, GROUP):
                row, some = at + r * nb01, min(GROUP, rows - r)
                for c in range(count):
                    if code == F16:
                        dots_f16(row, nb01, x[c], k, y[c] + 4 * (first + r), some)
                    else:
                        dots_f32(row, nb01, x[c], k, y[c] + 4 * (first + r), some)
        elif not by_blas:
            for r in range(rows):
                row = at + r * nb01
                decode_row(code, to_float, row, packed, n_packed, tile, k)
                row = tile
                for c in range(count):
                    array_at(y[c] + 4 * (first + r), types.float32, 1)[0] = dot(row, x[c], k)
        else:
            weights, step = at, nb01 // 4
            if code != F32 or nb01 % 4 or to_float:
                weights, step = tile, k
                for r in range(rows):
                    decode_row(code, to_float, at + r * nb01, packed, n_packed, tile + 4 * k * r, k)
            if y_step >= 4 * rows and y_step % 4 == 0:
                multiply_by_blas(sgemm, count, rows, k, x[0], x_step // 4, weights, step, y[0] + 4 * first, y_step // 4)
            else:
                multiply_by_blas(sgemm, count, rows, k, x[0], x_step // 4, weights, step, out, rows)
                for c in range(count):
                    copy(out + 4 * rows * c, y[c] + 4 * first, 4 * rows)
    keep(columns_memory)
    keep(where)
    keep(x)
    keep(y)
    keep(work_memory)
    keep(tile_memory)
    keep(out_memory)
    return 0


_COLUMN_TYPES = {*_ROUNDINGS} - {"q8_1", "q8_K"}  # ggml has no to_float of these
_TYPES = [
    ("f32", weights, columns)
    for weights, rounded in VEC_DOT.items()
    for columns in sorted({"f32", rounded, *(["bf16"] if rounded == "f32" else [])} & _COLUMN_TYPES)
]


def _refuse(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if a.ne[0] != b.ne[0]:
        return f"src0 of ne {a.ne}, src1 of ne {b.ne}: rows of different lengths"
    for role, tensor in (("src0", a), ("src1", b), ("dst", dst)):
        if not tensor.has_contiguous_rows():
            return f"{role} rows have gaps: nb0 is {tensor.nb[0]}"
    return None


def _refuse_mul_mat(dst: Tensor, a: Tensor, b: Tensor) -> str | None:
    if dst.ne != (a.ne[1], *b.ne[1:]) or any(n % m if m else n for n, m in zip(b.ne[2:], a.ne[2:], strict=True)):
        return f"src0 of ne {a.ne}, src1 of ne {b.ne} do not fit dst of ne {dst.ne}"
    return _refuse(dst, a, b)


def _refuse_mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> str | None:
    used, n_tokens = ids.ne[:2]
    if dst.ne != (a.ne[1], used, n_tokens, 1) or b.ne[2:] != (n_tokens, 1) or not b.ne[1] or used % b.ne[1]:
        return f"src0 of ne {a.ne}, src1 of ne {b.ne}, ids of ne {ids.ne} do not fit dst of ne {dst.ne}"
    if a.ne[3] != 1:
        return f"src0 of ne {a.ne}: must be 1 in dimension 3"
    return _refuse(dst, a, b)


def _least(a: Tensor) -> int:
    """How many columns go to BLAS."""
    return _MANY_OF_INTEGERS if a.type in DOTS else _MANY


def _rounds(a: Tensor, b: Tensor, n_columns: int, numerics: Numerics) -> bool:
    """Whether so many columns are rounded as the CPU rounds them."""
    few = a.type in DOTS and n_columns < _least(a)
    return b.type in ("f32", "f16", "bf16") and (numerics.matmul == "exact" or few)


def _decoded(values: NDArray[np.generic], type: str, numerics: Numerics) -> NDArray[np.float64]:
    """What a view of a tensor of a type holds, as float64 rows."""
    bytes_ = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape[:3], -1)
    kind = numerics.codec(type)
    return kind.decode(bytes_.reshape(-1, kind.block_bytes)).reshape(*values.shape[:3], -1).astype(np.float64)


def _define_products(
    y: NDArray[np.float32],
    a: Tensor,
    index: tuple[int, int],
    x: NDArray[np.float64],
    rounds: bool,
    numerics: Numerics,
) -> None:
    """y (n, ne01) = x (n, ne00) times the matrix of src0 at an index, its rows a tile at a time."""
    rounded = VEC_DOT[a.type]
    below = np.zeros(0)
    if rounds:
        units = x.astype(np.float32).reshape(-1, codec(rounded).block_size)
        blocks = numerics.codec(rounded).encode(units, numerics.rounding).reshape(len(x), -1)
        x = dequantize(blocks, rounded).astype(np.float64)
        if rounded == "q8_1":
            sums = blocks.reshape(len(x), -1, 36)[..., 2:4].copy().view(np.float16)[..., 0]
            below = sums - x.reshape(len(x), -1, 32).sum(-1)
    rows = max(1, _TILE_BYTES // (4 * a.ne[0]))
    matrix = a.view()[index]
    for first in range(0, a.ne[1], rows):
        tile = matrix[None, None, first : first + rows]
        total = x @ _decoded(tile, a.type, numerics)[0, 0].T
        if below.size:  # its sum of a block stands beside the quants, rounded to f16
            total += below @ tile[0, 0, ..., 2:4].copy().view(np.float16)[..., 0].astype(np.float64).T
        y[:, first : first + rows] = total


@op("MUL_MAT", types=_TYPES, refuse=_refuse_mul_mat, optional=True)
def mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[i3, i2] = b[i3, i2] @ a[i3 / r3, i2 / r2].T, for r2, r3 = b.ne[2] / a.ne[2], b.ne[3] / a.ne[3].

    Equals ggml_compute_forward_mul_mat but for the rounding of sums, where columns are rounded (see this module).
    """
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    rounds = _rounds(a, b, b.ne[1] * r2 * r3, numerics)
    x = _decoded(b.view(), b.type, numerics)
    for i3, i2 in np.ndindex(b.ne[3], b.ne[2]):
        _define_products(dst.view()[i3, i2], a, (i3 // r3, i2 // r2), x[i3, i2], rounds, numerics)


@op("MUL_MAT_ID", types=[(*types_, "i32") for types_ in _TYPES], refuse=_refuse_mul_mat_id, optional=True)
def mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics = PLAIN) -> None:
    """dst[t, s] = b[t, s % b.ne[1]] @ a[ids[t, s]].T: what the experts of a token make of it.

    Equals ggml_compute_forward_mul_mat_id but for the rounding of sums, where columns are rounded (see this module).
    """
    chosen, x = checked_ids(ids, a.ne[2])[0], _decoded(b.view(), b.type, numerics)[0]
    for expert in np.unique(chosen):
        token, slot = np.nonzero(chosen == expert)
        y = np.empty((len(token), a.ne[1]), np.float32)
        rounds = _rounds(a, b, len(token), numerics)
        _define_products(y, a, (0, int(expert)), x[token, slot % b.ne[1]], rounds, numerics)
        dst.view()[0, token, slot] = y


def _as_blocks(a: Tensor, b: Tensor, numerics: Numerics) -> bool:
    """Whether ggml's CPU multiplies blocks of rows and columns (llamafile_sgemm), and does so exactly."""
    fits = b.ne[1] > 1 and a.ne[0] % LANES == 0 and a.ne[1] % GROUP == 0
    together = b.is_contiguous() or b.type != a.type
    return numerics.matmul == "exact" and a.type in ("f16", "f32") and fits and together


def _bind(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor | None, numerics: Numerics) -> Work | None:
    k, n_rows, n_matrices = a.ne[0], a.ne[1], a.ne[2] * a.ne[3]
    n_columns = b.ne[1] * b.ne[2] * b.ne[3] // n_matrices if ids is None else ids.n_elements
    to_float = 0 if a.type in CODES else numerics.to_float.get(a.type, 0)
    decodes = a.type in CODES or to_float != 0
    plain = b.type in ("f32", "f16", "bf16")
    dots_code = DOTS.get(a.type, NO_DOTS) if plain else NO_DOTS
    if b.type not in CODES or not (decodes or dots_code):
        return None
    exact = numerics.matmul == "exact"
    blas = decodes and n_columns >= _least(a) and not (exact and (dots_code or a.type in ("f16", "f32")))
    sgemm = numerics.sgemm if blas else 0
    as_blocks = ids is None and _as_blocks(a, b, numerics)
    if sgemm or as_blocks:
        tile_rows = min(256, max(64, _TILE_BYTES // (4 * k)), -(-n_rows // 64) * 16)
    else:
        tile_rows = max(16, -(-n_rows // 128) * 16 if n_matrices > 1 else 16)
    unit = a.codec.block_bytes
    steps = [unit, unit, a.nb[1], a.nb[1], k // a.codec.block_size]
    scales = [a.address, *a.nb[1:]]
    quants = [a.address + _QUANTS_AT.get(a.type, 0), *a.nb[1:]]
    packed = n_packed = 0
    if a.packed is not None:
        packed, n_packed = a.packed.address, a.packed.n_blocks
        payload, index = unit - 2, (a.address - a.packed.address) // unit
        blocks = [nb // unit for nb in a.nb[1:]]
        scales = [packed + payload * n_packed + 2 * index, *(2 * n for n in blocks)]
        quants = [packed + payload * index, *(payload * n for n in blocks)]
        steps = [2, payload, scales[1], quants[1], k // a.codec.block_size]
        dots_code = Q4_0_PACKED if a.type == "q4_0" else dots_code
    p = parameters(
        n_matrices, n_rows, k, n_columns, tile_rows,
        a.address, *a.nb[1:], a.ne[2], CODES.get(a.type, -1), packed, n_packed, to_float,
        dots_code, scales[0], quants[0], *quants[1:], *scales[1:],
        b.address, *b.nb[1:], *b.ne[1:], CODES[b.type],
        dst.address, *dst.nb[1:], *((ids.address, *ids.nb[:2], *ids.ne[:2]) if ids is not None else (0,) * 5),
        _ROUNDINGS[VEC_DOT[a.type]], plain and exact, numerics.rounding == "simd", numerics.fuses,
        sgemm, _least(a), as_blocks, *steps,
    )  # fmt: skip
    n_units = -(-n_rows // tile_rows) * n_matrices
    n_bytes = _WEIGHT * n_matrices * n_rows * (a.nb[1] + k * n_columns // 4)
    return Work(products, p, n_units, n_bytes, keep=(dst, a, b, ids))


@mul_mat.compiled
def _mul_mat(dst: Tensor, a: Tensor, b: Tensor, numerics: Numerics) -> Call | None:
    work = _bind(dst, a, b, None, numerics)
    return None if work is None else Job(work)


@mul_mat_id.compiled
def _mul_mat_id(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> Call | None:
    work = _bind(dst, a, b, ids, numerics)
    return None if work is None else Job(ids_check(ids, a.ne[2]), work)
