"""The cb_eval of a run that is measured: `graph_runner.timeline.watching`."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from graph_runner.base.errors import SessionError
from graph_runner.run.observing import Sieve
from graph_runner.timeline import watching
from graph_runner.timeline.watching import Watcher
from quant.kernels.jit import now

EVAL = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def test_nodes_and_the_ends_of_those_alone_are_noted() -> None:
    watcher = Watcher()
    assert isinstance(watcher, Sieve)
    tell, notes = EVAL(watcher.callback), watcher.over(0)
    for _ in range(2):
        watcher.begin(np.array([False, True]))
        begin = now()
        assert not tell(16, True, notes)
        assert tell(32, True, notes)
        assert tell(32, False, notes), "False would end the run"
        assert not tell(48, True, notes), "of more nodes than were foreseen none is alone"
        entries = watcher.entries()
        assert entries[:, 0].tolist() == [16, 32, 0, 48]
        times = [begin, *entries[:, 1].tolist(), now()]
        assert times == sorted(times)


def test_too_many_are_told_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = Watcher()
    tell, notes = EVAL(watcher.callback), watcher.over(0)
    watcher.begin(np.zeros(0, np.bool_))
    for _ in range(watching._MOST + 1):
        tell(16, True, notes)
    with pytest.raises(SessionError, match="there is space for"):
        watcher.entries()
    watcher.begin(np.zeros(0, np.bool_))
    assert not watcher.entries().size
