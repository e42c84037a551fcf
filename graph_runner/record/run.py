"""A recorded run: what it was, and what its nodes gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graph_runner.record.forms import Form
from graph_runner.record.measures import ROW, Rows

N_TOP = 8  # tokens that are kept of logits


@dataclass(frozen=True)
class About:
    """What a run was. Texts by name.

    model     what two runs must have in common: architecture, layers, width, vocabulary, parameters
    file      the model's file: its name, size, hash, and llama.cpp's description
    settings  of the context, and the options of the device
    machine   processor, versions of packages, how ggml was built
    prompt    the text
    is_watched  whether its nodes were looked at
    """

    model: Mapping[str, str]
    file: Mapping[str, str]
    settings: Mapping[str, str]
    machine: Mapping[str, str]
    prompt: str
    is_watched: bool


@dataclass(frozen=True)
class End:
    """The logits of a sequence after a step: a row, the most likely tokens and their logits. Or an embedding: a row."""

    row: Rows
    tokens: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True)
class Step:
    """One llama_decode.

    tokens  of each sequence
    ends    of each sequence that had some; of embeddings that are not pooled, of each token
    form    of its graph, by place in the run's forms; None if no node was looked at
    sizes   of its graph
    rows    a row for each node
    """

    tokens: Sequence[Sequence[int]]
    ends: Sequence[End]
    form: int | None = None
    sizes: tuple[int, ...] = ()
    rows: Rows = field(default_factory=lambda: np.zeros(0, ROW))


@dataclass
class Run:
    """A recorded run.

    state   hash of the context's state at the end: keys and values, recurrent states
    data    the bytes of a node's result, by step and place
    logits  of each sequence after a step, if they were kept; or embeddings
    """

    about: About
    forms: list[Form] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    state: str = ""
    data: dict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=dict)
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """How many nodes ran, in all steps."""
        return sum(len(step.rows) for step in self.steps)

    @property
    def n_tokens(self) -> int:
        """How many tokens were decoded."""
        return sum(len(tokens) for step in self.steps for tokens in step.tokens)


def flat(about: About) -> dict[str, Any]:
    """Returns all that a run was in one table: "settings.threads"."""
    groups = {"file": about.file, "settings": about.settings, "machine": about.machine}
    found: dict[str, Any] = {f"{group}.{name}": text for group, texts in groups.items() for name, text in texts.items()}
    return found | {"prompt": about.prompt, "watched": "yes" if about.is_watched else "no"}
