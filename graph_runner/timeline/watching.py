"""A cb_eval in machine code that notes when the scheduler comes to each node, and when one that runs alone has run."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graph_runner.base.errors import SessionError
from quant.kernels.jit import array_at, callback, nanoseconds
from quant.kernels.late import types
from quant.kernels.records import packed, place_in, shared_record_at

Ints = NDArray[np.int64]

_MOST = 1 << 17  # entries of a step


class _Notes(NamedTuple):
    """What the callback is given. Lists are addresses.

    log      entries: the address of a node that the scheduler has come to, or 0 after one that ran alone; the time
    n_alone, alone  of each node of the step in order, whether it is to run alone
    used, asked     how many entries there are, and how many nodes the scheduler has come to
    """

    log: int
    n_alone: int
    alone: int
    used: int
    asked: int


_N_ALONE, _ALONE, _USED, _ASKED = (place_in(_Notes, name) for name in ("n_alone", "alone", "used", "asked"))


@callback(types.boolean(types.intp, types.boolean, types.intp))
def _watch(node: int, ask: bool, notes: int) -> Any:
    """cb_eval: notes the time. Returns of a node that the scheduler has come to whether it is to run alone."""
    of = shared_record_at(types.int64(notes), _Notes)
    used, alone = of.used, True
    if ask:
        asked = of.asked
        of.asked = asked + 1
        alone = asked < of.n_alone and array_at(of.alone, types.uint8, asked + 1)[asked] != 0
    of.used = used + 1
    if used < _MOST:
        entry = array_at(of.log + 16 * used, types.int64, 2)
        entry[0] = node if ask else 0
        entry[1] = nanoseconds()
    return alone


class Watcher:
    """The observer of a run that is measured: a `run.observing.Sieve` that hands nothing to Python."""

    def __init__(self) -> None:
        self._log, self._alone = np.zeros((_MOST, 2), np.int64), np.zeros(0, np.uint8)
        self._notes = packed(_Notes(int(self._log.ctypes.data), 0, 0, 0, 0))

    @property
    def callback(self) -> int:
        """The address of the cb_eval."""
        return _watch.address

    def over(self, callback: int) -> int:
        """Returns its user data."""
        return int(self._notes.ctypes.data)

    def before(self, node: int) -> bool:
        """Never called."""
        return False

    def after(self, node: int) -> None:
        """Never called."""

    def begin(self, alone: NDArray[np.bool_]) -> None:
        """Called before a step; `alone` says of its nodes, in order, which are to run alone."""
        self._alone = alone.astype(np.uint8)
        self._notes[_N_ALONE], self._notes[_ALONE] = len(alone), self._alone.ctypes.data
        self._notes[_USED] = self._notes[_ASKED] = 0

    def entries(self) -> Ints:
        """Returns the entries of the step: (entry, 2), the address of a node that the scheduler came to, or 0 after one
        that ran alone; the time in ns. Raises SessionError if it had too many."""
        used = int(self._notes[_USED])
        if used > _MOST:
            raise SessionError(f"a step has {used:,} nodes, those that run alone twice: there is space for {_MOST:,}")
        return self._log[:used].copy()
