"""A ggml_backend of the device, and statistics of what it, or the whole device, has computed."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml.guard import Failures
from ggml_backend_npu.plugin.forms import Forms
from ggml_backend_npu.plugin.repeats import Repeats
from ggml_backend_npu.plugin.times import Ran, Times
from quant.kernels.threads import Team


class Statistics:
    """What the device, or one ggml_backend of it, has computed since the process began, or since `reset`.

    settle    called before anything is read: counts what ran without Python
    failures  of the device's callbacks
    """

    def __init__(self, settle: Callable[[], None], failures: Failures) -> None:
        self._settle, self._failures = settle, failures
        self._computed, self._fused, self._graphs = Counter[str](), Counter[str](), 0

    def add(self, plan: Plan, runs: int = 1) -> None:
        """Counts `runs` runs of a plan."""
        self.add_nodes(plan.counts, runs)
        for name, count in plan.fused.items():
            self._fused[name] += runs * count

    def add_nodes(self, counts: Counter[str], runs: int = 1) -> None:
        """Counts `runs` runs of a graph; `counts` has its number of nodes by op."""
        for name, count in counts.items():
            self._computed[name] += runs * count
        self._graphs += runs

    @property
    def computed(self) -> Counter[str]:
        """Nodes computed, by op."""
        self._settle()
        return self._computed

    @property
    def fused(self) -> Counter[str]:
        """Spans of nodes computed as one operator, by its name."""
        self._settle()
        return self._fused

    @property
    def graphs(self) -> int:
        """Calls of graph_compute, each for one split of a scheduler's graph."""
        self._settle()
        return self._graphs

    @property
    def error(self) -> str | None:
        """Message of the last node or callback that failed."""
        return self._failures.message

    def reset(self) -> None:
        """Sets all counts to 0, and forgets the last error."""
        self._settle()
        self._computed.clear()
        self._fused.clear()
        self._graphs, self._failures.message = 0, None


@dataclass
class Context:
    """A live ggml_backend: its struct, its statistics, and the graphs that it knows.

    forms    plans its graphs
    instead  the function that computes its graphs, by address, in place of the device; None: the device computes them
    """

    backend: ctypes.Structure
    statistics: Statistics
    repeats: Repeats
    forms: Forms
    instead: Callable[[int], None] | None = None

    @property
    def team(self) -> Team:
        """The threads that its graphs run in."""
        return self.repeats.team

    @contextmanager
    def timed(self) -> Iterator[Callable[[], list[Ran]]]:
        """Until the context ends, its graphs are measured. Yields what returns those that ran since it was last
        called."""
        repeats, times = self.repeats, Times()
        repeats.times = times
        try:
            yield lambda: times.taken(lambda address: (repeats.at(address).plan, repeats.at(address).filled))
        finally:
            repeats.times = None

    @contextmanager
    def computing(self, instead: Callable[[int], None]) -> Iterator[None]:
        """Until the context ends, its graphs are passed to a function instead of being computed."""
        self.repeats.forget()
        self.instead = instead
        try:
            yield
        finally:
            self.instead = None
