"""Timelines of small models: `graph_runner.timeline.recording`, and what `laying` makes of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from kit.diffs import FLASH_OFF, PROMPT, run
from kit.models import Models
from kit.whole import spoiling

from ggml_backend_npu import Tensor
from ggml_backend_npu.backend.backend import Backend
from ggml_backend_npu.backend.options import Options
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.timeline.events import COPY, LLAMA, NODE, SPLIT, STEP, Event, Timeline, trace_json
from graph_runner.timeline.recording import TimelineOptions, record_timeline

STEPS = 2
OPTIONS = TimelineOptions(steps=STEPS, settings=FLASH_OFF)


def plugin(**options: Any) -> Plugin:
    return Plugin(lib.ggml(), Backend(options=Options(**options)))


@pytest.fixture(scope="module")
def timelines(model: Models) -> Callable[[str], Timeline]:
    """A timeline of the NPU, of the NPU with movers alone, of the same in memory of its own, and of the CPU."""
    known: dict[str, Timeline] = {}
    makes: dict[str, Callable[[], Timeline]] = {
        "all": lambda: record_timeline(model("llama"), PROMPT, OPTIONS, plugin(ops="all")),
        "movers": lambda: record_timeline(model("llama"), PROMPT, OPTIONS, plugin()),
        "device": lambda: record_timeline(model("llama"), PROMPT, OPTIONS, plugin(ops="all", memory="device")),
        "cpu": lambda: record_timeline(model("llama"), PROMPT, TimelineOptions("CPU", steps=1, settings=FLASH_OFF)),
    }

    def made(name: str) -> Timeline:
        if name not in known:
            known[name] = makes[name]()
        return known[name]

    return made


KINDS = ["all", "movers", "device", "cpu"]


def by_step(timeline: Timeline, kind: str) -> dict[int, list[Event]]:
    found = defaultdict(list)
    for event in timeline.of(kind):
        found[event.args["step"]].append(event)
    return found


@pytest.mark.some(1)
@pytest.mark.daily(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_nodes_of_a_step_lie_within_it_and_do_not_overlap(timelines: Callable[[str], Timeline], kind: str) -> None:
    timeline = timelines(kind)
    steps = timeline.of(STEP)
    nodes, splits = by_step(timeline, NODE), by_step(timeline, SPLIT)
    assert len(steps) == (STEPS if kind != "cpu" else 1) + 1
    assert [step.args["step"] for step in steps] == [*nodes] == [*splits]
    for number, step in enumerate(steps):
        tracks = defaultdict(list)
        for event in (*nodes[number], *by_step(timeline, COPY)[number]):
            assert step.begin <= event.begin <= event.end <= step.end
            tracks[event.track].append(event)
        for events in tracks.values():
            ordered = sorted(events, key=lambda event: event.begin)
            assert all(a.end <= b.begin for a, b in pairwise(ordered))
        for split in splits[number]:
            within = [each for each in nodes[number] if split.begin <= each.begin and each.end <= split.end]
            of_it = [each for each in within if each.track == split.track]
            assert sum(len(each.args.get("nodes", "1")) for each in of_it) == split.args["nodes"]
        assert sum(event.duration for event in nodes[number]) <= step.duration
    assert timeline.about["nodes_without_times"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_is_of_the_format(timelines: Callable[[str], Timeline], kind: str) -> None:
    data = trace_json(timelines(kind))
    names = {
        each["tid"]: each["args"]["name"]
        for each in data["traceEvents"]
        if each["ph"] == "M" and each["name"] == "thread_name"
    }
    assert {*names.values()} == {
        "all": {LLAMA, "NPU"}, "movers": {LLAMA, "NPU", "CPU"}, "device": {LLAMA, "NPU", "CPU"}, "cpu": {LLAMA, "CPU"},
    }[kind]  # fmt: skip
    for each in data["traceEvents"]:
        assert {"ph", "pid", "tid", "name", "args"} <= each.keys()
        assert each["ph"] in ("M", "X")
        if each["ph"] == "X":
            assert each["tid"] in names
            assert each["tid"] > 0, "Perfetto takes 0 for the process's own thread"
            assert each["cat"] in (STEP, SPLIT, COPY, NODE)
            assert each["ts"] >= 0
            assert each["dur"] >= 0


def ids(timeline: Timeline) -> list[str]:
    return [each for event in timeline.of(NODE) for each in event.args.get("nodes", [event.args["id"]])]


def test_nodes_have_the_names_of_a_diff(timelines: Callable[[str], Timeline], model: Models) -> None:
    result = run(model("llama"), steps=STEPS)
    nodes = [node for node in result.nodes if node.op in OWN]  # others are spans of nodes
    expected = {f"step {node.step} node {node.index}, {node.op} {node.name!r}" for node in nodes}
    for kind in ("all", "movers"):
        found = ids(timelines(kind))
        assert len(found) == len({*found})
        assert {*found} == expected


def test_devices_have_their_own_nodes(timelines: Callable[[str], Timeline]) -> None:
    ops = {(event.track, event.name) for event in timelines("movers").of(NODE)}
    assert {("NPU", "SET_ROWS"), ("CPU", "MUL_MAT")} <= ops
    assert not {("CPU", "SET_ROWS"), ("NPU", "MUL_MAT")} & ops


def test_copies_have_their_bytes(timelines: Callable[[str], Timeline]) -> None:
    assert not timelines("movers").of(COPY), "the NPU reads and writes ggml's memory"
    copies = timelines("device").of(COPY)
    assert copies
    assert all(copy.args["tensors"] and copy.args["bytes"] > 0 for copy in copies)


def test_a_kernel_that_sleeps_is_the_longest_node(model: Models) -> None:
    def sleeps(dst: Tensor) -> None:
        if dst.name == "ffn_swiglu-1":
            time.sleep(0.2)

    timeline = record_timeline(
        model("llama"), PROMPT, TimelineOptions(steps=0, settings=FLASH_OFF),
        Plugin(lib.ggml(), spoiling({"SWIGLU": sleeps})),
    )  # fmt: skip
    longest = max(timeline.of(NODE), key=lambda event: event.duration)
    assert longest.args["id"].endswith("SWIGLU 'ffn_swiglu-1'")
    assert longest.duration >= 20_000_000
