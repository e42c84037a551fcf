"""The command flaky."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.bisect import RunTimeout, running
from graph_runner.cli.common import stdout
from graph_runner.cli.options import (
    JsonFile,
    Model,
    NodesContextOptions,
    PromptOptions,
    Steps,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.cli.runs_on import RunsBesideCpu


def flaky(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Steps = 4,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    on: RunsBesideCpu,
    repeat: Annotated[int, typer.Option(min=2, max=MOST_TIMES, help="Number of runs.")] = 20,
    run_timeout: RunTimeout = 600.0,
) -> None:
    """Find out whether a device gives the same each time.

    Runs the same tokens again and again, whole, and looks at no node: what each step gives, logits or embeddings, and
    the states at the end have to be the same bytes. Runs are provoked: other processes, addresses, threads, memory that
    holds other content. If two are apart, further runs look for the first node at which they are.
    Exit code 0: all are the same; 1: some are apart; 2: bad input; 3: an internal error.
    """
    name = on.named()
    from graph_runner.base.models import model_file
    from graph_runner.bisect.flakiness import planned, ways_of
    from graph_runner.bisect.whole import WholeOptions
    from graph_runner.process.flaking import FlakyJob, run_flaky
    from graph_runner.reports.flaky import flaky_json, print_flaky

    options = WholeOptions(name, on.devices, steps, context.settings(gpu_layers=on.layers))
    ways = planned(ways_of(context.threads, is_npu=name == "NPU"), repeat)
    with model_file(model) as file, running() as seen:
        job = FlakyJob(on.npu, file, prompt.text, options)
        result = run_flaky(job, ways, timeout=run_timeout, seen=seen)
    outputs: list[Callable[[], None]] = [lambda: print_flaky(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(flaky_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))
