"""Products of quantised rows with a quantised vector, in fewer steps than `quant.dots`.

Two blocks of a row are multiplied at once: the first half of a register has the products of one of them, the second
half those of the other. A half holds the sums of both halves of its block, which ggml's CPU scales one by one. So a
float32 is rounded half as often, and the results are as close to the true products, but not equal to those.
"""

from __future__ import annotations

from quant.dots import N_STEPS, PACKED, READY_Q8, SCALE, SCALED_SUM, SUMS, columns_of, fetch
from quant.kernels.jit import inlined
from quant.kernels.records import address_of
from quant.kernels.vectors import BIT, FLOAT, INT8, INT16, INT32, INT64, Value, gathered, part

ROWS = 4  # at a time


def _as_factors(numbers):
    """Of two numbers whose low halves are float16: the first one in the first half of a vector, the other one in the
    second."""
    low = numbers.to(INT16)
    return low.picked(low, [0] * 4 + [1] * 4).as_float().widened()


def _nibbles(first, second):
    """Of the nibbles at two addresses: the low ones of both, and the high ones of both."""
    pairs = first.load(INT8, 16).followed_by(second.load(INT8, 16))
    return pairs & 15, pairs >> 4


def _nibbles_and_bits(first, second):
    """As `_nibbles`; the fifth bits of all quants of a block lie in the 4 bytes before its nibbles."""
    bits = [(quants + -4).load(BIT, 32).to(INT8) << 4 for quants in (first, second)]
    fifths = (bits[0].lanes_from(i, 1, 16).followed_by(bits[1].lanes_from(i, 1, 16)) for i in (0, 16))
    return [quants | fifth for quants, fifth in zip(_nibbles(first, second), fifths, strict=True)]


def _in_blocks(quants, unit):
    """Rows in blocks of `unit` bytes: what gives the heads of two blocks, and the quants of both in halves."""

    def read(scale, _, i):
        a = scale + i * (2 * unit)
        b = a + unit
        return gathered([a.load(INT32), b.load(INT32)]), quants(a + (unit - 16), b + (unit - 16))

    return read, unit


def _packed():
    """Rows of q4_0 in the device layout: signed nibbles, two neighbours in a byte; scales of two blocks in 4 bytes."""

    def read(scale, first, i):
        both = (scale + i * 4).load(INT32)
        pairs = (first + i * 32).load(INT8, 32) ^ 0x88
        low, high = pairs & 15, pairs >> 4
        halves = ([block + half + j for block in (0, 16) for j in range(8)] for half in (0, 8))
        x = [low.picked(high, [each for j in order for each in (j, 32 + j)]) for order in halves]
        return gathered([both, both >> 16]), x

    return read, 16


def _dots(rows_in, largest, *, has_minimum=False):
    """For ROWS rows in blocks of 32, whose quants are at most `largest`, and a vector."""
    read, unit = rows_in

    def of_column(a):
        """Of two blocks of a vector: the quants of both in halves, the scales, and what is added beside products."""

        def both(at, kind, lanes):
            return (a + at).load(kind, lanes).followed_by((a + (READY_Q8 + at)).load(kind, lanes))

        words, scales = [both(0, INT8, 16), both(16, INT8, 16)], both(SCALE, FLOAT, 4)
        if not has_minimum:
            return words, scales, both(SUMS, INT32, 4) + both(SUMS + 16, INT32, 4)
        first, second, nothing = (a + SCALED_SUM).load(FLOAT), (a + (READY_Q8 + SCALED_SUM)).load(FLOAT), a.zeros(FLOAT)
        return words, scales, gathered([first, *[nothing] * 3, second, *[nothing] * 3])

    @part
    def dots(scale, first, steps, y, target, offset):
        _, _, d_row, q_row, n = (steps.number_at(i) for i in range(N_STEPS))
        (column,), (to,) = columns_of(y, target, offset, 1)
        rows, none = [(scale + d_row * row, first + q_row * row) for row in range(ROWS)], y.zeros(INT32, 8)

        def add(i, sums):
            fetch(first, i, 2 * unit, q_row, ROWS, 2 * unit)
            added: list[Value] = []
            words, scales, beside = of_column(column + i * (2 * READY_Q8))
            for row, total in zip(rows, sums, strict=True):
                heads, x = read(*row, i)
                start = beside
                if has_minimum:
                    total, start = _as_factors(heads >> 16).fused_multiply_add(beside, total), none
                whole = start.plus_words(x, words, largest)
                added.append(whole.to_float().fused_multiply_add(_as_factors(heads) * scales, total))
            return added

        n_pairs = (n.value(INT64) >> 1).as_address()
        for row, total in enumerate(n_pairs.count(add, *[y.zeros(FLOAT, 8)] * ROWS)):
            (to + 4 * row).store(total.total())

    return dots


DOTS = {
    "q4_0": _dots(_in_blocks(_nibbles, 18), 15),
    PACKED: _dots(_packed(), 15),
    "q4_1": _dots(_in_blocks(_nibbles, 20), 15, has_minimum=True),
    "q5_0": _dots(_in_blocks(_nibbles_and_bits, 22), 31),
    "q5_1": _dots(_in_blocks(_nibbles_and_bits, 24), 31, has_minimum=True),
}
"""What multiplies ROWS rows of an even number of blocks with a vector."""


@inlined
def all_rows(several, rows, columns):
    """As `quant.dots.all_rows`, for one vector, but for the rounding of the sums; of the rows as many as are a multiple
    of ROWS.

    several  an entry of `DOTS`
    """
    scale, quants, steps, first, n_rows = rows
    y, target, _ = columns
    at = address_of(steps)
    for row in range(0, n_rows // ROWS * ROWS, ROWS):
        several(scale + row * steps.scale_row, quants + row * steps.quants_row, at, y, target, 4 * (first + row))
