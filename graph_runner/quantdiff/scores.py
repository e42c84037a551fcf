"""How far a model's next tokens are from those of another one, as llama-perplexity's `--kl-divergence` defines it.

`perplexity.cpp` keeps the log-probabilities of the base model in 16 bits, computes each token's numbers in float32, and
adds them in float64. The same is done here, so that means and errors equal its own to the digits that it prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
_RANGE = F32(16)  # log-probabilities that far below the largest one are the smallest, and those below -16 are left out
_STEPS = F32(65535)


@dataclass(frozen=True)
class Mean:
    """A mean, or what follows from one, and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Base:
    """The log-probabilities of the base model at n positions: lowest + scale * steps.

    steps    uint16 (n, n_vocab)
    scale    float32 (n,)
    lowest   float32 (n,)
    targets  the token that the text has there, (n,)
    """

    steps: NDArray[np.uint16]
    scale: NDArray[np.float32]
    lowest: NDArray[np.float32]
    targets: NDArray[np.int64]

    @classmethod
    def of(cls, logits: NDArray[np.float32], targets: Sequence[int]) -> Base:
        """Keeps logits, float32 (n, n_vocab), and the tokens that follow."""
        steps = np.zeros(logits.shape, np.uint16)
        scale, lowest = np.zeros(len(logits), F32), np.zeros(len(logits), F32)
        for i, row in enumerate(logits):
            high = row.max()
            low = max(row.min(), high - _RANGE)
            scale[i] = (high - low) / _STEPS
            lowest[i] = low - high - _log_sum(row, high)
            if scale[i]:
                above = np.maximum(row - low, F32(0))
                steps[i] = np.rint((F32(1) / scale[i]) * above)
        return cls(steps, scale, lowest, np.asarray(targets, np.int64))

    def scores(self, logits: NDArray[np.float32]) -> Scores:
        """Compares another model's logits, float32 (n, n_vocab)."""
        rows = [self._row(i, row) for i, row in enumerate(logits)]
        return Scores(*(np.array(each) for each in zip(*rows, strict=True)))

    def _row(self, i: int, logits: NDArray[np.float32]) -> tuple[Any, ...]:
        target = self.targets[i]
        high = logits.max()
        log_sum = _log_sum(logits, high)
        of_base = self.scale[i] * self.steps[i].astype(F32) + self.lowest[i]
        nll, nll_base = high + log_sum - logits[target], -of_base[target]
        kept = of_base > -_RANGE
        p, of_model = of_base[kept], logits[kept]
        kl = (np.exp(p) * (p - of_model + (high + log_sum))).sum(dtype=np.float64)
        return nll, nll_base, kl, logits.argmax() == of_base.argmax()


@dataclass(frozen=True)
class Scores:
    """What a model gives a text's tokens beside the base model.

    nll       -log of the token's probability, float32 (n,)
    nll_base  the same of the base model, float32 (n,)
    kls       Kullback-Leibler divergence of the model's next token from the base model's, in nats, float64 (n,)
    same      whether the most likely token is the same, bool (n,)
    """

    nll: NDArray[np.float32]
    nll_base: NDArray[np.float32]
    kls: NDArray[np.float64]
    same: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Returns the scores of several texts as those of one."""
        names = ("nll", "nll_base", "kls", "same")
        return cls(*(np.concatenate([getattr(each, name) for each in parts]) for name in names))

    @property
    def kl(self) -> Mean:
        """Mean KL divergence, in nats."""
        return mean(self.kls)

    @property
    def perplexity(self) -> Mean:
        """exp of the mean nll."""
        return _exp(mean(self.nll))

    @property
    def perplexity_base(self) -> Mean:
        """The base model's perplexity."""
        return _exp(mean(self.nll_base))

    @property
    def ratio(self) -> Mean:
        """Perplexity / the base model's perplexity: of pairs, so that its error is smaller than those of the two."""
        a, b = mean(self.nll), mean(self.nll_base)
        x, y = self.nll.astype(np.float64), self.nll_base.astype(np.float64)
        together = (self.nll * self.nll_base).astype(np.float64).mean() - x.mean() * y.mean()
        spread = a.error**2 + b.error**2 - 2 * together / (len(x) - 1) if len(x) > 10 else 0.0
        return _exp(Mean(a.value - b.value, float(max(0.0, spread)) ** 0.5))

    @property
    def same_top(self) -> Mean:
        """The share of positions at which the most likely token is the same."""
        share = float(self.same.mean())
        return Mean(share, (share * (1 - share) / max(1, len(self.same) - 1)) ** 0.5)


def mean(x: NDArray[Any]) -> Mean:
    """The mean of x and its standard error, which is 0 for 10 values or fewer: perplexity.cpp's
    `mean_and_uncertainty`. Squares are computed in x's type and added in float64."""
    value = float(x.mean(dtype=np.float64))
    spread = float((x * x).mean(dtype=np.float64)) - value * value
    return Mean(value, (spread / (len(x) - 1)) ** 0.5 if spread > 0 and len(x) > 10 else 0.0)


def _exp(of: Mean) -> Mean:
    value = float(np.exp(of.value))
    return Mean(value, value * of.error)


def _log_sum(row: NDArray[np.float32], high: np.float32) -> np.float32:
    """log of the sum of exp(row - high)."""
    return F32(np.log(np.exp(row - high).sum(dtype=np.float64)))
