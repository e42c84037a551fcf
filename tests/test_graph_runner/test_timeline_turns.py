"""Steps run in turns, without clocks and with them: `graph_runner.timeline.turns`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from graph_runner.timeline import turns
from graph_runner.timeline.turns import Turns, times_as_long


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def spending(self, ns: int, told: list[int]) -> Callable[[], None]:
        def run() -> None:
            told.append(ns)
            self.now += ns

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "now", lambda: made.now)
    monkeypatch.setattr("time.process_time_ns", lambda: 2 * made.now)
    return made


def test_each_is_first_in_every_other_step(clock: Clock) -> None:
    taken, told = Turns(), list[int]()
    spans = [taken.take(clock.spending(10, told), clock.spending(30, told)) for _ in range(3)]
    assert told == [10, 30, 30, 10, 10, 30]
    assert spans == [(10, 40), (40, 70), (90, 120)]
    assert taken.json == {
        "without_clocks": {"wall_ns": 30, "processor_ns": 60}, "with_clocks": {"wall_ns": 90, "processor_ns": 180},
        "times_as_long": {"wall": pytest.approx(3), "processor": pytest.approx(3)},
    }  # fmt: skip


def test_what_is_second_in_a_step_gains_nothing_by_it() -> None:
    assert times_as_long([(20, 10), (10, 20)]) == pytest.approx(1)
    assert times_as_long([(20, 10), (10, 20), (20, 10)]) == pytest.approx(1)


def test_a_step_that_was_hindered_does_not_count() -> None:
    assert times_as_long([(10, 11), (10, 11), (10, 1000), (10, 11), (10, 11)]) == pytest.approx(1.1)


def test_one_step() -> None:
    assert times_as_long([(10, 12)]) == pytest.approx(1.2)
