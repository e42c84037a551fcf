"""Products of quantised rows with a quantised vector: integer dots, block by block, as ggml's CPU computes them.

The vector is quantised once (`ready_q8`, `ready_q8_k`), with the rounding of the type that ggml's CPU gives it
(vec_dot_type: q8_0, q8_1, q8_K), into blocks of a layout of its own: quants, their sums, the scale. Then `all_rows`
gives products with rows of weights, four rows at a time. Each product is a sum of integers per block, scaled as float32
(ggml_vec_dot_q8_0_q8_0 and its siblings). Of several vectors `quant.panels` gives the same.
"""

from __future__ import annotations

from typing import NamedTuple

from quant.blocks import magnitudes
from quant.codec import ROUNDINGS
from quant.kernels.jit import LINE, array_at, inlined
from quant.kernels.late import types
from quant.kernels.processor import multiplies_unsigned
from quant.kernels.records import address_of, size_of
from quant.kernels.vectors import BIT, FLOAT, HALF, INT8, INT16, INT32, INT64, Value, part

PACKED = "q4_0 packed"  # as a type of rows: nibbles in the device layout
CENTRES = {"q8_0": 128, "q4_0": 8, PACKED: 8, "q5_0": 16}  # what 0 is among the bytes that a vector is multiplied with

# a block of 32 of a vector: int8 quants, 8 int32 (sums of fours of them, times what 0 is in the rows' bytes), the
# float32 scale 8 times, scale * sum of all, the sum of the int32; so long that no vector crosses a cache line
SUMS, SCALE, SCALED_SUM, TOTAL, READY_Q8 = 32, 64, 96, 100, 128
# a block of 256: int8 quants, int32 sums of sixteens, float32 scale
SUMS_K, SCALE_K, READY_Q8_K = 256, 320, 324


def _ready(rounding):
    @part
    def ready(source, target, centre):
        """Quantises 32 float32."""
        x = source.load(FLOAT, 32)
        largest = magnitudes(x).largest().as_float()
        d = largest / 127.0
        if rounding == "simd":
            quants = (x * (127.0 / largest).where(largest.differs(0.0), 0.0)).rounded("rint").to_int32()
        else:
            how = "rint" if rounding == "neon" else "round"
            quants = (x * (1.0 / d).where(d.differs(0.0), 0.0)).rounded(how).to_int32()
        quants = quants.limited(-128, 127)
        fours = quants.sums_of_fours()
        total = (fours.lanes_from(0, 1, 4) + fours.lanes_from(4, 1, 4)).to_float().total()
        target.store(quants.to(INT8))
        (target + SUMS).store(fours * centre.value(INT32))
        (target + SCALE).store(d.narrowed().widened().filled(8))
        (target + SCALED_SUM).store((total * d).narrowed().widened())
        (target + TOTAL).store(total.to_int32() * centre.value(INT32))

    return ready


_ready_reference, _ready_simd, _ready_neon = map(_ready, ROUNDINGS)


_SIMD, _NEON = (ROUNDINGS.index(rounding) for rounding in ("simd", "neon"))

_SHIFT = 12582912.0  # 1.5 * 2 ** 23: a float32 so large has no fraction


def _ready_k(*, fused):
    @part
    def ready(source, inverse, target):
        """Quantises 16 float32 by a float32 factor."""
        x, factor = source.load(FLOAT, 16), inverse.load(FLOAT)
        rounded = x.fused_multiply_add(factor, _SHIFT) - _SHIFT if fused else (x * factor).rounded("rint")
        target.store(rounded.to_int32().limited(-128, 127).to(INT8))

    return ready


_ready_k_fused, _ready_k_plain = _ready_k(fused=True), _ready_k(fused=False)


@part
def _extreme(source, target):
    """The first of 256 float32 with the largest magnitude; NaN has none."""
    sizes = magnitudes(source.load(FLOAT, 256))
    first = sizes.equals(sizes.largest()).bits().first_set()
    target.store((source + first.to(INT64).as_address() * 4).load(FLOAT))


@part
def _sums_of_16(quants, target):
    sixteen = quants.load(INT8, 256).signed(INT32).sums_of_fours().sums_of_fours()
    target.store(sixteen)


