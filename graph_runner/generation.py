"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from graph_runner.errors import SessionError
from graph_runner.settings import N_BATCH


class Decoder(Protocol):
    """Decodes tokens one after another: a session, or a runner of its graph."""

    def decode(self, tokens: list[int]) -> None:
        """Runs tokens through the model, after the previous ones."""

    def logits(self) -> NDArray[np.float32]:
        """Returns the logits of the last token, (n_vocab,)."""

    def ends(self, token: int) -> bool:
        """Whether a token ends the text."""


def generate(
    session: Decoder,
    tokens: list[int],
    n: int,
    sampler: Callable[[NDArray[np.float32]], int],
    seen: Callable[[int], object] = lambda done: None,
) -> Iterator[int]:
    """Runs a prompt and then yields up to n tokens, each as soon as it is known; stops at a token that ends the text.

    seen  called with the number of prompt tokens that have run

    Raises SessionError for a model that gives no logits.
    """
    for begin in range(0, len(tokens), N_BATCH):
        session.decode(tokens[begin : begin + N_BATCH])
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
