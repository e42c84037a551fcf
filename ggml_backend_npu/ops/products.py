"""The kernel of MUL_MAT and MUL_MAT_ID (`ops.matmul`): rows of matrices times the columns that are for each."""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from quant.dots import NO_DOTS, READY_Q8, READY_Q8_K, dots, ready_q8, ready_q8_k, rounded_q8, rounded_q8_k
from quant.kernels.jit import array_at, compiled, copy, f32_to_f16_payload, inlined, keep, values
from quant.kernels.matrices import LANES, dot
from quant.kernels.orders import GROUP, dots_f16, dots_f32, multiply_f16, multiply_f32
from quant.runs import BF16, F16, F32, decode_row, decode_run, narrow_run, widen_run

_NEAR_BYTES = 1 << 18  # of columns that stay in a processor's own caches
_CBLAS = 101, 111, 112  # row-major, as it is, transposed

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
