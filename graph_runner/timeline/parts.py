"""Timelines cut into steps and layers, one timeline or two beside each other: what a page draws."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graph_runner.record.aligning import layers
from graph_runner.timeline.events import COPY, NODE, STEP, Event, Timeline, read_id
from graph_runner.timeline.table import COPIES, OUTSIDE, Row, both, rows


@dataclass
class Part:
    """What a step took.

    tokens  that were decoded
    ns      in all
    times   in ns, by layer and op; None: in no layer. An op is its place in `ops_of`
    """

    tokens: int
    ns: int
    times: Counter[tuple[int | None, int]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Longest:
    """A node, or nodes that ran as one, in a step or in all of them.

    op      its place in `ops_of`
    events  of each timeline, each time that it ran
    """

    op: int
    events: tuple[list[Event], ...]

    @property
    def id(self) -> str:
        """Its id where it took longest."""
        return str(max((event for each in self.events for event in each), key=lambda event: event.duration).args["id"])

    @property
    def ns(self) -> int:
        """How long it took in all of them."""
        return sum(event.duration for each in self.events for event in each)


def ops_of(timelines: Sequence[Timeline]) -> list[tuple[str, str, tuple[Row | None, ...]]]:
    """Returns the rows of one table, or of two beside each other: device, op, and the row of each timeline."""
    if len(timelines) == 1:
        return [(row.device, row.op, (row,)) for row in rows(timelines[0])]
    return [(each.device, each.op, (each.a, each.b)) for each in both(*map(rows, timelines))]


def steps_of(timelines: Sequence[Timeline]) -> dict[int, tuple[Part | None, ...]]:
    """Returns the steps, by number; None where a timeline does not have one. The times of a step add up to its own."""
    found = [_parts(timeline, places) for timeline, places in zip(timelines, _places(timelines), strict=True)]
    return {
        step: tuple(parts.get(step) for parts in found) for step in sorted({step for each in found for step in each})
    }


def longest(timelines: Sequence[Timeline]) -> dict[int | None, list[Longest]]:
    """Returns the nodes of each step, and of all steps (None), those first that took longest in all timelines together.
    Nodes of all steps are the same if they have the same op and name."""
    places = _places(timelines)
    nodes: dict[int | None, dict[object, Longest]] = defaultdict(dict)
    for k, timeline in enumerate(timelines):
        for event in timeline.of(NODE):
            name = str(event.args["id"])
            for step, key in ((event.args["step"], name), (None, (read_id(name) or (0, name))[1:])):
                made = Longest(places[k][event.track, event.name], tuple([] for _ in timelines))
                nodes[step].setdefault(key, made).events[k].append(event)
    return {step: sorted(found.values(), key=lambda each: -each.ns) for step, found in nodes.items()}


def _places(timelines: Sequence[Timeline]) -> list[dict[tuple[str, str], int]]:
    """Returns for each timeline where its ops are in `ops_of`, by device and op."""
    found: list[dict[tuple[str, str], int]] = [{} for _ in timelines]
    for place, (_, _, of) in enumerate(ops_of(timelines)):
        for known, row in zip(found, of, strict=True):
            if row is not None:
                known[row.device, row.op] = place
    return found


def _parts(timeline: Timeline, places: Mapping[tuple[str, str], int]) -> dict[int, Part]:
    parts = {step.args["step"]: Part(step.args["tokens"], step.duration) for step in timeline.of(STEP)}
    nodes: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.of(NODE):
        nodes[event.args["step"]].append(event)
    for step, events in nodes.items():
        names = [(read_id(str(event.args["id"])) or (0, "", ""))[2] for event in events]
        for event, layer in zip(events, layers(names), strict=True):
            parts[step].times[layer, places[event.track, event.name]] += event.duration
    for event in timeline.of(COPY):
        parts[event.args["step"]].times[None, places["", COPIES]] += event.duration
    for part in parts.values():
        part.times[None, places["", OUTSIDE]] = part.ns - part.times.total()
    return parts
