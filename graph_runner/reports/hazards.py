"""Hazards of graphs, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table

if TYPE_CHECKING:
    from graph_runner.hazards.findings import Finding, Report

HAZARDS_SCHEMA = "ggml-npu hazards 1"
_MOST = 20  # hazards of a graph that are printed


def print_hazards(reports: Sequence[Report], where: str, console: Console) -> None:
    """Prints a line for each graph, its hazards, and the verdict.

    where  "on DEVICE" or "of FILE"
    """
    shown = table("graph")
    for column in ("nodes", "reads", "hazards"):
        shown.add_column(column, justify="right")
    for each in reports:
        shown.add_row(each.graph, f"{each.nodes:,}", f"{each.reads:,}", f"{len(each.findings):,}")
    console.print(shown)
    for each in reports:
        for finding in each.findings[:_MOST]:
            console.print(f"{each.graph}: {finding}", highlight=False, markup=False, soft_wrap=True)
        if len(each.findings) > _MOST:
            console.print(f"{each.graph}: {len(each.findings) - _MOST:,} more", highlight=False)
    unknown = [each.graph for each in reports if not each.is_as_built]
    if unknown:
        line = f"{', '.join(unknown)}: the CPU's graph has other nodes, so the order is taken to be as built"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(verdict(reports, where), style="bold", highlight=False, markup=False, soft_wrap=True)


def verdict(reports: Sequence[Report], where: str) -> str:
    """Returns how many hazards there are, in a line."""
    found, n = sum(len(each.findings) for each in reports), len(reports)
    reads = sum(each.reads for each in reports)
    graphs = f"{n:,} {'graph' if n == 1 else 'graphs'} {where}, {reads:,} reads checked"
    return f"{found:,} {'hazard' if found == 1 else 'hazards'} in {graphs}" if found else f"no hazard in {graphs}"


def hazard_lines(found: Sequence[tuple[str, Finding]], most: int) -> list[str]:
    """Returns a line for each hazard, with the name of its graph; of no more than `most`."""
    lines = [f"{graph}: {finding}" for graph, finding in found[:most]]
    return lines + ([f"... and {len(found) - most:,} more hazards"] if len(found) > most else [])


def hazards_line(found: Sequence[tuple[str, Finding]]) -> str:
    """Returns how many hazards there are and the first of them."""
    first = found[0][1]
    return f"{len(found):,} hazard{'s' if len(found) > 1 else ''}: {first.what}; right: {first.right}"


def hazards_json(reports: Sequence[Report], where: str) -> dict[str, Any]:
    """Returns the hazards as data for JSON."""
    return {
        "schema": HAZARDS_SCHEMA,
        "passed": all(reports),
        "verdict": verdict(reports, where),
        "of": where,
        "graphs": graphs_json(reports),
    }


def graphs_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Returns the checks of graphs as data for JSON."""
    return [
        {
            "graph": each.graph,
            "nodes": each.nodes,
            "reads": each.reads,
            "is_as_built": each.is_as_built,
            "hazards": [asdict(finding) | {"right": finding.right, "text": str(finding)} for finding in each.findings],
        }
        for each in reports
    ]
