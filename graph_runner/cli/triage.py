"""The command triage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import count
from typing import Any

import typer

from graph_runner.cli.command import parameters_of
from graph_runner.cli.common import stderr, stdout, warn_if_kernels_are_not_kept
from graph_runner.cli.options import (
    JsonFile,
    Model,
    NodesContextOptions,
    PromptOptions,
    Steps,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.cli.runs_on import RunsBesideCpu


def triage(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Steps = 4,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    on: RunsBesideCpu,
) -> None:
    """Find out what is wrong with a model on a device, without knowing where to begin.

    Runs commands, the cheap ones first, until the fault has a name: hazards; whether the end is wrong; a diff of what
    moves data, and of all nodes; whether runs are the same each time; a bisection. Prints a line for each, and the
    command to go on with.
    Exit code 0: no fault was found; 1: one was; 2: bad input; 3: an internal error.
    """
    from graph_runner.reports.triage import conclusion, step_line, triage_json
    from graph_runner.tools import triage as order

    on.named()
    given = vars(prompt) | vars(context) | vars(on) | {"steps": steps}
    console, numbers = stdout(json_file), count(1)

    def seen(step: order.Step) -> None:
        console.print(step_line(next(numbers), step), highlight=False, markup=False, soft_wrap=True)

    warn_if_kernels_are_not_kept()
    with stderr().status("looking"):
        found = order.triage([*_words(given), "--", model], _movers(on.device_file), order.run_command, seen)

    def conclude() -> None:
        for line in conclusion(found):
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    outputs: list[Callable[[], None]] = [conclude]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(triage_json(found))))
    raise typer.Exit(delivered(conclusion(found)[-1].startswith("right"), *outputs))


def _movers(device_file: str | None) -> list[str]:
    """Returns the names of the ops that move data; none for a device of the user's, which need not have them."""
    from ggml_backend_npu.ops import OWN

    if device_file or os.environ.get("GGML_NPU_DEVICE_FILE"):
        return []
    return [name for name, op in OWN.items() if op.default]


def _words(given: dict[str, Any]) -> Iterator[str]:
    """Yields the words of options that are not as they are if left out."""
    for parameter in parameters_of(triage):
        value = given.get(parameter.name, parameter.default)
        if value == parameter.default:
            continue
        option = next(each for each in _names_of(parameter) if each.startswith("--"))
        if isinstance(value, bool):
            yield option if value else f"--no-{option[2:]}"
            continue
        for each in value if isinstance(value, list) else [value]:
            yield from (option, each.value if isinstance(each, StrEnum) else str(each))


def _names_of(parameter: Any) -> list[str]:
    declared = parameter.annotation.__metadata__[0]
    names = [declared.default, *(declared.param_decls or ())]
    return [*map(str, names), f"--{parameter.name.replace('_', '-')}"]
