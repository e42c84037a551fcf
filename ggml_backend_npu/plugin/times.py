"""When the steps of plans ran: a clock is read between the works of a compiled call, which runs whole as before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.backend.plan import Plan
from ggml_backend_npu.ggml.graph_read import int64s
from quant.kernels.jit import inlined, nanoseconds, now
from quant.kernels.late import types

Ints = NDArray[np.int64]

_WORDS = 1 << 19  # of the log, 4 MB: what runs until it is `taken`
_HEAD = 3  # words of a graph before its times: what ran, how many times, and when it began


class TimesError(RuntimeError):
    """More ran than the log has space for."""


@dataclass(frozen=True, eq=False)
class Ran:
    """A run of a plan.

    nodes  the addresses of its nodes, without empty ones
    times  when it began, and when each work, or call of Python's, had ended: in ns, as `Plan.timed` has them
    """

    plan: Plan
    nodes: Ints
    times: Ints

    @property
    def ends(self) -> Ints:
        """When each of the plan's `parts` had ended, the beginning first."""
        found: Ints = self.times[np.cumsum([0, *(part.n_times for part in self.plan.parts)])]
        return found


@inlined
def begin_graph(log: int, what: int, count: int) -> Any:
    """Notes in a log that what is at an address begins, with `count` works. Returns where their times go; 0 without a
    log, or if there is no space."""
    if log == 0:
        return types.int64(0)
    at = int64s(log, 1)[0]
    int64s(log, 1)[0] = at + _HEAD + count
    if at + _HEAD + count > _WORDS:
        return types.int64(0)
    head = int64s(log + 8 * at, _HEAD)
    head[0], head[1], head[2] = what, count, nanoseconds()
    return types.int64(log + 8 * (at + _HEAD))


class Times:
    """Who measures the graphs of one ggml_backend.

    log  the address of what compiled code writes to: how many words are used, and each graph that ran
    """

    def __init__(self) -> None:
        self._words = np.zeros(_WORDS, np.int64)
        self._words[0] = 1
        self.log = int(self._words.ctypes.data)
        self._ran: list[Ran] = []

    def run(self, plan: Plan, nodes: Ints, finish: Callable[[], None]) -> None:
        """Runs a plan of some nodes, from Python. `finish` waits for what it has only begun."""
        ran = Ran(plan, nodes, plan.timed())
        finish()
        if len(ran.times) > 1:
            ran.times[-1] = now()
        self._ran.append(ran)

    def taken(self, known: Callable[[int], tuple[Plan, Ints]]) -> list[Ran]:
        """What ran since the last call, in order. Raises TimesError if that was too much.

        known  returns the plan of what compiled code ran, and its nodes, by its address
        """
        ran, end, at = self._ran, int(self._words[0]), 1
        self._ran, self._words[0] = [], 1
        if end > _WORDS:
            raise TimesError(f"{end} words of times: there is space for {_WORDS}")
        while at < end:
            what, count = self._words[at : at + 2].tolist()
            plan, nodes = known(what)
            ran.append(Ran(plan, nodes, self._words[at + 2 : at + _HEAD + count].copy()))
            at += _HEAD + count
        return sorted(ran, key=lambda each: int(each.times[0]))
