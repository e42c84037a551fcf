"""Products of quantised rows with several quantised vectors, in fewer steps than `quant.panels`.

The panels are the same. All products of a block are added as integers, with the centres of their type, before they are
scaled: a float32 is rounded once a block, not once for each of its words. So the results are as close to the true
products as those of ggml's CPU, but not equal to them.
"""

from __future__ import annotations

from itertools import pairwise

from quant.dots import N_STEPS, PACKED, READY_Q8, READY_Q8_K, SCALE, SCALE_K, SCALED_SUM, SUMS_K, TOTAL, columns_of
from quant.kernels.jit import inlined
from quant.kernels.processor import adds_pairs, multiplies_unsigned
from quant.kernels.records import address_of
from quant.kernels.vectors import FLOAT, INT32, INT64, part
from quant.panels import BLOCK, BLOCK_K, D_K, D_MINIMA_K, MINIMA_K, MINIMUM, NEAR, ROWS, SCALES_K, WORD, D, centres_at

COLUMNS = 4  # vectors at a time, or FEW
FEW = 2


def _words_of(block, first, count):
    """`count` words of a vector from a place on, each for all rows."""
    return [(block + 4 * (first + j)).load(INT32).filled(ROWS).as_bytes() for j in range(count)]


def _dots_32(n_columns, largest, *, has_minimum=False):
    """For rows in blocks of 32, whose bytes are at most `largest`; 0: they are signed."""

    @part
    def dots(panel, steps, y, target, offset):
        n = steps.number_at(N_STEPS - 1)
        columns, targets = columns_of(y, target, offset, n_columns)
        none = y.zeros(INT32, ROWS)
        has_centre = not has_minimum and (largest > 0 or multiplies_unsigned())

        def add(i, sums):
            at, added = panel + i * BLOCK, []
            words = [(at + WORD * j).load(INT32, ROWS).as_bytes() for j in range(8)]
            d = (at + D).load(FLOAT, ROWS)
            blocks = [column + i * READY_Q8 for column in columns]
            wholes = [(block + TOTAL).load(INT32).filled(ROWS) if has_centre else none for block in blocks]
            wholes = [
                whole.plus_words(words, _words_of(block, 0, 8), largest)
                for whole, block in zip(wholes, blocks, strict=True)
            ]
            for block, whole, total in zip(blocks, wholes, sums, strict=True):
                added.append(whole.to_float().fused_multiply_add(d * (block + SCALE).load(FLOAT), total))
                if has_minimum:
                    minimum, scaled = (at + MINIMUM).load(FLOAT, ROWS), (block + SCALED_SUM).load(FLOAT)
                    added[-1] = minimum.fused_multiply_add(scaled.filled(ROWS), added[-1])
            return added

        for to, total in zip(targets, n.count(add, *[y.zeros(FLOAT, ROWS)] * n_columns), strict=True):
            to.store(total)

    return dots


