"""The command record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.limits import MOST_CELLS
from graph_runner.base.settings import N_BATCH
from graph_runner.cli.bisect import running
from graph_runner.cli.common import stderr
from graph_runner.cli.options import (
    READS,
    WRITES,
    Model,
    NodesContextOptions,
    PromptOptions,
    finite,
)
from graph_runner.cli.runs_on import AnyDevice, RunsOn


@dataclass(frozen=True)
class RecordsOn(RunsOn):
    """The device that a run is recorded on: ggml's CPU, if none is named."""

    device: AnyDevice = "cpu"


def record(
    model: Model,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE.gguf", help="File to write.", show_default=False), WRITES
    ],
    *,
    prompt: PromptOptions,
    steps: Annotated[
        int, typer.Option("-n", "--steps", min=0, max=MOST_CELLS, help="Tokens to decode after the prompt.")
    ] = 4,
    context: NodesContextOptions,
    on: RecordsOn,
    unwatched: Annotated[
        bool,
        typer.Option(
            "--unwatched",
            help="Look at no node: record what each step gives and the state at the end, which can be read "
            "without changing the run.",
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="ITEM,ITEM,...",
            help="Keep the whole results of these nodes: an op (MUL_MAT), a node's name (ffn_out-*), places within a "
            "step (17, 17-40). A step's number in front limits an item to that step (2:SOFT_MAX).",
            show_default=False,
        ),
    ] = None,
    logits: Annotated[bool, typer.Option("--logits", help="Keep all logits after each step, or embeddings.")] = False,
    batch: Annotated[
        int,
        typer.Option(min=0, max=N_BATCH, help="Tokens of the prompt that are decoded at once; 0 = as many as fit."),
    ] = 0,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.gguf",
            help="Decode the tokens that this record has, step by step, in place of a prompt.",
            show_default=False,
        ),
        READS,
    ] = None,
    step_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=1e6, callback=finite, help="Time limit of a step.")
    ] = 600.0,
) -> None:
    """Record a run in a file, to compare it with another one later.

    Keeps for each node and step a hash of its result, statistics and a sketch, some 52 bytes; the logits' most likely
    tokens after each step; all settings and versions. `ggml-npu compare` compares two such files.
    """
    name, text = on.named(), prompt.text
    from graph_runner.base.errors import BadInputError
    from graph_runner.base.models import model_file
    from graph_runner.process.recording import RecordJob, run_record
    from graph_runner.record import RecordOptions, read_run
    from graph_runner.reports.record import print_recorded

    if unwatched and data is not None:
        raise BadInputError(f"--data {data!r}: --unwatched looks at no node")
    tokens = None
    if like is not None:
        known = read_run(like)
        text, tokens, steps = known.about.prompt, [step.tokens for step in known.steps], len(known.steps)
    options = RecordOptions(
        name, on.devices, steps, context.settings(gpu_layers=on.layers), not unwatched, data, logits, batch, tokens,
    )  # fmt: skip
    with model_file(model) as file, running("steps") as seen:
        job = RecordJob(on.npu, file, text, output, options)
        found = run_record(job, timeout=step_timeout, seen=seen)
    print_recorded(found, str(output), stderr())
