"""Runs models over one text, and compares each with the base model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graph_runner.base.errors import SessionError
from graph_runner.base.limits import free_memory
from graph_runner.base.settings import Settings
from graph_runner.quantdiff.files import ModelFile, Weights
from graph_runner.quantdiff.scores import Base, Scores
from graph_runner.run.session import Session


@dataclass(frozen=True)
class Text:
    """A text as llama-perplexity reads it: chunks of `settings.n_ctx` tokens, of which the second half is scored. The
    first token of each is replaced by that which the model wants at the beginning.

    bases  what the base model gives each chunk
    """

    settings: Settings
    chunks: list[list[int]]
    bases: list[Base]

    @classmethod
    def of(cls, big: ModelFile, text: str, settings: Settings, most: int) -> Text:
        """Runs the base model over a text, of which `most` chunks are taken, all if that is 0. Raises SessionError for
        a text that is shorter than one chunk or longer than memory can hold, and as `Session` does."""
        n = settings.n_ctx
        with Session(big.path, settings, counts_nodes=False) as session:
            tokens = session.tokenize(text.removesuffix("\n"), special=False)  # as llama.cpp reads a file
            if len(tokens) < n:
                raise SessionError(f"text of {len(tokens):,} tokens: is shorter than a chunk of {n:,} tokens")
            chunks = [tokens[begin : begin + n] for begin in range(0, len(tokens) - n + 1, n)][: most or None]
            bases: list[Base] = []
            for chunk in chunks:
                bases.append(Base.of(_logits(session, chunk, str(big.path)), chunk[n // 2 + 1 :]))
                _refuse_what_memory_cannot_hold(bases[0].steps.nbytes * (len(chunks) - len(bases)))
        return cls(settings, chunks, bases)

    @property
    def n_scored(self) -> int:
        """How many tokens are scored."""
        return sum(len(each.targets) for each in self.bases)

    def first(self, n: int) -> Text:
        """Returns its first n chunks."""
        return Text(self.settings, self.chunks[:n], self.bases[:n])

    def scores(self, path: Path, name: str | None = None) -> Scores:
        """Runs a model over the text. Raises SessionError.

        name  of the model in messages, if that is not its path
        """
        with Session(path, self.settings, counts_nodes=False) as session:
            pairs = zip(self.chunks, self.bases, strict=True)
            return Scores.joined([base.scores(_logits(session, chunk, name or str(path))) for chunk, base in pairs])


def _refuse_what_memory_cannot_hold(n_bytes: int) -> None:
    free = free_memory()
    if free is not None and n_bytes > free:
        sizes = f"{n_bytes / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
        raise SessionError(f"text: the log-probabilities of all its chunks take {sizes}; --chunks takes fewer")


def _logits(session: Session, chunk: list[int], name: str) -> np.ndarray:
    """Returns the logits after each token of the second half of a chunk but the last, (n, n_vocab)."""
    session.clear()
    begin = session.begins_with
    logits = session.logits_of_last([*begin, *chunk[len(begin) :]], len(chunk) - len(chunk) // 2)[:-1]
    if not np.isfinite(logits).all():
        raise SessionError(f"model {name!r}: its logits hold NaN or infinity")
    return logits


class Mixed:
    """Files in memory that have the small model's tensors, but for some, run over a text."""

    def __init__(self, small: ModelFile, text: Text) -> None:
        self._small, self._text = small, text

    def scores(self, others: Sequence[Weights]) -> Scores:
        """Runs the small model with other tensors in place of its own of the same names. Raises SessionError."""
        placed = {each.name: each for each in others}
        tensors = [placed.get(name, each) for name, each in self._small.tensors.items()]
        with self._small.with_tensors(tensors) as path:
            return self._text.scores(path, f"{self._small.path} with {len(placed):,} other tensors")
