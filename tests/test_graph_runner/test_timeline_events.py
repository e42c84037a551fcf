"""The file of a timeline: `graph_runner.timeline.events`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graph_runner.base.errors import BadInputError
from graph_runner.timeline.events import LLAMA, NODE, STEP, Event, Timeline, read_timeline, trace_json

ABOUT = {
    "model": "m.gguf", "tokens": 3, "settings": {"threads": "1"}, "machine": "a machine", "steps": 1,
    "with_clocks": {"wall_ns": 3001, "processor_ns": 3000}, "without_clocks": {"wall_ns": 3000, "processor_ns": 3000},
    "times_as_long": {"wall": 1.0, "processor": 1.0}, "nodes_without_times": 0, "measured": {"NPU": "inside"},
    "roofline": {"bytes_per_second": 1e9, "operations_per_second": 2e9},
}  # fmt: skip
EVENTS = [
    Event(STEP, "step 0: 3 tokens", LLAMA, 0, 3001, {"step": 0, "tokens": 3}),
    Event(NODE, "ADD", "NPU", 1000, 2001, {"id": "step 0 node 0, ADD 'a'", "step": 0, "bytes": 500, "operations": 0}),
]


def test_a_file_holds_a_timeline(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    made = Timeline(ABOUT, EVENTS)
    path.write_text(json.dumps(trace_json(made)))
    assert read_timeline(path) == made
    assert made.wall == 3001


def test_times_are_microseconds_to_the_nanosecond() -> None:
    (node,) = [each for each in trace_json(Timeline(ABOUT, EVENTS))["traceEvents"] if each.get("cat") == NODE]
    assert (node["ts"], node["dur"]) == (1.0, 1.001)


def spoilt(what: str) -> Any:
    data = json.loads(json.dumps(trace_json(Timeline(ABOUT, EVENTS))))
    first = next(each for each in data["traceEvents"] if each["ph"] == "X")
    match what:
        case "negative":
            first["dur"] = -1
        case "kind":
            first["cat"] = "other"
        case "infinite":
            first["ts"] = float("inf")
        case "track":
            first["tid"] = 17
        case "schema":
            data["otherData"]["schema"] = "another 1"
        case "roof":
            data["otherData"]["roofline"]["bytes_per_second"] = 0
        case "bytes":
            data["traceEvents"][-1]["args"]["bytes"] = float("nan")
        case "id":
            del data["traceEvents"][-1]["args"]["id"]
        case "step":
            data["traceEvents"][-1]["args"]["step"] = 1
        case "tokens":
            data["otherData"]["tokens"] = "12"
        case "ratio":
            data["otherData"]["times_as_long"]["wall"] = "1.2"
        case "measured":
            data["otherData"]["measured"] = []
        case "list":
            return []
        case "steps":
            data["traceEvents"] = []
    return data


@pytest.mark.parametrize(
    "what",
    [
        *("negative", "kind", "infinite", "track", "schema", "roof", "bytes", "id", "step", "tokens", "ratio"),
        *("measured", "list", "steps"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(spoilt(what)))
    with pytest.raises(BadInputError, match=r"timeline '.*t\.json': is JSON, but no 'ggml-npu timeline 1'"):
        read_timeline(path)


@pytest.mark.parametrize(("text", "why"), [(b'{"traceEvents": [', "is no JSON, or is cut off"), (b"\xff", "no JSON")])
def test_what_is_cut_off_is_refused(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(BadInputError, match=why):
        read_timeline(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no such file"):
        read_timeline(tmp_path / "t.json")
