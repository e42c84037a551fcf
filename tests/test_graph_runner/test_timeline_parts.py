"""Timelines cut into steps and layers: `graph_runner.timeline.parts`."""

from __future__ import annotations

from collections import Counter

import pytest
from kit.timelines import node, timeline

from graph_runner.timeline.events import COPY, Event
from graph_runner.timeline.parts import Part, longest, ops_of, steps_of
from graph_runner.timeline.table import COPIES, OUTSIDE


def test_the_times_of_a_step_lie_in_layers_and_add_up() -> None:
    made = timeline(
        node(0, 0, "GET_ROWS", "embd", 10), node(0, 1, "MUL_MAT", "Qcur-0", 30), node(0, 2, "ADD", "node_7", 5),
        node(0, 3, "MUL_MAT", "Qcur-1", 20), node(1, 0, "MUL_MAT", "Qcur-1", 7), walls=[100, 50],
    )  # fmt: skip
    ops = [op for _, op, _ in ops_of([made])]
    assert ops == ["MUL_MAT", "GET_ROWS", "ADD", OUTSIDE]
    steps = steps_of([made])
    assert [*steps] == [0, 1]
    (first,), (second,) = steps.values()
    assert first == Part(13, 100, Counter({(None, 1): 10, (0, 0): 30, (0, 2): 5, (1, 0): 20, (None, 3): 35}))
    assert second == Part(1, 50, Counter({(1, 0): 7, (None, 3): 43}))
    assert all(part is not None and sum(part.times.values()) == part.ns for part in (first, second))


def test_copies_are_in_no_layer() -> None:
    made = timeline(node(0, 0, "ADD", "l_out-0", 10))
    made.events.append(Event(COPY, "copies", "NPU", 20, 25, {"step": 0, "bytes": 4}))
    (part,) = steps_of([made])[0]
    place = [op for _, op, _ in ops_of([made])].index(COPIES)
    assert part is not None
    assert part.times[None, place] == 5


def test_two_timelines_have_one_list_of_ops() -> None:
    a = timeline(node(0, 0, "ADD", "l_out-0", 10), node(1, 0, "ADD", "l_out-0", 11), walls=[100, 50])
    b = timeline(node(0, 0, "ADD", "l_out-0", 30, "CPU"), node(0, 1, "MUL", "norm-0", 2, "CPU"))
    assert [(device, op) for device, op, _ in ops_of([a, b])] == [("NPU, CPU", "ADD"), ("", OUTSIDE), ("CPU", "MUL")]
    steps = steps_of([a, b])
    assert steps[1][1] is None
    first, second = steps[0]
    assert first is not None
    assert second is not None
    assert (first.times[0, 0], second.times[0, 0], second.times[0, 2]) == (10, 30, 2)


def test_the_longest_nodes_come_first() -> None:
    a = timeline(node(0, 0, "ADD", "l_out-0", 10), node(0, 1, "MUL", "norm-0", 12))
    b = timeline(node(0, 0, "ADD", "l_out-0", 5), node(0, 2, "MUL", "norm-1", 1))
    found = longest([a, b])[0]
    assert [(each.id, each.ns) for each in found] == [
        ("step 0 node 0, ADD 'l_out-0'", 15), ("step 0 node 1, MUL 'norm-0'", 12), ("step 0 node 2, MUL 'norm-1'", 1),
    ]  # fmt: skip
    assert [len(events) for events in found[1].events] == [1, 0]
    assert found[0].op == next(i for i, (_, op, _) in enumerate(ops_of([a, b])) if op == "ADD")


def test_nodes_of_all_steps_are_known_by_op_and_name() -> None:
    a = timeline(
        node(0, 0, "ADD", "l_out-0", 10), node(0, 1, "MUL", "norm-0", 11), node(1, 0, "ADD", "l_out-0", 12),
        walls=[100, 50],
    )  # fmt: skip
    found = longest([a])[None]
    assert [(each.id, each.ns) for each in found] == [
        ("step 1 node 0, ADD 'l_out-0'", 22), ("step 0 node 1, MUL 'norm-0'", 11),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["it's-3", "both '\"-3", "line\nbreak-3"])
def test_a_layer_is_known_whatever_quotes_a_name_has(name: str) -> None:
    made = timeline(node(0, 0, "ADD", name, 10))
    (part,) = steps_of([made])[0]
    assert part is not None
    assert part.times[3, 0] == 10
