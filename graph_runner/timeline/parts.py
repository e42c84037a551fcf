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
    """A node, or nodes that ran as one, by the id of the last.

    op      its place in `ops_of`
    events  of each timeline; None if it does not have it
    """

    id: str
    op: int
    events: tuple[Event | None, ...]

    @property
    def ns(self) -> int:
        """How long it took in all of them."""
        return sum(event.duration for event in self.events if event is not None)


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


def longest(timelines: Sequence[Timeline]) -> dict[int, list[Longest]]:
    """Returns the nodes of each step, those first that took longest in all timelines together."""
    nodes: dict[int, dict[str, list[Event | None]]] = defaultdict(dict)
    places = _places(timelines)
    ops = dict[str, int]()
    for k, timeline in enumerate(timelines):
        for event in timeline.of(NODE):
            of_step, name = nodes[event.args["step"]], str(event.args["id"])
            of_step.setdefault(name, [None] * len(timelines))[k] = event
            ops.setdefault(name, places[k][event.track, event.name])
    return {
        step: sorted(
            (Longest(name, ops[name], tuple(events)) for name, events in of_step.items()),
            key=lambda each: -each.ns,
        )
        for step, of_step in nodes.items()
    }


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
