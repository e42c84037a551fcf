"""The error of a quantised tensor alone: of its weights, without a run of the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from graph_runner.quantdiff.files import Weights
from quant import codec, quantize

_AT_ONCE = 1 << 20  # weights
_SAMPLE = 1 << 17  # weights by which an error is estimated
_SMALLEST_BLOCK = 32  # of a type without blocks
OUTLIER = 6.0
"""How many times as large as the tensor's root mean square a weight is that is called an outlier."""
BINS = np.arange(-8.0, 2.25, 0.25)
"""The edges of a histogram of blocks: log10 of a block's error. What is outside counts as the first or the last."""


@dataclass(frozen=True)
class WeightError:
    """How far a tensor's weights are from those of the big model.

    squared    sum of squared differences
    nmse       the same / sum of squares of the big model's weights
    worst      the largest error of a block: mean of squared differences / mean square of the whole tensor, if
               that is not 0
    worst_at   that block's row and its number in the row
    outliers   how many of the big model's weights are outliers: they set the scale of a block
    histogram  how many blocks there are of each error, by BINS
    """

    squared: float
    nmse: float
    worst: float
    worst_at: tuple[int, int]
    outliers: int
    histogram: tuple[int, ...]


def weight_error(big: Weights, small: Weights) -> WeightError:
    """Returns the error of a tensor of the small model, in blocks of its type."""
    size = codec(small.type).block_size if codec(small.type).is_quantized else _SMALLEST_BLOCK
    size = size if big.ne[0] % size == 0 else big.ne[0]
    errors = []
    power, outliers = 0.0, 0
    for begin, end in _parts(big):
        values = big.rows(begin, end)
        power += float(np.square(values).sum(dtype=np.float64))
        difference = np.square(values - small.rows(begin, end)).reshape(-1, size)
        errors.append(difference.mean(axis=1, dtype=np.float64))
    mean_square = power / big.n_weights
    for begin, end in _parts(big):
        outliers += int((np.abs(big.rows(begin, end)) > OUTLIER * mean_square**0.5).sum())
    blocks = np.concatenate(errors)
    squared = float(blocks.sum()) * size
    relative = blocks / (mean_square or 1.0)
    place = int(relative.argmax())
    of_row = big.ne[0] // size
    return WeightError(
        squared, squared / power if power else 0.0, float(relative[place]), (place // of_row, place % of_row), outliers,
        tuple(histogram(relative)),
    )  # fmt: skip


def histogram(relative: NDArray[np.float64]) -> list[int]:
    """Returns how many errors are in each bin of BINS."""
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log10(relative), BINS[0], BINS[-1] - 1e-9)
    return [int(n) for n in np.histogram(logs, BINS)[0]]


def encoded(big: Weights, type: str) -> Weights:
    """Returns the big model's tensor in another type, byte for byte as llama-quantize writes it without an importance
    matrix."""
    parts = [quantize(big.rows(begin, end), type).reshape(-1) for begin, end in _parts(big)]
    return Weights(big.name, codec(type).name, big.ne, np.concatenate(parts))


def squared_error(big: Weights, type: str) -> float:
    """Returns about how large the sum of squared differences is if a tensor is quantised: of rows that are spread over
    it."""
    n_rows = big.n_weights // big.ne[0]
    wanted = max(1, _SAMPLE // big.ne[0])
    step = max(1, n_rows // wanted)
    values = np.concatenate([big.rows(row, row + 1) for row in range(0, n_rows, step)])
    back = Weights(big.name, codec(type).name, (big.ne[0], len(values)), quantize(values, type).reshape(-1))
    difference = np.square(values - back.rows(0, len(values)))
    return float(difference.sum(dtype=np.float64)) * n_rows / len(values)


def _parts(of: Weights) -> Iterator[tuple[int, int]]:
    """Yields ranges of rows, each of about as many weights as memory is taken for at once."""
    n_rows = of.n_weights // of.ne[0]
    step = max(1, _AT_ONCE // of.ne[0])
    for begin in range(0, n_rows, step):
        yield begin, min(begin + step, n_rows)
