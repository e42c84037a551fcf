"""A bisection, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table

if TYPE_CHECKING:
    from graph_runner.bisect.result import Bisection, Trial

BISECT_SCHEMA = "ggml-npu bisect 1"
_FEW = 40  # characters of the nodes of a run


def print_bisection(result: Bisection, console: Console) -> None:
    """Prints a line for each run, what was found, and what to do next."""
    shown = table("nodes on the device")
    for column in ("NMSE at the end", "other token", "verdict"):
        shown.add_column(column, justify="right")
    for trial in result.trials:
        token = "" if trial.first_token is None else f"step {trial.first_token}"
        nodes = trial.nodes if len(trial.nodes) <= _FEW else f"{trial.nodes[: _FEW - 4]} ..."
        error = trial.nmse is None
        shown.add_row(nodes, "" if error else f"{trial.nmse:.3g}", token, trial.error or _word(result, trial))
    console.print(shown)
    for line in _found(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(verdict(result), style="bold", highlight=False, markup=False, soft_wrap=True)


def _word(result: Bisection, trial: Trial) -> str:
    limit = result.limit if trial.nodes == result.trials[0].nodes else result.threshold
    return "wrong" if result.is_wrong(trial, limit) else "right"


def _found(result: Bisection) -> list[str]:
    """Returns the nodes with which alone the run is wrong, a line for each, and what comes next."""
    lines = []
    for number in result.needed:
        unit = result.units[number]
        lines.append(f"node {number} of {len(result.units)}: {unit}, {unit.types}, ne {list(unit.ne)}")
    if 0 < result.rate < 1:
        lines.append(f"{result.rate:.0%} of the runs with all nodes on {result.device} are wrong, so each was repeated")
    if result.needed:
        ops = ",".join(sorted({result.units[number].op for number in result.needed}))
        lines.append(f"next: ggml-npu diff with --ops {ops} judges these nodes; ggml-npu hazards reads their order")
    return lines


def verdict(result: Bisection) -> str:
    """Returns what was found, in a line."""
    n, runs = len(result.needed), f"{len(result.trials)} runs"
    if result.why:
        return f"wrong: {result.why}; {runs}"
    if not n:
        worst = max((trial.nmse or 0.0 for trial in result.trials), default=0.0)
        word = "right" if result else "wrong"
        end = "the same tokens" if result and result.by_token else f"NMSE {worst:.3g} of {result.limit:.3g}"
        often = f" in {result.rate:.0%} of the runs" if 0 < result.rate < 1 else ""
        return f"{word}{often}: all {len(result.units):,} nodes on {result.device}, {end}; {runs}"
    if result.span is not None:
        first, last = (result.units[number] for number in (result.span[0], result.span[-1]))
        each = f"the {len(result.span)} nodes from {first} to {last}"
        return f"wrong: {each}: with these together on {result.device} the run is wrong; {runs}"
    names = " and ".join(str(result.units[number]) for number in result.needed)
    alone = "with it alone" if n == 1 else f"with these {n} together"
    return f"wrong: {names}: {alone} on {result.device} the run is wrong; {runs}"


def bisect_json(result: Bisection) -> dict[str, Any]:
    """Returns a bisection as data for JSON."""
    return {
        "schema": BISECT_SCHEMA,
        "passed": bool(result),
        "verdict": verdict(result),
        "model": result.model,
        "device": result.device,
        "limit": result.limit,
        "threshold": result.threshold,
        "rate": result.rate,
        "is_whole": result.is_whole,
        "nodes": [asdict(unit) for unit in result.units],
        "needed": result.needed,
        "span": None if result.span is None else [result.span[0], result.span[-1]],
        "runs": [asdict(trial) for trial in result.trials],
    }