def _dots_k(n_columns, largest, *, n_scales):
    """For rows in blocks of 256: 8 scales and minima (q4_K), or 16 scales and a centre of 32 (q6_K)."""
    has_minimum = n_scales == 8

    @part
    def dots(panel, steps, y, target, offset):
        n, eight = steps.number_at(N_STEPS - 1), y.zeros(INT64).as_address() + 8
        columns, targets = columns_of(y, target, offset, n_columns)
        none, zero = y.zeros(INT32, ROWS), y.zeros(FLOAT, ROWS)
        kind, start = (INT32, none) if adds_pairs() else (FLOAT, zero)

        def add(i, sums):
            at, blocks = panel + i * BLOCK_K, [column + i * READY_Q8_K for column in columns]
            factors_at = MINIMA_K if has_minimum else centres_at()

            def add_part(k, so_far):
                """Adds the products of 32 elements, times their scales, and sums of the vector, times their factors."""
                words = [(at + (k * (8 * WORD) + WORD * j)).load(INT32, ROWS).as_bytes() for j in range(8)]
                numbers = [k * (n_scales // 8) + s for s in range(n_scales // 8)]
                scales = [(at + (number * WORD + SCALES_K)).load(kind, ROWS) for number in numbers]
                factors = [(at + (number * WORD + factors_at)).load(FLOAT, ROWS) for number in numbers]
                added = []
                for block, total, below in zip(blocks, so_far[::2], so_far[1::2], strict=True):
                    y_words = _words_of(block + k * 32, 0, 8)
                    y_sums = [(block + (k * 8 + SUMS_K + 4 * j)).load(INT32) for j in range(2)]
                    if has_minimum:
                        y_sums = [y_sums[0] + y_sums[1]]
                    for s, (begin, end) in enumerate(pairwise(range(0, 9, 8 * 8 // n_scales))):
                        some = words[begin:end], y_words[begin:end], largest
                        if adds_pairs():
                            total = total.plus_words(*some, times=scales[s])
                        else:
                            total = none.plus_words(*some).to_float().fused_multiply_add(scales[s], total)
                        below = factors[s].fused_multiply_add(y_sums[s].to_float().filled(ROWS), below)
                    added += [total, below]
                return added

            added = []
            parts = eight.count(add_part, *[start, zero] * n_columns)
            d = (at + D_K).load(FLOAT, ROWS)
            lowered = (at + D_MINIMA_K).load(FLOAT, ROWS) * -1.0 if has_minimum else d * -32.0
            for block, total, below, whole in zip(blocks, parts[::2], parts[1::2], sums, strict=True):
                y_scale = (block + SCALE_K).load(FLOAT)
                products = (total.to_float() if adds_pairs() else total).fused_multiply_add(d * y_scale, whole)
                added.append(below.fused_multiply_add(lowered * y_scale, products))
            return added

        for to, total in zip(targets, n.count(add, *[zero] * n_columns), strict=True):
            to.store(total)

    return dots


def _kernels(ready, dots, *kind, **more):
    """For COLUMNS vectors, and for FEW; the bytes of a vector's block."""
    return dots(COLUMNS, *kind, **more), dots(FEW, *kind, **more), ready


_4_bits = _kernels(READY_Q8, _dots_32, 15)
PANELS = {
    "q8_0": _kernels(READY_Q8, _dots_32, 0),
    "q4_0": _4_bits,
    PACKED: _4_bits,
    "q4_1": _kernels(READY_Q8, _dots_32, 15, has_minimum=True),
    "q5_0": _kernels(READY_Q8, _dots_32, 31),
    "q5_1": _kernels(READY_Q8, _dots_32, 31, has_minimum=True),
    "q4_K": _kernels(READY_Q8_K, _dots_k, 15, n_scales=8),
    "q6_K": _kernels(READY_Q8_K, _dots_k, 63, n_scales=16),
}
"""What multiplies a panel with COLUMNS vectors, and with FEW; the bytes of a block of a vector."""


@inlined
def all_panels(kernels, rows, columns, panel):
    """As `quant.panels.all_panels`, for FEW vectors or more, but for the rounding of the sums.

    kernels  (lay, four, two, ready): entries of `quant.panels.LAYS` and of `PANELS`
    """
    lay, four, two, ready = kernels
    scale, quants, steps, first, n_rows = rows
    y, target, n_columns = columns
    at = address_of(steps)
    together = max(1, NEAR // (ready * steps.n_blocks * COLUMNS)) * COLUMNS
    for begin in range(0, n_columns, together):
        end = min(begin + together, n_columns)
        for row in range(0, n_rows // ROWS * ROWS, ROWS):
            lay(scale + row * steps.scale_row, quants + row * steps.quants_row, at, panel)
            offset, at_once = 4 * (first + row), COLUMNS if n_columns >= COLUMNS else FEW
            for column in range(begin, end, at_once):
                c = min(column, n_columns - at_once)  # the last ones may have been there before
                if n_columns >= COLUMNS:
                    four(panel, at, y + 8 * c, target + 8 * c, offset)
                else:
                    two(panel, at, y + 8 * c, target + 8 * c, offset)
