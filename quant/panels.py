"""Products of quantised rows with several quantised vectors, as `quant.dots` gives them, byte for byte.

As many rows as a vector has lanes become a panel: word j of a block, four quants, of one row in each lane. So one
instruction multiplies a word of each row with the same word of a vector, and nothing is added across lanes. Each word
has sums of its own, as ggml's CPU has them; they are added up at the end. To lay out a panel takes as long as some
three products, for any number of vectors.
"""

from __future__ import annotations

from itertools import product

from quant.dots import (
    LARGEST,
    N_STEPS,
    PACKED,
    READY_Q8,
    READY_Q8_K,
    SCALE,
    SCALE_K,
    SCALED_SUM,
    SUMS,
    SUMS_K,
    byte_of,
    columns_of,
    fetch,
    quants_q4,
    quants_q4_packed,
    quants_q5,
    quants_q8_0,
    scales_q4_k,
)
from quant.kernels.jit import inlined
from quant.kernels.matrices import LANES
from quant.kernels.processor import adds_pairs, multiplies_unsigned
from quant.kernels.records import address_of
from quant.kernels.vectors import (
    FLOAT,
    HALF,
    INT8,
    INT16,
    INT32,
    Value,
    gathered,
    part,
    transposed,
)

ROWS = LANES  # of a panel
COLUMNS = 2 if LANES == 16 else 1  # vectors in blocks of 32 at a time: as many as registers hold the sums of

NEAR = 1 << 18  # bytes of vectors that stay in a processor's own caches
WORD = 4 * ROWS  # bytes of a word of each row
D, MINIMUM, BLOCK = 8 * WORD, 9 * WORD, 10 * WORD  # of a block of 32: words, scales, minima; float32
# of a block of 256: words, up to 16 scales, 8 minima or 16 factors of centres, the scales of scales and minima
SCALES_K, MINIMA_K, D_K, D_MINIMA_K, BLOCK_K = (n * WORD for n in (64, 80, 96, 97, 98))


def _store_words(rows, to):
    """Stores eight vectors, of which vector j has word j of each row, of 32 bytes."""
    words = [row.as_words() for row in rows]
    if ROWS == 4:
        lower, upper = ([word.lanes_from(i, 1, 4) for word in words] for i in (0, 4))
        columns = transposed(lower) + transposed(upper)
    else:
        columns = transposed(words[:8])
        if ROWS == 16:
            others = transposed(words[8:])
            columns = [column.followed_by(other) for column, other in zip(columns, others, strict=True)]
    for j, column in enumerate(columns):
        (to + WORD * j).store(column)


def _store_pairs(places, first, second):
    """Stores the two float16 at the place of each row, as float32: a vector of the first, and one of the second."""
    both = gathered([place.load(INT32) for place in places])
    first.store(both.to(INT16).as_float().widened())
    second.store((both >> 16).to(INT16).as_float().widened())


def _lay_32(quants, *, has_minimum=False):
    """Lays out rows in blocks of 32."""

    @part
    def lay(scale, first, steps, panel):
        d_step, q_step, d_row, q_row, n = (steps.number_at(i) for i in range(N_STEPS))

        def add(i, _):
            fetch(first, i, q_step, q_row, ROWS, LARGEST)
            to = panel + i * BLOCK
            _store_words([quants(first + i * q_step + q_row * row) for row in range(ROWS)], to)
            places = [scale + i * d_step + d_row * row for row in range(ROWS)]
            if has_minimum:
                _store_pairs(places, to + D, to + MINIMUM)
            else:
                (to + D).store(gathered([place.load(HALF) for place in places]).widened())
            return ()

        n.count(add)

    return lay


def _dots_32(n_columns, *, has_minimum=False, positive=True):
    @part
    def dots(panel, steps, y, target, offset):
        n = steps.number_at(N_STEPS - 1)
        columns, targets = columns_of(y, target, offset, n_columns)
        zeros, none = y.zeros(FLOAT, ROWS), y.zeros(INT32, ROWS)
        has_centre = not has_minimum and (positive or multiplies_unsigned())

        def add(i, sums):
            at = panel + i * BLOCK
            added: list[Value] = []
            below: list[Value] = []
            words = [(at + WORD * j).load(INT32, ROWS).as_bytes() for j in range(8)]
            d, blocks = (at + D).load(FLOAT, ROWS), [column + i * READY_Q8 for column in columns]
            for block in blocks:
                scales = d * (block + SCALE).load(FLOAT)
                for j, word in enumerate(words):
                    y_word = (block + 4 * j).load(INT32).filled(ROWS).as_bytes()
                    start = (block + (SUMS + 4 * j)).load(INT32).filled(ROWS) if has_centre else none
                    fours = start.plus_fours(word, y_word, positive=positive).to_float()
                    added.append(fours.fused_multiply_add(scales, sums[len(added)]))
            if has_minimum:
                minimum = (at + MINIMUM).load(FLOAT, ROWS)
                for block in blocks:
                    below.append(sums[len(added) + len(below)] + minimum * (block + SCALED_SUM).load(FLOAT))
            return added + below

        sums = n.count(add, *[zeros] * ((9 if has_minimum else 8) * n_columns))
        for column, to in enumerate(targets):
            total = _added_up(sums[8 * column : 8 * column + 8])
            to.store(total + sums[8 * n_columns + column] if has_minimum else total)

    return dots