@inlined
def ready_q8(x, target, n_blocks, rounding, centre):
    """Quantises n_blocks of 32 float32 at address x as q8_0 and q8_1 do. Target gets READY_Q8 bytes a block.

    rounding  one of ROUNDINGS, by its place there
    centre    of the rows that it is multiplied with, one of CENTRES, or 0
    """
    for i in range(n_blocks):
        if rounding == _NEON:
            _ready_neon(x + 128 * i, target + READY_Q8 * i, types.int64(-centre))
        elif rounding == _SIMD:
            _ready_simd(x + 128 * i, target + READY_Q8 * i, types.int64(-centre))
        else:
            _ready_reference(x + 128 * i, target + READY_Q8 * i, types.int64(-centre))


@inlined
def ready_q8_k(x, target, n_blocks, fused):
    """Quantises n_blocks of 256 float32 at address x as q8_K does. Target gets READY_Q8_K bytes a block.

    fused  a product is rounded once, to a whole number; else to a float32 first
    """
    for i in range(n_blocks):
        to = target + READY_Q8_K * i
        _extreme(x + 1024 * i, to + SCALE_K)
        scale = array_at(to + SCALE_K, types.float32, 1)
        some = abs(scale[0]) > types.float32(0)
        scale[0] = types.float32(-127) / scale[0] if some else types.float32(0)
        for j in range(0, 256, 16):
            if fused:
                _ready_k_fused(x + 1024 * i + 4 * j, to + SCALE_K, to + j)
            else:
                _ready_k_plain(x + 1024 * i + 4 * j, to + SCALE_K, to + j)
        _sums_of_16(to, to + SUMS_K)
        scale[0] = types.float32(1) / scale[0] if some else types.float32(0)


@part
def _unready(source, step, target):
    """Dequantises 32 quants at `source`, whose scale is `step` bytes further on, to float32 at target."""
    scale = (source + step).load(FLOAT)
    target.store(source.load(INT8, 32).to_float() * scale)


@inlined
def rounded_q8(source, target, n_blocks):
    """Dequantises n_blocks of `ready_q8` to float32."""
    for i in range(n_blocks):
        _unready(source + READY_Q8 * i, types.int64(SCALE), target + 128 * i)


@inlined
def rounded_q8_k(source, target, n_blocks):
    """Dequantises n_blocks of `ready_q8_k` to float32."""
    for i in range(n_blocks):
        at = source + READY_Q8_K * i
        for j in range(0, 256, 32):
            _unready(at + j, types.int64(SCALE_K - j), target + 1024 * i + 4 * j)


class Steps(NamedTuple):
    """How products go through rows of blocks, in bytes.

    scale, quants  from the scale and the quants of a block to those of the next block
    scale_row, quants_row  the same from one row to the next
    n_blocks  how many blocks a row has
    """

    scale: int
    quants: int
    scale_row: int
    quants_row: int
    n_blocks: int


N_STEPS = size_of(Steps)
_AHEAD = 4096  # bytes by which it reads ahead of the rows that come next
LARGEST = 34  # bytes of a block of 32: of q8_0


def fetch(rows, i, step, row_step, n_rows, n_bytes):
    """Prefetches n_rows * n_bytes bytes of the rows that follow, one cache line after the other, while blocks i of
    n_rows rows are multiplied.

    The processor does not foresee reads of several rows at a time, and it cannot fetch all of them at once. Into the
    second cache, as the first one is too small for what is that far ahead.
    """
    if n_rows > 1:
        for line in range(0, n_rows * n_bytes, LINE):
            (rows + (row_step + i * step) * n_rows + (_AHEAD + line)).prefetch(near=False)


def quants_q8_0(q):
    """32 bytes of the quants at an address, as `Value.plus_fours` takes them: unsigned ones are 128 more."""
    quants = q.load(INT8, 32)
    return quants ^ 0x80 if multiplies_unsigned() else quants


def quants_q4(q):
    """32 unsigned bytes of the nibbles at an address: the low ones, then the high ones."""
    pairs = q.load(INT8, 16)
    return (pairs & 15).followed_by(pairs >> 4)


def quants_q4_packed(q):
    """32 unsigned bytes of signed nibbles in the device layout, 8 more than these."""
    pairs = q.load(INT8, 16) ^ 0x88
    return (pairs & 15).interleaved(pairs >> 4)


def quants_q5(q):
    """As `quants_q4`; the fifth bits of all quants lie in the 4 bytes before the nibbles."""
    return quants_q4(q) | ((q + -4).load(BIT, 32).to(INT8) << 4)


def columns_of(y, target, offset, n):
    """The addresses of n columns and of their results, `offset` bytes further on."""
    return [y.number_at(i) for i in range(n)], [target.number_at(i) + offset for i in range(n)]


