"""The command timeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.base.limits import MOST_CELLS
from graph_runner.cli.bisect import running
from graph_runner.cli.common import stdout
from graph_runner.cli.options import (
    READS,
    WRITES,
    ContextOptions,
    HtmlFile,
    PromptOptions,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.cli.runs_on import RunsOn

if TYPE_CHECKING:
    from graph_runner.timeline.events import Timeline


def timeline(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|A.json|A.log",
            help="A GGUF file, [bold]demo[/] or [bold]tiny[/], which is run; the file of a timeline; or a log of "
            "ggml-vulkan, ggml-opencl or ggml-hexagon (.log, .txt, .csv).",
            show_default=False,
        ),
        READS,
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="B.json", help="The file of another timeline, to compare.", show_default=False),
        READS,
    ] = None,
    *,
    output: Annotated[
        str | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE|-",
            help="Also write the timeline, which Perfetto opens; - is stdout.",
            show_default=False,
        ),
        WRITES,
    ] = None,
    html_file: HtmlFile = None,
    prompt: PromptOptions,
    steps: Annotated[
        int, typer.Option("-n", "--steps", min=0, max=MOST_CELLS, help="Tokens to decode after the prompt.")
    ] = 16,
    context: ContextOptions,
    on: RunsOn,
) -> None:
    """Show when the nodes of a run ran, on each device: a table of ops, and a trace that Perfetto opens.

    The NPU's kernels are timed inside of the call that runs a whole graph; nodes of other devices run alone. With the
    file of a timeline, or with another backend's log, nothing is run: the table is shown, or two of them side by side.
    """  # fmt: skip
    from graph_runner.base.errors import BadInputError
    from graph_runner.reports.timeline import (
        print_log,
        print_log_beside,
        print_timeline,
        print_timelines,
        timeline_html,
        timeline_json,
    )
    from graph_runner.timeline.events import read_timeline, trace_json
    from graph_runner.timeline.logs import LOGS, read_log

    second = None if other is None else read_timeline(other)
    if Path(model).suffix in LOGS:
        for option, file in (("--output", output), ("--html", html_file)):
            if file is not None:
                raise BadInputError(f"{option} {file!r}: nothing is run, and {model!r} does not say when nodes began")
        log = read_log(Path(model))
        if second is None:
            print_log(log, stdout(None))
        else:
            print_log_beside(log, second, (model, str(other)), stdout(None))
        return
    if Path(model).suffix == ".json":
        if output is not None:
            raise BadInputError(f"--output {output!r}: nothing is run, {model!r} is a timeline already")
        first = read_timeline(Path(model))
    else:
        first = _run(model, prompt.text, steps, context, on)

    def show() -> None:
        console = stdout(output, html_file)
        if second is None:
            print_timeline(first, console)
        else:
            print_timelines(first, second, (model, str(other)), console)

    outputs: list[Callable[[], None]] = [show]
    if output is not None:
        outputs.append(lambda: write("--output", output, json_text(trace_json(first))))
    if html_file is not None:
        shown, names = ([first], [model]) if second is None else ([first, second], [model, str(other)])
        outputs.append(lambda: write("--html", html_file, timeline_html(timeline_json(shown, names))))
    raise typer.Exit(delivered(True, *outputs))


def _run(model: str, prompt: str, steps: int, context: ContextOptions, on: RunsOn) -> Timeline:
    from graph_runner.base.models import model_file
    from graph_runner.timeline.recording import TimelineOptions, record_timeline

    layers = on.use()
    options = TimelineOptions(on.named(), on.devices, steps, context.settings(gpu_layers=layers))
    with model_file(model) as file, running("steps") as seen:
        return record_timeline(file, prompt, options, seen=seen)