def _added_up(sums):
    """As `Value.total` adds lanes, of vectors."""
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[i] + sums[half + i] for i in range(half)]
    return sums[0]


@part
def _lay_q4_k(first, _, steps, panel):
    """Lays out rows of q4_K."""
    step, _, row_step, _, n = (steps.number_at(i) for i in range(N_STEPS))

    def add(i, _):
        fetch(first, i, step, row_step, ROWS, 144)
        rows, to = [first + i * step + row_step * row for row in range(ROWS)], panel + i * BLOCK_K
        for j in range(4):
            pairs = [(row + (16 + 32 * j)).load(INT8, 32) for row in rows]
            _store_words([pair & 15 for pair in pairs], to + 16 * j * WORD)
            _store_words([pair >> 4 for pair in pairs], to + (16 * j + 8) * WORD)
        words = (gathered([(row + at).load(INT32) for row in rows]) for at in (4, 8, 12))
        scales, minima = scales_q4_k(*words)
        for k in range(8):
            (to + (SCALES_K + WORD * k)).store(_as_scales(byte_of(scales[k // 4], k % 4)))
            (to + (MINIMA_K + WORD * k)).store(byte_of(minima[k // 4], k % 4).to_float())
        _store_pairs(rows, to + D_K, to + D_MINIMA_K)
        return ()

    n.count(add)


@part
def _lay_q6_k(first, _, steps, panel):
    """Lays out rows of q6_K."""
    step, _, row_step, _, n = (steps.number_at(i) for i in range(N_STEPS))

    def add(i, _):
        fetch(first, i, step, row_step, ROWS, 210)
        rows, to = [first + i * step + row_step * row for row in range(ROWS)], panel + i * BLOCK_K
        for half in range(2):
            high = [(row + (128 + 32 * half)).load(INT8, 32) for row in rows]
            for j in range(4):
                low = [(row + (64 * half + 32 * (j % 2))).load(INT8, 32) for row in rows]
                codes = [each & 15 if j < 2 else each >> 4 for each in low]
                bits = [((each >> (2 * j)) & 3) << 4 for each in high]
                quants = [code | bit for code, bit in zip(codes, bits, strict=True)]
                _store_words(quants, to + 8 * (4 * half + j) * WORD)
        for k in range(16):
            scale = gathered([(row + (192 + k)).load(INT8) for row in rows]).signed(INT32)
            (to + (SCALES_K + WORD * k)).store(_as_scales(scale))
            (to + (centres_at() + WORD * k)).store(scale.to_float())
        (to + D_K).store(gathered([(row + 208).load(HALF) for row in rows]).widened())
        return ()

    n.count(add)


def centres_at():
    """Where a block of q6_K has the factors of its centres: its scales, where these are float32."""
    return MINIMA_K if adds_pairs() else SCALES_K


def _as_scales(numbers):
    """Scales of words, as `_sums_of_words` takes them."""
    return numbers.as_factors() if adds_pairs() else numbers.to_float()


def _sums_of_words(at, block, n_scales):
    """Sums over a block of each word's products, times their scales: float32 of q4_K, int32 of q6_K.

    They are added as float32 in two halves, which hold them exactly; as int32 where AVX2 multiplies by scales on its
    way.
    """
    kind, none, each = INT32 if adds_pairs() else FLOAT, block.zeros(INT32, ROWS), n_scales // 8
    scales = [(at + (SCALES_K + WORD * k)).load(kind, ROWS) for k in range(n_scales)]

    def words(k, j):
        """Word j of part k: of the rows, and of the vector; its scales."""
        word = (at + WORD * (8 * k + j)).load(INT32, ROWS).as_bytes()
        y_word = (block + 4 * (8 * k + j)).load(INT32).filled(ROWS).as_bytes()
        return word, y_word, scales[each * k + each * j // 8]

    if adds_pairs():
        totals = [none] * 8
        for j, k in product(range(8), range(8)):
            word, y_word, scale = words(k, j)
            totals[j] = totals[j].plus_fours(word, y_word, positive=True, times=scale)
        return [total.to_float() for total in totals] if n_scales == 8 else totals
    halves = [[block.zeros(FLOAT, ROWS)] * 8 for _ in range(2)]
    for k, j in product(range(8), range(8)):
        word, y_word, scale = words(k, j)
        half, fours = halves[k // 4], none.plus_fours(word, y_word, positive=True).to_float()
        half[j] = fours.fused_multiply_add(scale, half[j])
    pairs = zip(*halves, strict=True)
    return [a + b if n_scales == 8 else a.to_int32() + b.to_int32() for a, b in pairs]


def _dots_k(*, n_scales):
    """For rows in blocks of 256: 8 scales and minima (q4_K), or 16 scales and a centre of 32 (q6_K).

    A float32 holds each whole number below 2 ** 24. So do sums of four products of scales and words of q6_K, of all
    eight of q4_K, and of two products of scales and sums: they are exact.
    """
    has_minimum = n_scales == 8

    @part
    def dots(panel, steps, y, target, offset):
        n = steps.number_at(N_STEPS - 1)
        (column,), (to,) = columns_of(y, target, offset, 1)
        zeros = y.zeros(FLOAT, ROWS)

        def of_block(at, block):
            """The whole numbers that ggml's CPU has of a block, as float32: of each word, and of minima."""
            words = _sums_of_words(at, block, n_scales)
            y_sums = [(block + (SUMS_K + 4 * k)).load(INT32).filled(ROWS) for k in range(16)]
            factors_at = at + (MINIMA_K if has_minimum else centres_at())
            factors = [(factors_at + WORD * k).load(FLOAT, ROWS) for k in range(n_scales)]
            if has_minimum:
                return words, _of_twos(factors, [(y_sums[2 * k] + y_sums[2 * k + 1]).to_float() for k in range(8)])
            centres = _of_twos(factors, [y_sum.to_float() * -32.0 for y_sum in y_sums])
            return [(a + b.to_int32()).to_float() for a, b in zip(words, centres, strict=True)], []

        def add(i, sums):
            at, block = panel + i * BLOCK_K, column + i * READY_Q8_K
            words, below = of_block(at, block)
            y_scale = (block + SCALE_K).load(FLOAT)
            scale = (at + D_K).load(FLOAT, ROWS) * y_scale
            lowered = (at + D_MINIMA_K).load(FLOAT, ROWS) * (y_scale * -1.0)
            factors = [scale] * len(words) + [lowered] * len(below)
            return [a.fused_multiply_add(b, c) for a, b, c in zip(words + below, factors, sums, strict=True)]

        sums = n.count(add, *[zeros] * (12 if has_minimum else 8))
        total = _added_up(sums[:8])
        to.store(total + _added_up(sums[8:]) if has_minimum else total)

    return dots


def _of_twos(factors, numbers):
    """Sums of two neighbouring products."""
    pairs = [*zip(factors, numbers, strict=True)]
    return [a.fused_multiply_add(b, c * d) for (a, b), (c, d) in zip(pairs[::2], pairs[1::2], strict=True)]


LAYS = {
    "q8_0": _lay_32(quants_q8_0),
    "q4_0": _lay_32(quants_q4),
    PACKED: _lay_32(quants_q4_packed),
    "q4_1": _lay_32(quants_q4, has_minimum=True),
    "q5_0": _lay_32(quants_q5),
    "q5_1": _lay_32(quants_q5, has_minimum=True),
    "q4_K": _lay_q4_k,
    "q6_K": _lay_q6_k,
}
"""What lays out rows of a type: lay(scale, quants, steps, panel)."""

_signed = _dots_32(COLUMNS, positive=False), _dots_32(1, positive=False), COLUMNS
_plain = _dots_32(COLUMNS), _dots_32(1), COLUMNS
_with_minima = _dots_32(COLUMNS, has_minimum=True), _dots_32(1, has_minimum=True), COLUMNS
_of_q4_k, _of_q6_k = _dots_k(n_scales=8), _dots_k(n_scales=16)
PANELS = {
    "q8_0": _signed,
    "q4_0": _plain,
    PACKED: _plain,
    "q4_1": _with_minima,
    "q5_0": _plain,
    "q5_1": _with_minima,
    "q4_K": (_of_q4_k, _of_q4_k, 1),
    "q6_K": (_of_q6_k, _of_q6_k, 1),
}
"""What multiplies a panel with several vectors, and with one; how many are several."""


def bytes_of(k: int) -> int:
    """Bytes of a panel of rows of k elements."""
    return k // 256 * BLOCK_K if k % 256 == 0 else k // 32 * BLOCK


@inlined
def all_panels(kernels, rows, columns, panel):
    """As `quant.dots.all_rows`, for several vectors; of the rows those that fill whole panels.

    kernels  (lay, several, one, at_once): entries of `LAYS` and `PANELS`
    panel    the address of `bytes_of` bytes to work in, at the begin of a cache line
    """
    lay, several, one, at_once = kernels
    scale, quants, steps, first, n_rows = rows
    y, target, n_columns = columns
    at = address_of(steps)
    together = max(1, NEAR // (READY_Q8 * steps.n_blocks)) * at_once
    for begin in range(0, n_columns, together):
        end = min(begin + together, n_columns)
        for row in range(0, n_rows // ROWS * ROWS, ROWS):
            lay(scale + row * steps.scale_row, quants + row * steps.quants_row, at, panel)
            offset, column = 4 * (first + row), begin
            while column + at_once <= end:
                several(panel, at, y + 8 * column, target + 8 * column, offset)
                column += at_once
            while column < end:
                one(panel, at, y + 8 * column, target + 8 * column, offset)
                column += 1
