"""How far apart the logits of two runs of one model are, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]  # (sequences, n_vocab)


@dataclass(frozen=True)
class Ending:
    """The logits of two runs after each step. Falsy if they are further apart than the reference's rounding explains.

    nmse     sum of squared differences / sum of squares of the reference; the largest of all steps
    kl       Kullback-Leibler divergence of the device's next token from the reference's, in nats; the largest of all
             steps
    first_token  the first step after which the most likely token differs; None if there is none
    natural  the largest nmse of the reference against itself, with rounding errors of the size found in nodes, or with
             flash attention switched; None if it was not measured
    limit    the largest nmse allowed; None if it was not measured
    """

    nmse: float
    kl: float
    first_token: int | None
    natural: float | None = None
    limit: float | None = None

    def __bool__(self) -> bool:
        return self.limit is None or self.nmse <= self.limit


@dataclass
class Endings:
    """Collects the logits of two runs."""

    steps: list[tuple[Logits, Logits]] = field(default_factory=list)

    def add(self, reference: Logits, device: Logits) -> None:
        """Adds the logits of a step."""
        self.steps.append((reference, device))

    def ending(self) -> Ending:
        """Returns how far apart the collected logits are."""
        tokens = [step for step, (a, b) in enumerate(self.steps) if (a.argmax(axis=-1) != b.argmax(axis=-1)).any()]
        rows = [pair for a, b in self.steps for pair in zip(a, b, strict=True)]
        return Ending(
            max((nmse(a, b) for a, b in rows), default=0.0),
            max((_kl(a, b) for a, b in rows), default=0.0),
            tokens[0] if tokens else None,
        )


def nmse(a: Logits, b: Logits) -> float:
    """Returns sum of squared differences / sum of squares of a, over finite values; inf if a value that is not finite
    is not the same in both."""
    finite = _finite_in_both(a, b)
    if finite is None:
        return float("inf")
    x, y = (each[finite].astype(np.float64) for each in (a, b))
    power = float(np.square(x).sum())
    found = float(np.square(x - y).sum()) / power if power else float(np.square(y).sum())
    return found if np.isfinite(found) else float("inf")


def _kl(a: Logits, b: Logits) -> float:
    """Returns the Kullback-Leibler divergence of b's distribution from a's, in nats, over finite values; inf if a value
    that is not finite is not the same in both."""
    finite = _finite_in_both(a, b)
    if finite is None:
        return float("inf")
    if not finite.any():
        return 0.0
    p, q = (_log_softmax(each[finite]) for each in (a, b))
    found = float((np.exp(p) * (p - q)).sum())
    return max(0.0, found) if np.isfinite(found) else float("inf")


def _finite_in_both(a: Logits, b: Logits) -> NDArray[np.bool_] | None:
    """Returns where both are finite; None if elsewhere one is not what the other is. NaN equals NaN."""
    finite = np.isfinite(a) & np.isfinite(b)
    same = finite | (a == b) | (np.isnan(a) & np.isnan(b))
    return finite if same.all() else None


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result
