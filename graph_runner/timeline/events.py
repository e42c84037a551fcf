"""A timeline, and its file: a trace in the JSON trace event format, which Perfetto and chrome://tracing open.

The format: Trace Event Format, Google, 2016. Complete events ("X") have a time and a duration in microseconds, a
process and a thread, of which each device has one; metadata events ("M") name these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ggml_backend_npu.user_texts import no_file
from graph_runner.base.errors import BadInputError

SCHEMA = "ggml-npu timeline 1"
STEP, SPLIT, COPY, NODE = "step", "split", "copy", "node"
LLAMA = "llama.cpp"  # the track of steps
_KINDS = (STEP, SPLIT, COPY, NODE)
_PROCESS = 1
_ID = re.compile(r"step (\d{1,18}) node \d+, (\S+) (['\"])(.*)\3", re.DOTALL)


@dataclass(frozen=True)
class Event:
    """What took some time.

    kind   a step, a split, copies before a split, or a node, or nodes that ran as one operator
    track  the device
    begin, end  in ns, since the run began
    args   what else is known of it: of a node its id, bytes and operations
    """

    kind: str
    name: str
    track: str
    begin: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration(self) -> int:
        """How long it took, in ns."""
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """A run that was measured.

    about   what ran: texts and numbers, as they are in the file
    events  in order
    """

    about: Mapping[str, Any]
    events: list[Event]

    def of(self, kind: str) -> list[Event]:
        """Returns the events of a kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def wall(self) -> int:
        """How long the steps took, in ns."""
        return sum(event.duration for event in self.of(STEP))


def read_id(text: str) -> tuple[int, str, str] | None:
    """Returns the step, the op and the name of a node from its id (`laying.node_id`); None if it is none."""
    match = _ID.fullmatch(text)
    return None if match is None else (int(match[1]), match[2], match[4])


def trace_json(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline as data for JSON."""
    tracks = [LLAMA, *dict.fromkeys(event.track for event in timeline.events if event.track != LLAMA)]
    events: list[dict[str, Any]] = [_named("process_name", 0, f"ggml-npu timeline of {timeline.about['model']}")]
    for number, track in enumerate(tracks, start=1):  # to Perfetto, thread 0 is the one that has the process's number
        events.append(_named("thread_name", number, track))
        events.append(_named("thread_sort_index", number, number, key="sort_index"))
    for event in timeline.events:
        events.append(
            {
                "ph": "X", "pid": _PROCESS, "tid": 1 + tracks.index(event.track), "cat": event.kind, "name": event.name,
                "ts": event.begin / 1000, "dur": event.duration / 1000, "args": dict(event.args),
            }
        )  # fmt: skip
    about = {"schema": SCHEMA} | dict(timeline.about)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(what: str, thread: int, value: object, *, key: str = "name") -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": {key: value}}


def read_timeline(path: Path) -> Timeline:
    """Reads the file of a timeline. Raises BadInputError for one that cannot be read, or is none."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BadInputError(f"timeline {str(path)!r}: {no_file(path)}") from None
    except OSError as error:
        raise BadInputError(f"timeline {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise BadInputError(f"timeline {str(path)!r}: is no JSON, or is cut off") from None
    try:
        about = data["otherData"]
        if about["schema"] != SCHEMA:
            raise ValueError
        return _timeline(data["traceEvents"], about)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        raise BadInputError(f"timeline {str(path)!r}: is JSON, but no {SCHEMA!r}") from None


def _timeline(data: list[dict[str, Any]], about: dict[str, Any]) -> Timeline:
    names = {each["tid"]: str(each["args"]["name"]) for each in data if each["name"] == "thread_name"}
    events = []
    for each in data:
        if each["ph"] != "X":
            continue
        begin, duration, args = round(each["ts"] * 1000), round(each["dur"] * 1000), each["args"]
        if duration < 0 or each["cat"] not in _KINDS:
            raise ValueError
        if each["cat"] == NODE:
            _check(args["bytes"], args["operations"])
            str(args["id"])
        events.append(Event(each["cat"], str(each["name"]), names[each["tid"]], begin, begin + duration, args))
    found = Timeline({name: value for name, value in about.items() if name != "schema"}, events)
    roof, ratios = about["roofline"], about["times_as_long"]
    _check(roof["bytes_per_second"], roof["operations_per_second"], ratios["wall"], ratios["processor"])
    _check(
        about["tokens"], about["nodes_without_times"], 1 / roof["bytes_per_second"], 1 / roof["operations_per_second"]
    )
    str(about["model"]), str(about["machine"]), about["measured"].items(), about["settings"].items()
    for step in found.of(STEP):
        _check(step.args["step"], step.args["tokens"])
    steps = {step.args["step"] for step in found.of(STEP)}
    if not steps or any(event.args["step"] not in steps for event in events):
        raise ValueError
    return found


def _check(*numbers: object) -> None:
    """Raises ValueError for what is no number that a count or a time may be: JSON has NaN and infinity here too."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < 1 << 63:
            raise ValueError
