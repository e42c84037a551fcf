"""The steps of a triage, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_runner.tools.triage import Step

TRIAGE_SCHEMA = "ggml-npu triage 1"


def step_line(number: int, step: Step) -> str:
    """Returns a step in a line."""
    return f"{number} {step.what} ({step.seconds:.1f} s): {step.said}"


def conclusion(steps: Sequence[Step]) -> list[str]:
    """Returns what came of it, and what to do next, a line each. The last is the verdict."""
    last = steps[-1]
    wrong = [step for step in steps if not step]
    if last.name:
        return [f"next: {last.command}", f"wrong: {last.name}"]
    if wrong:
        return [f"next: {wrong[-1].command}", f"wrong, and without a name: {wrong[-1].said}"]
    if steps[-1].is_open or any(step.is_open for step in steps if step.what != "movers"):
        step = [step for step in steps if step.is_open][-1]
        return [f"next: {step.command}", step.said]
    more = "a longer prompt, --sequences 2, --cache-type-k q8_0; ggml-npu test has other shapes"
    return [f"next, if the text is wrong all the same: {more}", "right: no step has found a fault"]


def triage_json(steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the steps as data for JSON."""
    return {
        "schema": TRIAGE_SCHEMA,
        "passed": conclusion(steps)[-1].startswith("right"),
        "verdict": conclusion(steps)[-1],
        "name": steps[-1].name,
        "steps": [
            {name: value for name, value in asdict(step).items() if name != "data"} | {"passed": bool(step)}
            for step in steps
        ],
    }