def _dots_32(n_rows, quants, *, has_minimum=False):
    """For rows in blocks of 32: quants(address) gives bytes as `Value.plus_fours` takes them."""
    positive = quants is not quants_q8_0

    @part
    def dots(scale, first, steps, y, target, offset):
        d_step, q_step, d_row, q_row, n = (steps.number_at(i) for i in range(N_STEPS))
        (column,), (to,) = columns_of(y, target, offset, 1)

        def add(i, sums):
            fetch(first, i, q_step, q_row, n_rows, LARGEST)
            block = column + i * READY_Q8
            vector, start = block.load(INT8, 32), y.zeros(INT32, 8)
            if not has_minimum and (positive or multiplies_unsigned()):
                start = (block + SUMS).load(INT32, 8)
            added: list[Value] = []
            for row in range(n_rows):
                d = (scale + i * d_step + d_row * row).load(HALF).widened()
                x = quants(first + i * q_step + q_row * row)
                product = start.plus_fours(x, vector, positive=positive).to_float()
                added.append(product.fused_multiply_add(d * (block + SCALE).load(FLOAT, 8), sums[row]))
            if has_minimum:
                for row in range(n_rows):
                    minimum = (scale + i * d_step + d_row * row + 2).load(HALF).widened()
                    added.append(sums[n_rows + row] + minimum * (block + SCALED_SUM).load(FLOAT))
            return added

        sums = n.count(add, *[y.zeros(FLOAT, 8)] * n_rows, *[y.zeros(FLOAT)] * (n_rows if has_minimum else 0))
        for row in range(n_rows):
            total = sums[row].total()
            (to + 4 * row).store(total + sums[n_rows + row] if has_minimum else total)

    return dots


def scales_q4_k(a, b, c):
    """The eight scales and the eight minima of a block, a byte each in two int32, from its three int32."""
    scales = a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | (((a >> 6) & 0x03030303) << 4)
    minima = b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | (((b >> 6) & 0x03030303) << 4)
    return scales, minima


