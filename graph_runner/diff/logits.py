"""How far apart what two runs of one model give is, step by step: logits, or embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from graph_runner.base.settings import Gives

Logits = NDArray[np.float32]  # (sequences, n_vocab)
Outputs = NDArray[np.float32]  # logits, or embeddings: (sequences or tokens, n_embd)


@dataclass(frozen=True)
class Ending:
    """What two runs give after each step. Falsy if that is further apart than the reference's rounding explains.

    nmse     sum of squared differences / sum of squares of the reference; the largest of all steps
    kl       Kullback-Leibler divergence of the device's next token from the reference's, in nats; the largest of all
             steps; None if there are no logits
    first_token  the first step after which the most likely token differs; None if there is none
    natural  the largest nmse of the reference against itself, with rounding errors of the size found in nodes, or with
             flash attention switched; None if it was not measured
    limit    the largest nmse allowed; None if it was not measured
    of       what they give: "logits", "embeddings", or "embeddings and logits" of a model that encodes and decodes
    """

    nmse: float
    kl: float | None
    first_token: int | None
    natural: float | None = None
    limit: float | None = None
    of: str = "logits"

    def __bool__(self) -> bool:
        return self.limit is None or self.nmse <= self.limit


@dataclass
class Endings:
    """Collects what two runs give.

    steps  of the reference and of the device
    of     what each step gives
    """

    steps: list[tuple[Outputs, Outputs]] = field(default_factory=list)
    of: list[Gives] = field(default_factory=list)

    def add(self, reference: Outputs, device: Outputs, of: Gives = "logits") -> None:
        """Adds what a step gives."""
        self.steps.append((reference, device))
        self.of.append(of)

    def ending(self) -> Ending:
        """Returns how far apart the collected outputs are."""
        logits = {step: pair for step, pair in enumerate(self.steps) if self.of[step] == "logits"}
        tokens = [step for step, (a, b) in logits.items() if (a.argmax(axis=-1) != b.argmax(axis=-1)).any()]
        return Ending(
            max((nmse(*pair) for pair in _rows(self.steps)), default=0.0),
            max((_kl(*pair) for pair in _rows(logits.values())), default=0.0) if logits or not self.of else None,
            tokens[0] if tokens else None,
            of=" and ".join(dict.fromkeys(self.of)) or "logits",
        )


def _rows(steps: Iterable[tuple[Outputs, Outputs]]) -> Iterator[tuple[Outputs, Outputs]]:
    """Yields the rows of both sides."""
    return (pair for a, b in steps for pair in zip(a, b, strict=True))


def nmse(a: Outputs, b: Outputs) -> float:
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
