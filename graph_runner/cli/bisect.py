"""The command bisect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import stderr, stdout
from graph_runner.cli.options import (
    WRITES,
    JsonFile,
    Model,
    NodesContextOptions,
    PromptOptions,
    Steps,
    finite,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.cli.runs_on import RunsBesideCpu

RunTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, max=1e6, callback=finite, help="Time limit of a run.")
]


def bisect(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Steps = 4,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    on: RunsBesideCpu,
    limit: Annotated[
        float | None,
        typer.Option(
            "--nmse",
            metavar="LIMIT",
            min=0,
            max=1e9,
            callback=finite,
            help="NMSE at the end beyond which a run is wrong. Default: what flash attention, on or off, changes on "
            "the CPU.",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=MOST_TIMES, help="Runs of all nodes on the device, to see how many are wrong.")
    ] = 3,
    by_token: Annotated[
        bool, typer.Option("--text", help="A run is wrong if another token is the most likely, whatever the NMSE.")
    ] = False,
    ends: Annotated[
        bool, typer.Option("--ends", help="Only tell whether the end is wrong with all nodes on the device.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write each run into this file, and do not make those again that it has.",
            show_default=False,
        ),
        WRITES,
    ] = None,
    run_timeout: RunTimeout = 600.0,
) -> None:
    """Find the nodes with which a whole run is wrong, without looking at any.

    Runs the model whole, with all nodes on the device, then with some of them: the others run on the CPU. Compares the
    logits, or embeddings, at the end with those of the CPU alone. For faults that vanish when nodes are run one by one.
    --resume goes on where a bisection was stopped.
    Exit code 0: the run is right; 1: it is wrong; 2: bad input; 3: an internal error.
    """
    if by_token and limit is not None:
        raise BadInputError(f"--nmse {limit}: with --text, tokens say whether a run is wrong")
    name = on.named()
    from graph_runner.base.models import model_file
    from graph_runner.bisect.kept import Kept
    from graph_runner.bisect.running import BisectOptions
    from graph_runner.process.bisecting import BisectJob, run_bisect
    from graph_runner.reports.bisect import bisect_json, print_bisection

    options = BisectOptions(
        name, on.devices, steps, context.settings(gpu_layers=on.layers), limit, repeat, by_token, ends,
    )  # fmt: skip
    with model_file(model) as file, running() as seen:
        job = BisectJob(on.npu, file, prompt.text, options)
        kept = None if resume is None else Kept(resume, job.asked)
        result = run_bisect(job, timeout=run_timeout, seen=seen, kept=kept)
    outputs: list[Callable[[], None]] = [lambda: print_bisection(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(bisect_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))


@contextmanager
def running(what: str = "runs") -> Iterator[Callable[[object], None]]:
    """Yields what is called with each run, or step, and says on a terminal how many there were."""
    n = 0
    with stderr().status("running the model") as status:

        def seen(_: object) -> None:
            nonlocal n
            n += 1
            status.update(f"{n} {what}")

        yield seen
