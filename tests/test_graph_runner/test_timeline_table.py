"""Timelines added up: `graph_runner.timeline.table`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graph_runner.timeline.events import COPY, LLAMA, NODE, STEP, Event, Timeline
from graph_runner.timeline.table import COPIES, OUTSIDE, both, rows, shares_of_steps

ABOUT = {"roofline": {"bytes_per_second": 1e9, "operations_per_second": 2e9}}  # 1 byte, 2 operations a ns


def node(op: str, begin: int, end: int, nbytes: int = 0, operations: int = 0, track: str = "NPU") -> Event:
    return Event(NODE, op, track, begin, end, {"step": 0, "bytes": nbytes, "operations": operations})


def timeline(*nodes: Event, wall: int = 100) -> Timeline:
    return Timeline(ABOUT, [Event(STEP, "step 0", LLAMA, 0, wall, {"step": 0}), *nodes])


def test_ops_are_added_up_the_longest_first() -> None:
    found = rows(
        timeline(
            node("ADD", 0, 10, 5), node("MUL_MAT", 10, 40, 6, 20), node("ADD", 40, 45, 5),
            Event(COPY, "copies", "NPU", 45, 50, {"bytes": 7}),
        )
    )  # fmt: skip
    assert [(row.op, row.count, row.ns) for row in found] == [
        ("MUL_MAT", 1, 30), ("ADD", 2, 15), (COPIES, 1, 5), (OUTSIDE, 0, 50),
    ]  # fmt: skip
    assert (found[0].nbytes, found[0].operations, found[0].least) == (6, 20, 10)
    assert found[1].least == pytest.approx(10)
    assert sum(row.ns for row in found) == 100


def test_nodes_of_each_step() -> None:
    one = timeline(node("ADD", 0, 10), node("ADD", 20, 60))
    events = [*one.events, Event(STEP, "step 1", LLAMA, 100, 200, {"step": 1})]
    assert shares_of_steps(Timeline(ABOUT, events)) == [0.5, 0.0]


def test_two_timelines() -> None:
    a = timeline(node("ADD", 0, 10), node("MUL", 10, 20), node("MUL", 20, 30, track="CPU"))
    b = timeline(
        node("ADD", 0, 20, track="CPU"), node("MUL", 30, 35), node("MUL", 35, 50, track="CPU"), node("SQR", 50, 51)
    )
    found = {(each.device, each.op): each.ratio for each in both(rows(a), rows(b))}
    assert found == {
        ("NPU, CPU", "ADD"): 2.0, ("NPU", "MUL"): 0.5, ("CPU", "MUL"): 1.5, ("", OUTSIDE): 59 / 70,
        ("NPU", "SQR"): None,
    }  # fmt: skip


def test_an_op_that_took_no_time_has_no_ratio() -> None:
    a = timeline(node("ADD", 0, 0))
    assert {each.op: each.ratio for each in both(rows(a), rows(replace(a)))}["ADD"] is None
