"""Products of small float32 matrices inside kernels: a block of the result stays in registers."""

from __future__ import annotations

from typing import Any

from quant.kernels.jit import array_at, inlined, reduced
from quant.kernels.late import cgutils, intrinsic, types
from quant.kernels.processor import lanes
from quant.kernels.vectors import FLOAT, Address, Variable

LANES = lanes()  # floats of a vector
ROWS = 4  # of a block; it is as wide as _WIDE vectors, or one
_WIDE = 2 if LANES == 8 else 4


def _block(n_vectors: int) -> Any:
    @intrinsic
    def multiply_block(
        typing_context: Any, a: Any, a_row: Any, a_column: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, a_column, b, b_row, c, c_row = (Address(builder, argument) for argument in arguments[:7])
            places = [[c + c_row * i + 4 * LANES * j for j in range(n_vectors)] for i in range(ROWS)]
            sums = [[Variable(place.load(FLOAT, LANES)) for place in row] for row in places]
            with cgutils.for_range(builder, arguments[7]) as loop:
                k = Address(builder, loop.index)
                factors = [(b + b_row * k + 4 * LANES * j).load(FLOAT, LANES) for j in range(n_vectors)]
                for i, totals in enumerate(sums):
                    left = (a + a_row * i + a_column * k).load(FLOAT).filled(LANES)
                    for total, factor in zip(totals, factors, strict=True):
                        total.value = left.fused_multiply_add(factor, total.value)
            for row, totals in zip(places, sums, strict=True):
                for place, total in zip(row, totals, strict=True):
                    place.store(total.value)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), emit

    return multiply_block


_multiply_wide, _multiply_narrow = _block(_WIDE), _block(1)


@inlined
def multiply(a, a_row, a_column, b, b_row, c, c_row, m, depth, n):
    """c += a @ b of float32, with m rows (a multiple of ROWS) and n columns (a multiple of LANES).

    a_row, b_row and c_row are steps from row to row in bytes, a_column from column to column of a; columns of b and c
    have no gaps. The products of an element are added one after the other, each fused with its addition.
    """
    wide = n // (_WIDE * LANES) * _WIDE * LANES
    for i in range(0, m, ROWS):
        x, y = a + i * a_row, c + i * c_row
        for j in range(0, wide, _WIDE * LANES):
            _multiply_wide(x, a_row, a_column, b + 4 * j, b_row, y + 4 * j, c_row, depth)
        for j in range(wide, n, LANES):
            _multiply_narrow(x, a_row, a_column, b + 4 * j, b_row, y + 4 * j, c_row, depth)


@reduced
def dot(x, y, n):
    """The sum of products of n float32 at two addresses, in an order that suits vectors."""
    a, b = array_at(x, types.float32, n), array_at(y, types.float32, n)
    total = types.float32(0)
    for i in range(n):
        total += a[i] * b[i]
    return total
