"""Sums in the order in which ggml's CPU adds them, so that results are equal bit for bit.

ggml adds products in two orders: in its dot products, four vectors that are added at the end; in its matrix products
(tinyBLAS), one vector. Exponentials are added vector by vector. All orders are those of a ggml built for a processor
with the vectors that kernels are compiled for, AVX-512, AVX2 or NEON. Where it computes with float16 itself, it adds
products of float16 as float16, in vectors of twice as many lanes: the functions that end in `_in_halves`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quant.kernels.jit import LINE, array_at, f16_to_f32, fused_multiply_add, inlined
from quant.kernels.late import intrinsic, types
from quant.kernels.matrices import LANES
from quant.kernels.vectors import FLOAT, HALF, Address, Value, part

STEP = 4 * LANES  # elements that a round of a dot product takes
HALVES = 2 * LANES  # float16 of a vector
VECTOR = 8 if LANES == 16 else 4  # float32 of the last vectors that GCC makes of a loop; the rest is one by one
GROUP = 4  # rows that are multiplied together, or added up side by side
_SHORT = 8 * STEP  # elements of the longest rows that are multiplied together; longer ones are read one by one
_WIDE, _FEW = (6, 2) if LANES == 16 else (3, 3)  # columns that are multiplied together; the rest is one by one


def load_floats(address: Address, kind: Any) -> Value:
    """A vector of HALF or FLOAT as float32."""
    value = address.load(kind, LANES)
    return value.widened() if kind is HALF else value


def _of_pairs(x: Value, y: Value) -> Value:
    """The sums of neighbouring lanes of x, then those of y."""
    both = x.followed_by(y)
    return both.lanes_from(0, 2, x.lanes) + both.lanes_from(1, 2, x.lanes)


def sums_of_four(four: Sequence[Value], neighbours: bool = False) -> Value:
    """The sum of each of four vectors: the upper half is added to the lower one until one lane is left, or, with NEON,
    each lane to the one beside it.

    neighbours  the last four lanes are added to those beside them, as AVX's horizontal additions do
    """
    if LANES == 4:
        return _of_pairs(_of_pairs(*four[:2]), _of_pairs(*four[2:]))
    half = LANES // 2
    first, second = [*range(half), *range(LANES, LANES + half)], [*range(half, LANES), *range(LANES + half, 2 * LANES)]
    ab, cd = (x.picked(y, first) + x.picked(y, second) for x, y in (four[:2], four[2:]))
    if LANES == 16:
        fours = [[at + i for at in range(begin, 32, 8) for i in range(4)] for begin in (0, 4)]
        lanes = ab.picked(cd, fours[0]) + ab.picked(cd, fours[1])
    else:
        lanes = ab.followed_by(cd)
    if neighbours:
        lanes = lanes.lanes_from(0, 2, 8) + lanes.lanes_from(1, 2, 8)
    else:
        low = [4 * i + j for i in range(4) for j in range(2)]
        lanes = lanes.picked(lanes, low) + lanes.picked(lanes, [i + 2 for i in low])
    return lanes.lanes_from(0, 2, 4) + lanes.lanes_from(1, 2, 4)


def _dot_steps(kind: Any, n_bytes: int, n_rows: int) -> Any:
    @part
    def dot_steps(x: Address, row_step: Address, y: Address, n_steps: Address, to: Address) -> None:
        def step(i: Address, sums: Any) -> list[Value]:
            right = [(y + i * (4 * STEP) + 4 * LANES * j).load(FLOAT, LANES) for j in range(4)]
            rows = [x + row_step * r + i * (n_bytes * STEP) for r in range(n_rows)]
            pairs = [(load_floats(row + n_bytes * LANES * j, kind), right[j]) for row in rows for j in range(4)]
            return [a.fused_multiply_add(b, total) for (a, b), total in zip(pairs, sums, strict=True)]

        sums = n_steps.count(step, *[x.zeros(FLOAT, LANES)] * (4 * n_rows))
        rows = [sums[4 * r : 4 * r + 4] for r in range(n_rows)]
        totals = [(first + third) + (second + fourth) for first, second, third, fourth in rows]
        found = sums_of_four((totals * GROUP)[:GROUP], neighbours=LANES == 8)
        to.store(found.lanes_from(0, 1, n_rows))

    return dot_steps


_F16_ROW, _F16_ROWS = _dot_steps(HALF, 2, 1), _dot_steps(HALF, 2, GROUP)
_F32_ROW, _F32_ROWS = _dot_steps(FLOAT, 4, 1), _dot_steps(FLOAT, 4, GROUP)


@inlined
def _dots(row: Any, rows: Any, x: int, row_step: int, y: int, n: int, to: int, count: int) -> None:
    r = 0
    while r + GROUP <= count and n <= _SHORT:
        rows(x + r * row_step, row_step, y, n // STEP, to + 4 * r)
        r += GROUP
    while r < count:
        row(x + r * row_step, row_step, y, n // STEP, to + 4 * r)
        r += 1


@inlined
def dots_f16(x: int, row_step: int, y: int, n: int, to: int, count: int) -> None:
    """ggml_vec_dot_f16 of `count` rows of n float16 with n float32 that hold float16 values. The results are float32 at
    `to`."""
    _dots(_F16_ROW, _F16_ROWS, x, row_step, y, n, to, count)
    _add_rest(x, row_step, y, n // STEP * STEP, n, to, count)


@inlined
def _add_rest(x: int, row_step: int, y: int, begin: int, n: int, to: int, count: int) -> None:
    """Adds to `count` float32 at `to` the products of elements [begin, n), as float64."""
    if begin < n:
        right, found = array_at(y, types.float32, n), array_at(to, types.float32, count)
        for r in range(count):
            left = array_at(x + r * row_step, types.uint16, n)
            total = types.float64(found[r])
            for i in range(begin, n):
                total += types.float64(f16_to_f32(left[i]) * right[i])
            found[r] = types.float32(total)


@inlined
def dots_f32(x: int, row_step: int, y: int, n: int, to: int, count: int) -> None:
    """ggml_vec_dot_f32, as `dots_f16` of rows of float32. In the last n % STEP elements GCC rounds the products of
    whole vectors before it adds them."""
    _dots(_F32_ROW, _F32_ROWS, x, row_step, y, n, to, count)
    if n % STEP:
        right, found = array_at(y, types.float32, n), array_at(to, types.float32, count)
        for r in range(count):
            left = array_at(x + r * row_step, types.float32, n)
            total = found[r]
            for i in range(n // STEP * STEP, n // VECTOR * VECTOR):
                total += left[i] * right[i]
            for i in range(n // VECTOR * VECTOR, n):
                total = fused_multiply_add(left[i], right[i], total)
            found[r] = total


def _columns(kind: Any, n_bytes: int, width: int) -> Any:
    @part
    def multiply_columns(rows: Address, where: Address, x: Address, y: Address, ahead: Address) -> None:
        row_step, n_steps, offset = (where.number_at(i) for i in range(3))
        lines = 1 if width == _WIDE else max(1, GROUP * n_bytes * LANES // LINE)  # of a step
        at = [rows + row_step * i for i in range(GROUP)]
        columns = [x.number_at(j) for j in range(width)]

        def step(i: Address, sums: Any) -> list[Value]:
            for line in range(lines):
                (ahead + i * (lines * LINE) + LINE * line).prefetch(near=False)
            left = [load_floats(row + i * (n_bytes * LANES), kind) for row in at]
            right = [load_floats(column + i * (4 * LANES), FLOAT) for column in columns]
            pairs = [(a, b) for b in right for a in left]
            return [a.fused_multiply_add(b, total) for (a, b), total in zip(pairs, sums, strict=True)]

        sums = n_steps.count(step, *[rows.zeros(FLOAT, LANES)] * (GROUP * width))
        for j in range(width):
            (y.number_at(j) + offset).store(sums_of_four(sums[GROUP * j : GROUP * (j + 1)]))

    return multiply_columns


_F16_WIDE, _F16_FEW, _F16_ONE = (_columns(HALF, 2, width) for width in (_WIDE, _FEW, 1))
_F32_WIDE, _F32_FEW, _F32_ONE = (_columns(FLOAT, 4, width) for width in (_WIDE, _FEW, 1))


@inlined
def _multiply(wide: Any, few: Any, one: Any, rows: int, where: int, x: int, y: int, count: int) -> None:
    c, row_step, n_steps = 0, array_at(where, types.int64, 2)[0], array_at(where, types.int64, 2)[1]
    ahead, end = rows + GROUP * row_step, rows + 2 * GROUP * row_step
    while c + _WIDE <= count:
        wide(rows, where, x + 8 * c, y + 8 * c, ahead if ahead < end else rows)
        ahead += LINE * n_steps
        c += _WIDE
    while c + _FEW <= count:
        few(rows, where, x + 8 * c, y + 8 * c, ahead if ahead < end else rows)
        ahead = end
        c += _FEW
    while c < count:
        one(rows, where, x + 8 * c, y + 8 * c, ahead if ahead < end else rows)
        ahead = end
        c += 1


@inlined
def multiply_f16(rows: int, where: int, x: int, y: int, count: int) -> None:
    """GROUP rows of float16 times `count` columns of float32, added in tinyBLAS's order.

    where  address of three int64: bytes from row to row, elements of a row / LANES, an offset for addresses in y
    x, y   address of a list of the columns' addresses, and of one of the addresses of their results
    """
    _multiply(_F16_WIDE, _F16_FEW, _F16_ONE, rows, where, x, y, count)


@inlined
def multiply_f32(rows: int, where: int, x: int, y: int, count: int) -> None:
    """As `multiply_f16`, for rows of float32."""
    _multiply(_F32_WIDE, _F32_FEW, _F32_ONE, rows, where, x, y, count)


def _multiplied(rows: Sequence[Address], column: Address, sums: Sequence[Value]) -> list[Value]:
    """Sums of float16, after a vector of float16 of each row times that many float32 is added: rounded once."""
    right = column.load(FLOAT, HALVES).narrowed()
    return [row.load(HALF, HALVES).fused_multiply_add(right, total) for row, total in zip(rows, sums, strict=True)]


def _total_of_halves(sums: Value) -> Value:
    """The sum of float16 lanes as a float32: added as float32 with NEON, and as float16 with AVX512-FP16."""
    if LANES == 4:
        low, high = (sums.lanes_from(LANES * i, 1, LANES).widened() for i in range(2))
        return (low + high).total(neighbours=True)
    return sums.total().widened()


@part
def _row_in_halves(x: Address, y: Address, n_steps: Address, to: Address) -> None:
    def step(i: Address, sums: Any) -> list[Value]:
        at = [i * (4 * HALVES) + HALVES * j for j in range(4)]
        return [_multiplied([x + each * 2], y + each * 4, [total])[0] for each, total in zip(at, sums, strict=True)]

    first, second, third, fourth = n_steps.count(step, *[x.zeros(HALF, HALVES)] * 4)
    to.store(_total_of_halves((first + third) + (second + fourth)))


@inlined
def dots_in_halves(x: int, row_step: int, y: int, n: int, to: int, count: int) -> None:
    """As `dots_f16`, by a ggml that adds products of float16 as float16. The last elements, too few for four vectors,
    are added as float64."""
    for r in range(count):
        _row_in_halves(x + r * row_step, y, n // (4 * HALVES), to + 4 * r)
    _add_rest(x, row_step, y, n // (4 * HALVES) * 4 * HALVES, n, to, count)


@part
def _column_in_halves(rows: Address, where: Address, x: Address, y: Address) -> None:
    row_step, n_steps, offset = (where.number_at(i) for i in range(3))
    column, to = x.number_at(0), y.number_at(0) + offset

    def step(i: Address, sums: Any) -> list[Value]:
        at = [rows + row_step * r + i * (2 * HALVES) for r in range(GROUP)]
        return _multiplied(at, column + i * (4 * HALVES), sums)

    for r, total in enumerate(n_steps.count(step, *[rows.zeros(HALF, HALVES)] * GROUP)):
        (to + 4 * r).store(_total_of_halves(total))


@inlined
def multiply_in_halves(rows: int, where: int, x: int, y: int, count: int) -> None:
    """As `multiply_f16`, by a ggml that adds products of float16 as float16; `where` counts HALVES in place of
    LANES."""
    for c in range(count):
        _column_in_halves(rows, where, x + 8 * c, y + 8 * c)


def _vector_total(term: Callable[[Value], Value]) -> Any:
    @intrinsic
    def vector_total(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return term(Address(builder, arguments[0]).load(FLOAT, LANES)).total(neighbours=LANES == 4)._value

        return types.float32(types.int64), emit

    return vector_total


_lanes_total, _squares_total = _vector_total(lambda x: x), _vector_total(lambda x: x * x)


@inlined
def itself(value: Any) -> Any:
    """A term of a sum of values."""
    return value


@inlined
def square(value: Any) -> Any:
    """A term of a sum of squares."""
    return value * value


@inlined
def _total(vector_total: Any, term: Any, x: int, n: int) -> Any:
    found = types.float64(0)
    for i in range(0, n // LANES * LANES, LANES):
        found += types.float64(vector_total(x + 4 * i))
    row = array_at(x, types.float32, n)
    for i in range(n // LANES * LANES, n):
        found += types.float64(term(row[i]))
    return found


@inlined
def row_total(x: int, n: int) -> Any:
    """The sum of n float32 at an address, in the order of ggml_vec_soft_max_f32: float32 within a vector, float64
    across them."""
    return _total(_lanes_total, itself, x, n)


@inlined
def squares_total(x: int, n: int) -> Any:
    """The sum of squares in the order of ggml_vec_cvar_f32; otherwise as `row_total`."""
    return _total(_squares_total, square, x, n)


@inlined
def group_of_rows(x: int, row_step: int, n: int) -> Any:
    """GROUP rows of n float32, row_step bytes apart, from an address on."""
    return (
        array_at(x, types.float32, n),
        array_at(x + row_step, types.float32, n),
        array_at(x + 2 * row_step, types.float32, n),
        array_at(x + 3 * row_step, types.float32, n),
    )


@inlined
def add_rows(term: Any, kind: Any, x: int, row_step: int, n: int, n_rows: int, to: int) -> None:
    """Adds to each of n_rows float64 at `to` the terms of a row of n float32, one after the other in a float kind:
    if terms cancel, even float64 shows the order. Rows at x are row_step bytes apart; a GROUP of them is added up
    side by side, as an addition waits for the one before it."""
    sums, r = array_at(to, types.float64, n_rows), 0
    while r + GROUP <= n_rows:
        x0, x1, x2, x3 = group_of_rows(x + r * row_step, row_step, n)
        s0, s1, s2, s3 = kind(sums[r]), kind(sums[r + 1]), kind(sums[r + 2]), kind(sums[r + 3])
        for i in range(n):
            s0 += term(x0[i])
            s1 += term(x1[i])
            s2 += term(x2[i])
            s3 += term(x3[i])
        sums[r], sums[r + 1], sums[r + 2], sums[r + 3] = s0, s1, s2, s3
        r += GROUP
    while r < n_rows:
        row, total = array_at(x + r * row_step, types.float32, n), kind(sums[r])
        for i in range(n):
            total += term(row[i])
        sums[r] = total
        r += 1
