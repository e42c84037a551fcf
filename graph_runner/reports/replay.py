"""The results of a replay, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console
from graph_runner.judging.results import RIGHT, ROUNDING, WRONG
from graph_runner.reports.nodes import nodes_json, print_lines, print_nodes, print_wrong

if TYPE_CHECKING:  # a replay on the NPU reports without llama.cpp
    from graph_runner.trace import ReplayResult

REPLAY_SCHEMA = "ggml-npu replay 2"


def _replay_verdict(result: ReplayResult) -> str:
    wrong, rounded = len(result.wrong), sum(not node.isolated for node in result.nodes)
    total = f"{len(result.nodes):,} nodes replayed"
    if not result.nodes:
        return "no node was replayed"
    if wrong:
        return f"{WRONG}: {wrong:,} of {total} differ from the trace"
    if rounded:
        return f"{ROUNDING}: {total}, {rounded:,} differ from the trace by rounding"
    return f"{RIGHT}: {total}, every byte as in the trace"


def print_replay(result: ReplayResult, console: Console, *, first: int = 5) -> None:
    """Prints the replay as a table by op and type, the first nodes that differ, and a verdict.

    first  how many wrong nodes to list
    """
    origin = result.origin
    model = origin.model or "any program"
    line = f"{result.path}  on {result.device}; {model}, computed on {origin.device} by ggml {origin.ggml}"
    print_lines(console, [line])
    print_nodes(result.nodes, console)
    print_lines(console, [f"{op}: {n:,} nodes not taken: {why}" for (op, why), n in sorted(result.refused.items())])
    print_wrong(result.wrong, console, first)
    print_lines(console, [_replay_verdict(result)], style="bold green" if result else "bold red")


def replay_json(result: ReplayResult) -> dict[str, Any]:
    """Returns the replay as data: schema, where the trace comes from, verdict, a summary by op and type, and every
    node."""
    return {
        "schema": REPLAY_SCHEMA,
        "trace": result.path,
        "device": result.device,
        "origin": vars(result.origin),
        "passed": bool(result),
        "verdict": _replay_verdict(result),
        **nodes_json(result.nodes, result.refused, {}),
    }