def _in_turn(vectors):
    """The lanes of one or four vectors, one vector after the other."""
    while len(vectors) > 1:
        vectors = [a.followed_by(b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def byte_of(word, index):
    """Byte `index` of an int32."""
    return (word >> (8 * index)) & 0xFF


def _bytes_of(first, second):
    """The bytes of int32 as int32: four of each of the first ones, followed by four of each of the second ones."""
    n = first.lanes
    return first.picked(second, [each for i in range(n) for each in (i, n + i)]).as_bytes().to(INT32)


def _dots_q4_k(n_rows):
    """As ggml_vec_dot_q4_K_q8_K; what a block begins with is read of all rows at once."""

    @part
    def dots(first, _, steps, y, target, offset):
        step, _, row_step, _, n = (steps.number_at(i) for i in range(N_STEPS))
        (column,), (to,) = columns_of(y, target, offset, 1)

        def add(i, sums):
            fetch(first, i, step, row_step, n_rows, 144)
            rows, block = [first + i * step + row_step * row for row in range(n_rows)], column + i * READY_Q8_K
            y_scale, sixteens = (block + SCALE_K).load(FLOAT), (block + SUMS_K).load(INT32, 16)
            y_sums = sixteens.lanes_from(0, 2, 8) + sixteens.lanes_from(1, 2, 8)
            vectors = [
                (block + 32 * k).load(INT8, 32).followed_by((block + 32 * (k + 2)).load(INT8, 32)) for k in (0, 1, 4, 5)
            ]
            heads = _in_turn([row.load(INT32, 4) for row in rows])
            of_block, *words = (heads.lanes_from(at, 4, n_rows) for at in range(4))
            scales, minima = (_bytes_of(*each) for each in scales_q4_k(*words))
            factors = scales.as_factors()
            added: list[Value] = []
            d = of_block.to(INT16).as_float().widened() * y_scale
            for row in range(n_rows):
                total = y.zeros(INT32, 16)
                for half in range(2):
                    pairs = (rows[row] + (16 + 64 * half)).load(INT8, 64)
                    for k, codes in ((0, pairs & 15), (1, pairs >> 4)):
                        at = 8 * row + 4 * half + k
                        factor = factors.picked(factors, [at] * 8 + [at + 2] * 8)
                        total = total.plus_fours(codes, vectors[2 * half + k], positive=True, times=factor)
                total = total.lanes_from(0, 1, 8) + total.lanes_from(8, 1, 8)
                added.append(total.to_float().fused_multiply_add(d.lanes_from(row, 0, 8), sums[row]))
            below = minima * _in_turn([y_sums] * n_rows)
            below = below.lanes_from(0, 2, 4 * n_rows) + below.lanes_from(1, 2, 4 * n_rows)
            minimum = (of_block >> 16).to(INT16).as_float().widened() * (y_scale * -1.0)
            minimum = minimum.picked(minimum, [row for row in range(n_rows) for _ in range(4)])
            return [*added, below.to_float().fused_multiply_add(minimum, sums[-1])]

        *sums, lowered = n.count(add, *[y.zeros(FLOAT, 8)] * n_rows, y.zeros(FLOAT, 4 * n_rows))
        for row in range(n_rows):
            (to + 4 * row).store(sums[row].total() + lowered.lanes_from(4 * row, 1, 4).total())

    return dots


def _dots_q6_k(n_rows):
    @part
    def dots(first, _, steps, y, target, offset):
        step, _, row_step, _, n = (steps.number_at(i) for i in range(N_STEPS))
        (column,), (to,) = columns_of(y, target, offset, 1)

        def add(i, sums):
            fetch(first, i, step, row_step, n_rows, 210)
            block = column + i * READY_Q8_K
            y_sums, y_scale = (block + SUMS_K).load(INT32, 16), (block + SCALE_K).load(FLOAT)
            added: list[Value] = []
            for row in range(n_rows):
                x = first + i * step + row_step * row
                scales = (x + 192).load(INT8, 16).signed(INT32)
                centre, factors = scales * y_sums * -32, scales.as_factors()
                centre = centre.lanes_from(0, 2, 8) + centre.lanes_from(1, 2, 8)
                total = y.zeros(INT32, 16)
                for half in range(2):
                    low, high = (x + 64 * half).load(INT8, 64), (x + 128 + 32 * half).load(INT8, 32)
                    high = high.followed_by(high >> 2)
                    for k, codes in enumerate(((low & 15) | ((high & 3) << 4), (low >> 4) | (high & 0x30))):
                        place = 8 * half + 4 * k
                        factor = factors.picked(factors, [place + i // 4 for i in range(16)])
                        vector = (block + 16 * place).load(INT8, 64)
                        total = total.plus_fours(codes, vector, positive=True, times=factor)
                total = centre + total.lanes_from(0, 1, 8) + total.lanes_from(8, 1, 8)
                scale = (x + 208).load(HALF).widened() * y_scale
                added.append(total.to_float().fused_multiply_add(scale, sums[row]))
            return added

        sums = n.count(add, *[y.zeros(FLOAT, 8)] * n_rows)
        for row in range(n_rows):
            (to + 4 * row).store(sums[row].total())

    return dots


def _kernels(dots, at_once, *of):
    """For several rows times a vector, and for one; how many rows are several."""
    return dots(at_once, *of), dots(1, *of), at_once


def _with_minimum(n_rows, quants):
    return _dots_32(n_rows, quants, has_minimum=True)


DOTS = {
    "q8_0": _kernels(_dots_32, 4, quants_q8_0),
    "q4_0": _kernels(_dots_32, 4, quants_q4),
    "q4_1": _kernels(_with_minimum, 4, quants_q4),
    "q5_0": _kernels(_dots_32, 4, quants_q5),
    "q5_1": _kernels(_with_minimum, 4, quants_q5),
    "q4_K": _kernels(_dots_q4_k, 4),
    "q6_K": _kernels(_dots_q6_k, 4),
}
DOTS_PACKED = _kernels(_dots_32, 4, quants_q4_packed)


@inlined
def all_rows(kernels, rows, columns):
    """Products of rows with vectors made by `ready_q8` or `ready_q8_k`, as float32. A product is the same number
    however many rows and vectors there are.

    kernels  an entry of `DOTS`
    rows     (scale, quants, steps, first, n): addresses of the scale and the quants in the first row's first block, of
             the block itself for q4_K and q6_K; a `Steps` record in memory; the place of the first row's result in a
             vector's results; how many rows there are
    columns  (y, target, n): addresses of n addresses of the vectors' blocks, and of n of their results
    """
    several, one, at_once = kernels
    scale, quants, steps, first, n_rows = rows
    y, target, n_columns = columns
    at = address_of(steps)
    for column in range(n_columns):
        x, to, row = y + 8 * column, target + 8 * column, 0
        while row + at_once <= n_rows:
            several(scale + row * steps.scale_row, quants + row * steps.quants_row, at, x, to, 4 * (first + row))
            row += at_once
        while row < n_rows:
            one(scale + row * steps.scale_row, quants + row * steps.quants_row, at, x, to, 4 * (first + row))
            row += 1
