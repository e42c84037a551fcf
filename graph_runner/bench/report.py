"""Benchmarks for a person (tables on a terminal) and for a program (JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from graph_runner.base.console import Console, Table, table
from graph_runner.bench.measure import OURS, Measurement, geometric_mean, groups, worst
from graph_runner.bench.run import BenchResult

BENCH_SCHEMA = "ggml-npu bench 1"


def print_bench(result: BenchResult, console: Console) -> None:
    """Prints the header, then a table for each benchmark: medians, ratios, and their summary by group."""
    console.print(str(result.header), highlight=False, markup=False, soft_wrap=True)
    for name, measurements in result.measurements.items():
        console.print()
        console.print(_table(name, measurements))


def _table(name: str, measurements: Sequence[Measurement]) -> Table:
    others = [*measurements[0].others]
    shown = table()
    shown.add_column(name)
    bandwidth = ["GB/s"] if measurements[0].nbytes else []
    for column in (OURS if others else "median", *others, *(f"to {other}" for other in others), *bandwidth):
        shown.add_column(column, justify="right")
    by_group = groups(measurements)
    for alike in by_group.values():
        for found in alike:
            shown.add_row(
                found.what,
                f"{found.median:,.2f} {found.unit}",
                *(f"{median(found.others[other]):,.2f}" for other in others),
                *(_ratio(found.ratio(other)) for other in others),
                *(f"{found.bandwidth() / 1e9:,.2f}" for _ in bandwidth),
            )
        _add_summary(shown, "  ", alike)
    if len(by_group) > 1 and _have_one_unit(measurements):
        _add_summary(shown, "all: ", measurements)
    return shown


def _have_one_unit(measurements: Sequence[Measurement]) -> bool:
    return len({found.unit for found in measurements}) == 1


def _ratio(ratio: float) -> str:
    if ratio >= 1:
        return f"{ratio:,.2f}x"
    return f"[red]{ratio:.2f}x[/]" if ratio >= 0.1 else f"[red]{ratio:.1g}x[/]"


def _add_summary(shown: Table, title: str, measurements: Sequence[Measurement]) -> None:
    """Two rows below measurements: the geometric mean of their ratios, and the worst."""
    others = measurements[0].others
    if len(measurements) == 1 or not others:
        return
    no_times = [""] * (1 + len(others))
    means = (geometric_mean(measurements, other) for other in others)
    shown.add_row(f"{title}geometric mean", *no_times, *map(_ratio, means), style="bold")
    worsts = (worst(measurements, other).ratio(other) for other in others)
    shown.add_row(f"{title}worst", *no_times, *map(_ratio, worsts), style="bold")


def bench_json(result: BenchResult) -> dict[str, Any]:
    """Returns benchmarks as data: schema, header, every measurement with all its rounds, and summaries of each whole
    benchmark (group null) and of its groups."""
    return {
        "schema": BENCH_SCHEMA,
        **asdict(result.header),
        "measurements": [
            {"benchmark": name, **_measurement_json(found)}
            for name, measurements in result.measurements.items()
            for found in measurements
        ],
        "summaries": [
            {"benchmark": name, "group": group, "to": other, **_summary_json(alike, other)}
            for name, measurements in result.measurements.items()
            for group, alike in [(None, measurements), *groups(measurements).items()]
            for other in measurements[0].others
            if group != "" and _have_one_unit(alike)
        ],
    }


def _measurement_json(found: Measurement) -> dict[str, Any]:
    return {
        "group": found.group or None,
        "what": found.what,
        "unit": found.unit,
        "values": found.values,
        "median": found.median,
        "nbytes": found.nbytes,
        "bytes_per_second": found.bandwidth() if found.nbytes else None,
        "others": {
            other: {"values": values, "median": median(values), "ratio": found.ratio(other)}
            for other, values in found.others.items()
        },
    }


def _summary_json(measurements: Sequence[Measurement], other: str) -> dict[str, Any]:
    least = worst(measurements, other)
    mean = geometric_mean(measurements, other)
    return {"geometric_mean": mean, "worst": {"what": least.what, "ratio": least.ratio(other)}}
