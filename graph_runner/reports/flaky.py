"""Repeated runs, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from graph_runner.base.console import Console, table

if TYPE_CHECKING:
    from graph_runner.bisect.flakiness import Flakiness, Repeat

FLAKY_SCHEMA = "ggml-npu flaky 1"


def print_flaky(result: Flakiness, console: Console) -> None:
    """Prints a line for each way of running, the first runs that are apart, and the verdict."""
    shown = table("runs")
    for column in ("number", "apart", "seconds"):
        shown.add_column(column, justify="right")
    apart = result.apart
    for way in dict.fromkeys(each.way for each in result.repeats):
        runs = [each for each in result.repeats if each.way == way]
        n = sum(each.way == way for each in apart)
        shown.add_row(way.name, f"{len(runs):,}", f"{n:,}", f"{sum(each.seconds for each in runs):.1f} s")
    console.print(shown)
    for each in apart[:3]:
        console.print(_where(result, each), highlight=False, markup=False, soft_wrap=True)
    if result.parting is not None:
        line = f"the first node that parts, each looked at alone: {result.parting}; {result.parting.runs} runs"
        if result.parting.place is None:
            line = f"{result.parting}, in {result.parting.runs} runs; next: ggml-npu bisect --repeat 10"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(verdict(result), style="bold", highlight=False, markup=False, soft_wrap=True)


def _where(result: Flakiness, repeat: Repeat) -> str:
    which = f"run {result.repeats.index(repeat) + 1}, {repeat.way.name}"
    if repeat.error:
        return f"{which}: {repeat.error}"
    step = result.first_apart(repeat)
    what = f"what step {step} gives" if step <= result.steps else "the states at the end alone"
    return f"{which}: parts from the others in {what}"


def verdict(result: Flakiness) -> str:
    """Returns what was found, in a line."""
    n, apart = len(result.repeats), result.apart
    if not apart:
        often = 1 / result.bound
        return (
            f"the same: {n} runs on {result.device} are equal; "
            f"a fault of more than 1 in {often:.0f} runs would have been seen with 95%"
        )
    where = f", first at {result.parting}" if result.parting is not None and result.parting.place is not None else ""
    return f"flaky: {len(apart)} of {n} runs on {result.device} are apart{where}"


def flaky_json(result: Flakiness) -> dict[str, Any]:
    """Returns repeated runs as data for JSON."""
    apart, parting = result.apart, result.parting
    return {
        "schema": FLAKY_SCHEMA,
        "passed": bool(result),
        "verdict": verdict(result),
        "model": result.model,
        "device": result.device,
        "rate": result.rate,
        "bound": result.bound,
        "parting": None if parting is None else asdict(parting) | {"text": str(parting)},
        "runs": [
            {
                "way": each.way.name,
                "process": each.process,
                "digests": list(each.digests),
                "apart": each in apart,
                "first_step": result.first_apart(each) if each in apart and each.digests else None,
                "error": each.error,
                "seconds": each.seconds,
            }
            for each in result.repeats
        ],
    }
