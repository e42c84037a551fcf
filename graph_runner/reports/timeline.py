"""Timelines as text and as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from graph_runner.base.console import Console, table
from graph_runner.reports.html import json_for_script, page
from graph_runner.timeline.events import COPY, NODE, SPLIT, STEP, Timeline
from graph_runner.timeline.logs import Log, nodes_in_both
from graph_runner.timeline.parts import Longest, Part, longest, ops_of, steps_of
from graph_runner.timeline.table import Row, both, roofline_of, rows, shares_of_steps

_ABOUT = ("model", "description", "device", "ggml", "llama-cpp-python")  # on a page
_LONGEST = 20  # nodes that are shown
_LONGEST_OF_STEP = 8  # on a page


def print_timeline(timeline: Timeline, console: Console) -> None:
    """Prints the table of a timeline, and what it says of the run."""
    shown = table("device", "op")
    for column in ("count", "ms", "GB/s", "GFLOP/s", "of roof", "share"):
        shown.add_column(column, justify="right")
    for row in rows(timeline):
        count = f"{row.count:,}" if row.count else ""
        shown.add_row(row.device, row.op, count, _ms(row.ns), *_rates(row), f"{_share(row.ns, timeline):.1%}")
    console.print(shown)
    for line in _lines(timeline):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _rates(row: Row) -> tuple[str, str, str]:
    """Returns bytes and operations a second, in ns both are billions, and the share of what the machine can do."""
    if row.ns <= 0 or not row.nbytes:
        return "", "", ""
    operations = f"{row.operations / row.ns:.1f}" if row.operations else ""
    return f"{row.nbytes / row.ns:.1f}", operations, f"{row.least / row.ns:.0%}" if row.least else ""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.2f}"


def _share(ns: float, timeline: Timeline) -> float:
    return ns / timeline.wall if timeline.wall else 0.0


def _lines(timeline: Timeline) -> list[str]:
    (_, clocks), *facts = _facts(timeline)
    return [_all(timeline), clocks, *(f"{name}: {text}" for name, text in facts)]


def _all(timeline: Timeline) -> str:
    nodes = sum(event.duration for event in timeline.of(NODE))
    median = statistics.median(shares_of_steps(timeline))
    steps, splits, copies = (len(timeline.of(kind)) for kind in (STEP, SPLIT, COPY))
    return (
        f"{timeline.about['tokens']:,} tokens in {steps:,} steps, {splits:,} splits, {copies:,} of them after copies; "
        f"{_ms(timeline.wall)} ms, of which nodes {_share(nodes, timeline):.1%}, of the median step {median:.1%}"
    )


def _facts(timeline: Timeline) -> list[tuple[str, str]]:
    """Returns what clocks cost, the roof, and how times were taken."""
    about, roof = timeline.about, roofline_of(timeline)
    used = {event.track for event in timeline.of(NODE)}
    facts = [
        (
            "clocks",
            f"{_times(about['times_as_long'])} as the same steps without clocks, run in turns: the median of steps",
        ),
        (
            "roof",
            f"{roof.bytes / 1e9:.1f} GB/s copied, {roof.operations / 1e9:.1f} GFLOP/s of multiply-adds of float32, "
            f"{about['machine']}",
        ),
        *((device, how) for device, how in about["measured"].items() if device in used),
    ]
    if about["nodes_without_times"]:
        facts.append(("nodes without a time of their own", f"{about['nodes_without_times']:,}"))
    return facts


def _times(ratios: dict[str, float]) -> str:
    return f"{ratios['wall']:.2f} times as long (by processor time {ratios['processor']:.2f})"


def print_timelines(a: Timeline, b: Timeline, names: tuple[str, str], console: Console) -> None:
    """Prints two timelines beside each other."""
    _print_both((rows(a), rows(b)), (a.wall, b.wall), names, console)
    for name, one, other in _differing(a, b):
        console.print(f"differs: {name}: {one}, {other}", highlight=False, markup=False, soft_wrap=True)


def _print_both(
    of: tuple[list[Row], list[Row]], walls: tuple[int, int], names: tuple[str, str], console: Console
) -> None:
    shown = table("device", "op")
    first, second = map(_short, names)
    for column in (f"count {first}", second, f"ms {first}", second, "ratio"):
        shown.add_column(column, justify="right")
    for each in both(*of):
        counts = [f"{row.count:,}" if row and row.count else "" for row in (each.a, each.b)]
        times = [_ms(row.ns) if row else "" for row in (each.a, each.b)]
        shown.add_row(each.device, each.op, *counts, *times, "" if each.ratio is None else f"{each.ratio:.2f}")
    a, b = walls
    shown.add_row("", "all", "", "", _ms(a), _ms(b), f"{b / a:.2f}" if a else "")
    console.print(shown)


def print_log(log: Log, console: Console) -> None:
    """Prints the table of another backend's log."""
    shown = table("device", "op")
    for column in ("count", "ms", "GFLOP/s", "share"):
        shown.add_column(column, justify="right")
    all_ns = sum(row.ns for row in log.rows)
    for row in log.rows:
        rate = f"{row.operations / row.ns:.1f}" if row.ns and row.operations else ""
        shown.add_row(row.device, row.op, f"{row.count:,}", _ms(row.ns), rate, f"{row.ns / max(1, all_ns):.1%}")
    console.print(shown)
    console.print(f"a log of {log.kind}: {log.says}", highlight=False, markup=False, soft_wrap=True)


