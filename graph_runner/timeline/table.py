"""A timeline added up by op, and two beside each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from graph_runner.timeline.events import COPY, NODE, STEP, Event, Timeline
from graph_runner.timeline.roofline import Roofline

COPIES, OUTSIDE = "copies between devices", "outside of nodes"


@dataclass
class Row:
    """What an op took on a device.

    ns          in all
    nbytes, operations  as `nodes.StepNode` has them
    least       the least time for these by the roofline, in ns
    """

    device: str
    op: str
    count: int = 0
    ns: int = 0
    nbytes: float = 0.0
    operations: float = 0.0
    least: float = 0.0

    def add(self, event: Event, roof: Roofline) -> None:
        """Adds a node."""
        nbytes, operations = float(event.args["bytes"]), float(event.args["operations"])
        self.count += 1
        self.ns += event.duration
        self.nbytes += nbytes
        self.operations += operations
        self.least += 1e9 * roof.seconds(nbytes, operations)


def roofline_of(timeline: Timeline) -> Roofline:
    """Returns the roofline of the machine on which a timeline was measured."""
    of = timeline.about["roofline"]
    return Roofline(of["bytes_per_second"], of["operations_per_second"])


def rows(timeline: Timeline) -> list[Row]:
    """Returns the ops of a timeline, the longest first; then copies, and what is neither: llama.cpp, the scheduler."""
    found: dict[tuple[str, str], Row] = {}
    roof = roofline_of(timeline)
    for event in timeline.of(NODE):
        found.setdefault((event.track, event.name), Row(event.track, event.name)).add(event, roof)
    made = sorted(found.values(), key=lambda row: -row.ns)
    copies = timeline.of(COPY)
    if copies:
        ns = sum(event.duration for event in copies)
        made.append(Row("", COPIES, len(copies), ns, sum(float(event.args.get("bytes", 0)) for event in copies)))
    made.append(Row("", OUTSIDE, 0, timeline.wall - sum(row.ns for row in made)))
    return made


def shares_of_steps(timeline: Timeline) -> list[float]:
    """Returns how much of the time of each step its nodes took."""
    found = Counter[int]()
    for event in timeline.of(NODE):
        found[event.args["step"]] += event.duration
    return [found[step.args["step"]] / max(1, step.duration) for step in timeline.of(STEP)]


@dataclass(frozen=True)
class Both:
    """An op in two runs; None if one does not have it."""

    device: str
    op: str
    a: Row | None
    b: Row | None

    @property
    def ratio(self) -> float | None:
        """How many times as long it took in the second; None if that says nothing."""
        return None if self.a is None or self.b is None or self.a.ns <= 0 else self.b.ns / self.a.ns


def both(first: list[Row], second: list[Row]) -> list[Both]:
    """Returns the ops of two runs, in the order of the first; ops that ran on other devices are apart, unless each run
    has the op on one device alone."""
    found, left = [], [*second]
    for row in first:
        same = [each for each in left if (each.device, each.op) == (row.device, row.op)]
        moved = [each for each in left if each.op == row.op]
        alone = sum(each.op == row.op for each in first) == 1 == len(moved)
        partner = next(iter(same or (moved if alone else [])), None)
        if partner is not None:
            left.remove(partner)
        device = row.device if partner is None or partner.device == row.device else f"{row.device}, {partner.device}"
        found.append(Both(device, row.op, row, partner))
    return found + [Both(row.device, row.op, None, row) for row in left]
