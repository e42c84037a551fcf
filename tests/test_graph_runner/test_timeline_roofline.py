"""What this machine can do: `graph_runner.timeline.roofline`."""

from __future__ import annotations

from graph_runner.timeline.roofline import Roofline, measured_roofline


def test_bytes_or_operations_say_what_the_least_time_is() -> None:
    roof = Roofline(bytes=10.0, operations=100.0)
    assert roof.seconds(20, 100) == 2
    assert roof.seconds(20, 500) == 5


def test_a_machine_copies_and_multiplies() -> None:
    roof = measured_roofline()
    assert 1e8 < roof.bytes < 1e13
    assert 1e8 < roof.operations < 1e15