def print_log_beside(log: Log, timeline: Timeline, names: tuple[str, str], console: Console) -> None:
    """Prints another backend's log beside a timeline: ops, and the longest nodes if the log names nodes."""
    _print_both((log.rows, rows(timeline)), (sum(row.ns for row in log.rows), timeline.wall), names, console)
    same = nodes_in_both(log, timeline)
    if same:
        shown = table("node")
        for column in (f"ms {_short(names[0])}", _short(names[1])):
            shown.add_column(column, justify="right")
        for each in same[:_LONGEST]:
            shown.add_row("; ".join(each.ids) or each.name, _ms(each.ns), _ms(each.timed) if each.ids else "")
        console.print(shown)
        found = sum(bool(each.ids) for each in same)
        console.print(
            f"{found:,} of {len(same):,} named nodes are in {_short(names[1])}", highlight=False, markup=False
        )
    console.print(f"a log of {log.kind}: {log.says}", highlight=False, markup=False, soft_wrap=True)


def _short(name: str) -> str:
    return Path(name).name


def _differing(a: Timeline, b: Timeline) -> list[tuple[str, object, object]]:
    """Returns what the runs were that the other was not."""
    first, second = _flat(a), _flat(b)
    names = dict.fromkeys((*first, *second))
    return [(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _flat(timeline: Timeline) -> dict[str, object]:
    measured = ("with_clocks", "without_clocks", "times_as_long", "roofline", "measured", "settings")
    about = {name: value for name, value in timeline.about.items() if name not in measured}
    return about | {f"settings.{name}": value for name, value in timeline.about["settings"].items()}


def timeline_json(timelines: Sequence[Timeline], names: Sequence[str]) -> dict[str, Any]:
    """Returns what the page of one timeline shows, or of two beside each other, as data for JSON. Its size does not
    grow with the nodes of a layer.

    ops    the rows of the table
    steps  of each timeline its time, and the times of each layer and op: [layer, place in `ops`, ns]
    """
    nodes = longest(timelines)
    return {
        "verdict": _all(timelines[0]) if len(timelines) == 1 else _beside(timelines, names),
        "timelines": [
            {
                "name": name,
                "short": _short(name),
                "about": {each: str(timeline.about.get(each, "")) for each in _ABOUT},
                "settings": {each: str(value) for each, value in timeline.about["settings"].items()},
                "tokens": int(timeline.about["tokens"]),
                "steps": len(timeline.of(STEP)),
                "wall": timeline.wall,
                "facts": _facts(timeline),
            }
            for name, timeline in zip(names, timelines, strict=True)
        ],
        "differing": [
            [name, *(None if value is None else str(value) for value in values)]
            for name, *values in (_differing(*timelines) if len(timelines) > 1 else ())
        ],
        "ops": [
            {"device": device, "op": op, "of": [None if row is None else asdict(row) for row in of]}
            for device, op, of in ops_of(timelines)
        ],
        "steps": [
            {
                "step": step,
                "of": [_part_json(part) for part in parts],
                "longest": [_node_json(node, timelines) for node in nodes.get(step, [])[:_LONGEST_OF_STEP]],
            }
            for step, parts in steps_of(timelines).items()
        ],
        "longest": [_node_json(node, timelines) for node in nodes.get(None, [])[:_LONGEST]],
    }


def _beside(timelines: Sequence[Timeline], names: Sequence[str]) -> str:
    a, b = (timeline.wall for timeline in timelines)
    ratio = f"{b / a:.2f} times as long as " if a else ""
    return f"{_short(names[1])} took {_ms(b)} ms, {ratio}{_short(names[0])}, which took {_ms(a)} ms"


def _part_json(part: Part | None) -> dict[str, Any] | None:
    if part is None:
        return None
    times = [[layer, op, ns] for (layer, op), ns in part.times.items() if ns > 0]
    return {"tokens": part.tokens, "ns": part.ns, "times": times}


def _node_json(node: Longest, timelines: Sequence[Timeline]) -> dict[str, Any]:
    made: list[dict[str, Any] | None] = []
    for events, timeline in zip(node.events, timelines, strict=True):
        roof, row = roofline_of(timeline), Row("", "")
        for event in events:
            row.add(event, roof)
        made.append(
            {name: value for name, value in asdict(row).items() if name not in ("device", "op")} if events else None
        )
    return {"id": node.id, "op": node.op, "of": made}


def timeline_html(data: dict[str, Any]) -> str:
    """Returns the page of `timeline_json`: the time of steps and layers by op as a picture, the table of ops, and the
    nodes that took longest. The page's state is in the address's fragment: "#step=3&sort=count&by=token"."""
    return page(
        "timeline",
        styles=("diff.css", "chart.css", "timeline.css"),
        scripts=("tools.js", "chart.js", "sorting.js", "timeline.js"),
        data=data,
        json=json_for_script(data),
    )
