"""A step laid out: `graph_runner.timeline.laying`."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ggml_backend_npu.backend.plan import Part, Plan
from ggml_backend_npu.plugin.times import Ran
from graph_runner.timeline.events import COPY, NODE, SPLIT, Event
from graph_runner.timeline.laying import lay_out
from graph_runner.timeline.nodes import Copied, StepNode


def node(place: int, op: str = "ADD", reads: tuple[int, ...] = ()) -> StepNode:
    copies = {address: Copied(f"t{address}", 8) for address in reads}
    return StepNode(100 + place, place, op, f"n{place}", "f32", (4, 1, 1, 1), 16, 0, copies)


class Parts(Plan):
    """A plan of these parts."""

    def __init__(self, *parts: Part) -> None:
        super().__init__((), Counter(), Counter())
        self._parts = parts

    @property
    def parts(self) -> tuple[Part, ...]:
        return self._parts


def laid(entries: list[tuple[int, int]], nodes: list[StepNode], *ran: Ran) -> tuple[list[Event], int]:
    return lay_out(2, np.array(entries), nodes, [("NPU", each) for each in ran], lambda address: "CPU")


def test_a_split_of_each_device_with_a_copy_before_the_second() -> None:
    nodes = [node(0), node(1), node(2, reads=(7,)), node(3)]
    entries = [(100, 10), (0, 20), (101, 21), (0, 30), (102, 40), (103, 41)]
    plan = Parts(Part("", 1, 2), Part("", 1, 1))
    ran = Ran(plan, np.array([102, 103]), np.array([45, 50, 60, 65]))
    events, untimed = laid(entries, nodes, ran)
    assert untimed == 0
    shown = [(event.kind, event.track, event.begin, event.end) for event in events]
    assert shown == [
        (SPLIT, "CPU", 10, 30), (NODE, "CPU", 10, 20), (NODE, "CPU", 21, 30),
        (COPY, "NPU", 30, 40),
        (SPLIT, "NPU", 45, 65), (NODE, "NPU", 45, 60), (NODE, "NPU", 60, 65),
    ]  # fmt: skip
    assert events[2].args["id"] == "step 2 node 1, ADD 'n1'"
    assert events[3].args == {"step": 2, "tensors": ["t7"], "bytes": 8}


def test_nodes_that_ran_as_one() -> None:
    nodes = [node(0), node(1, "MUL"), node(2)]
    ran = Ran(Parts(Part("both", 2, 1), Part("once", 1, 1)), np.array([100, 101, 102]), np.array([5, 8, 9]))
    events, _ = laid([(100, 1), (101, 2), (102, 3)], nodes, ran)
    joined, alone = (event for event in events if event.kind == NODE)
    assert (joined.name, joined.args["nodes"]) == ("both", ["step 2 node 0, ADD 'n0'", "step 2 node 1, MUL 'n1'"])
    assert joined.args["id"] == "step 2 node 1, MUL 'n1'"
    assert joined.args["bytes"] == 32
    assert (alone.name, "nodes" in alone.args) == ("ADD", False), "an operator of one node is called by its op"


def test_a_whole_graph_that_is_one_call() -> None:
    ran = Ran(Parts(Part("", 0, 1)), np.array([100, 101]), np.array([5, 8]))
    events, _ = laid([(100, 1), (101, 2)], [node(0), node(1)], ran)
    assert [event.name for event in events if event.kind == NODE] == ["graph of 2 nodes"]


def test_a_node_that_ran_alone_on_the_device_has_the_device_s_time() -> None:
    ran = Ran(Parts(Part("", 1, 1)), np.array([100]), np.array([12, 18]))
    events, _ = laid([(100, 10), (0, 20)], [node(0)], ran)
    assert [(event.track, event.begin, event.end) for event in events if event.kind == NODE] == [("NPU", 12, 18)]


def test_nodes_that_ran_with_others_are_counted() -> None:
    events, untimed = laid([(100, 10), (101, 11), (0, 20)], [node(0), node(1)])
    assert [event.args["node"] for event in events if event.kind == NODE] == [1]
    assert untimed == 1
