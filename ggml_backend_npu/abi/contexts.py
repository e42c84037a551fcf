"""A ggml_backend of the device, and what it, or the whole device, has done."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ggml_backend_npu.abi.guard import Failures
from ggml_backend_npu.abi.repeats import Repeats
from ggml_backend_npu.plan import Plan
from quant.kernels.threads import Team


class Statistics:
    """What the device, or one ggml_backend of it, has done since the process began, or since `reset`.

    settle  called before anything is read: adds what ran without Python
    failures  of the device's callbacks
    """

    def __init__(self, settle: Callable[[], None], failures: Failures) -> None:
        self._settle, self._failures = settle, failures
        self._computed, self._fused, self._graphs = Counter[str](), Counter[str](), 0

    def add(self, plan: Plan, runs: int = 1) -> None:
        """Counts runs of a plan."""
        self.add_nodes(plan.counts, runs)
        for name, count in plan.fused.items():
            self._fused[name] += runs * count

    def add_nodes(self, counts: Counter[str], runs: int = 1) -> None:
        """Counts runs of a graph of so many nodes."""
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
        """Calls of graph_compute, each a split of a scheduler's graph."""
        self._settle()
        return self._graphs

    @property
    def error(self) -> str | None:
        """Message of the last node or callback that failed."""
        return self._failures.message

    def reset(self) -> None:
        self._settle()
        self._computed.clear()
        self._fused.clear()
        self._graphs, self._failures.message = 0, None


@dataclass
class Context:
    """A ggml_backend that is alive: its struct, what it has done, and the graphs that it knows.

    plans    by the bytes of a graph's nodes and their sources
    instead  what computes its graphs, given by address, in place of the device; None: the device does
    """

    backend: ctypes.Structure
    statistics: Statistics
    repeats: Repeats
    plans: dict[tuple[int, bytes], Plan] = field(default_factory=dict)
    instead: Callable[[int], None] | None = None

    @property
    def team(self) -> Team:
        """The threads that its graphs run in."""
        return self.repeats.team

    @contextmanager
    def computing(self, instead: Callable[[int], None]) -> Iterator[None]:
        """Its graphs are given to a function until the context ends."""
        self.repeats.forget()
        self.instead = instead
        try:
            yield
        finally:
            self.instead = None
