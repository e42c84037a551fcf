"""A session in another process, and the order in which it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml.convert import Read
from graph_runner.base.settings import Gives, Settings
from graph_runner.elsewhere.other import Other
from graph_runner.hazards.graph import Graph
from graph_runner.run.session import Observer

Batch = list[list[int]]  # tokens of each sequence


class AnySession(Protocol):
    """What a diff asks of a session, here or in another process. `run.session.Session` says what it means."""

    @property
    def description(self) -> str: ...
    @property
    def lacks(self) -> frozenset[str]: ...
    @property
    def gives(self) -> Gives: ...
    def __enter__(self) -> Any: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def prompts(self, text: str) -> Batch: ...
    def n_steps(self, n: int) -> int: ...
    def parts(self, *sequences: list[int]) -> Iterator[Batch]: ...
    def decode(self, *sequences: list[int]) -> None: ...
    def outputs(self) -> NDArray[np.float32]: ...
    def next_tokens(self) -> Batch: ...


class SessionElsewhere:
    """A session on the CPU of another process. A context manager, which frees it.

    observer  sees every node: `Other.read` says what is at its address

    Raises what `Session` raises; a SessionError begins with the other's name.
    """

    def __init__(self, other: Other, model: Path, settings: Settings, observer: Observer | None) -> None:
        self._other, self._observer = other, observer
        self.description, self.lacks = other.open(model, settings, observed=observer is not None)

    def __enter__(self) -> SessionElsewhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._other.close()

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._other.ask("session", name, *arguments, observer=self._observer)

    @property
    def gives(self) -> Gives:
        """What the last step gave."""
        gives: Gives = self._ask("gives")
        return gives

    def prompts(self, text: str) -> Batch:
        """Returns the tokens of a text for each sequence."""
        found: Batch = self._ask("prompts", text)
        return found

    def n_steps(self, n: int) -> int:
        """Returns how many steps a prompt and n tokens after it take."""
        return int(self._ask("n_steps", n))

    def parts(self, *sequences: list[int]) -> Iterator[Batch]:
        """Yields what is run at once."""
        yield from self._ask("parts", *sequences)

    def decode(self, *sequences: list[int]) -> None:
        """Runs tokens of each sequence through the model."""
        self._ask("decode", *sequences)

    def outputs(self) -> NDArray[np.float32]:
        """Returns what the last step gave."""
        found: NDArray[np.float32] = self._ask("outputs")
        return found

    def next_tokens(self) -> Batch:
        """Returns what the next step decodes."""
        found: Batch = self._ask("next_tokens")
        return found


class RecordingElsewhere:
    """The order of the run in another process, which records it there: see `hazards.recording.Recording`."""

    def __init__(self, other: Other) -> None:
        self._other = other
        other.ask("order", "begin")

    def step(self, name: str) -> None:
        """Called before some tokens are decoded."""
        self._other.ask("order", "step", name)

    def add(self, read: Read) -> None:
        """Does nothing: the other process adds its nodes."""

    def runs(self, plan: Plan, nodes: Sequence[int]) -> None:
        """Does nothing: no plan of this project runs there."""

    def end(self) -> None:
        """Called after the last node of a graph has run."""
        self._other.ask("order", "end")

    @cached_property
    def graphs(self) -> list[Graph]:
        """Those that have ended. Nothing is recorded any more."""
        found: list[Graph] = self._other.ask("order", "graphs")
        return found
