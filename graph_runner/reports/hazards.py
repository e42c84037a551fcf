"""Hazards of graphs, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table

if TYPE_CHECKING:
    from graph_runner.hazards.findings import Report

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


def hazards_json(reports: Sequence[Report], where: str) -> dict[str, Any]:
    """Returns the hazards as data for JSON."""
    return {
        "schema": HAZARDS_SCHEMA,
        "passed": all(reports),
        "verdict": verdict(reports, where),
        "of": where,
        "graphs": [
            {
                "graph": each.graph,
                "nodes": each.nodes,
                "reads": each.reads,
                "is_as_built": each.is_as_built,
                "hazards": [
                    asdict(finding) | {"right": finding.right, "text": str(finding)} for finding in each.findings
                ],
            }
            for each in reports
        ],
    }
