"""Text, token by token: how the next one is picked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graph_runner.base.errors import SessionError
from graph_runner.base.settings import N_BATCH


class Sampler:
    """Picks the next token: the most likely one, or with a temperature above 0 a random one from the smallest set of
    most likely tokens that holds the probability mass `top_p`. Raises SessionError if it cannot draw one from logits
    that are not numbers."""

    def __init__(self, temperature: float = 0.0, top_p: float = 0.95, seed: int = 0) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: NDArray[np.float32]) -> int:
        if self._temperature <= 0:
            return int(logits.argmax())
        with np.errstate(all="ignore"):
            p = np.exp((logits - logits.max()).astype(np.float64) / self._temperature)
            p /= p.sum()
        if not np.isfinite(p).all():
            raise SessionError("logits hold NaN or infinity: no token can be drawn from them")
        order = np.argsort(-p, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(p[order]), self._top_p)) + 1]
        return int(self._random.choice(kept, p=p[kept] / p[kept].sum()))


class Decoder(Protocol):
    """Decodes tokens one after another: a session, or a runner of its graph."""

    def begin(self, tokens: list[int]) -> list[int]:
        """Encodes a prompt, if the model has an encoder. Returns the tokens to decode first."""

    def decode(self, tokens: list[int]) -> None:
        """Runs tokens through the model, after the previous ones."""

    def logits(self) -> NDArray[np.float32]:
        """Returns the logits of the last token, (n_vocab,)."""

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""


def generate(
    session: Decoder, tokens: list[int], n: int, sampler: Sampler, seen: Callable[[int], object] = lambda done: None
) -> Iterator[int]:
    """Runs a prompt and then yields up to n tokens, each as soon as it is known; stops at a token that ends the text.

    seen  called with the number of prompt tokens that have run

    Raises SessionError for a model that gives no logits.
    """
    first = session.begin(tokens)
    for begin in range(0, len(first), N_BATCH):
        session.decode(first[begin : begin + N_BATCH])
        seen(min(begin + N_BATCH, len(tokens)))
    if not session.logits().any():
        raise SessionError("the model has no text: its logits are all 0, as those of a model that makes embeddings")
    for left in range(n, 0, -1):
        token = sampler(session.logits())
        if session.ends(token):
            return
        yield token
        if left > 1:
            session.decode([token])


def most_likely(logits: NDArray[np.float32], n: int) -> list[int]:
    """Returns the n most likely tokens: the one that `Sampler` takes by default, then others in descending order."""
    first = Sampler()(logits)
    others = np.argsort(-logits, kind="stable") if n > 1 else np.empty(0, np.int64)
    return [first, *others[others != first][: n - 1].tolist()]
