"""The command quantdiff."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from graph_runner.base.console import printable
from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_CELLS
from graph_runner.cli.common import stderr, stdout
from graph_runner.cli.options import READS, ContextOptions, HtmlFile, JsonFile, PromptOptions, finite
from graph_runner.cli.outputs import delivered, json_text, write

_MOST_CHUNK = 1 << 17  # tokens: the logits of half of them are in memory
_MOST_CHUNKS = 1 << 20
_TYPES = "q3_K,q4_0,q4_1,q4_K,q5_0,q5_1,q5_K,q6_K,q8_0"

Big = Annotated[
    Path,
    typer.Argument(metavar="BIG.gguf", help="The model that the other one was quantised from.", show_default=False),
    READS,
]
Small = Annotated[Path, typer.Argument(metavar="SMALL.gguf", help="The quantised model.", show_default=False), READS]
TextFile = Annotated[
    Path, typer.Option("-f", "--file", metavar="FILE", help="The text, in UTF-8.", show_default=False), READS
]
ChunkSize = Annotated[
    int,
    typer.Option(
        "-c", "--ctx-size", min=16, max=_MOST_CHUNK, help="Tokens of a chunk, of which the second half is scored."
    ),
]
Chunks = Annotated[
    int,
    typer.Option(min=0, max=_MOST_CHUNKS, help="Chunks of the text to compare the two models on; 0 = all."),
]
PutBack = Annotated[
    int,
    typer.Option(
        min=1, max=_MOST_CHUNKS, help="Of these, the chunks for the runs in which tensors are put back: one run each."
    ),
]
Tensors = Annotated[
    int | None,
    typer.Option(
        min=0, max=MOST_CELLS, show_default=False,
        help="How many tensors to put back alone: those that should cost most for their bytes, by their layer, their "
        "kind and their own error. Default: all.",
    ),
]  # fmt: skip
Bpw = Annotated[
    float | None,
    typer.Option(
        metavar="BITS", min=0.1, max=64.0, callback=finite, show_default=False,
        help="Bits per weight of the whole model, for which to choose a type for each tensor and measure them.",
    ),
]  # fmt: skip
Types = Annotated[
    str,
    typer.Option(
        metavar="TYPE,TYPE,...", help="Types to choose from with --bpw; none that needs an importance matrix."
    ),
]


def quantdiff(
    big: Big,
    small: Small,
    *,
    file: TextFile,
    chunk_size: ChunkSize = 512,
    chunks: Chunks = 0,
    put_back: PutBack = 1,
    tensors: Tensors = None,
    bpw: Bpw = None,
    types: Types = _TYPES,
    context: ContextOptions,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Compare a quantised model with the one it was made from, and find the tensors that cost most.

    KL divergence, perplexity and share of the same tokens as llama-perplexity --kl-divergence has them. Then each
    quantised tensor is put back as the big model has it, alone, with its layer, and with all of its kind, and the model
    runs again: in memory, no model is written. Runs on llama.cpp's CPU. Exit code 0: measured; 2: bad input; 3: an
    internal error.
    """
    if bpw is None and types != _TYPES:
        raise BadInputError(f"--types {types!r}: applies to --bpw, which is not given")
    text = PromptOptions(prompt_file=file).text
    from graph_runner.quantdiff.run import QuantOptions, quantisation
    from graph_runner.reports.quantdiff import print_quantdiff, quantdiff_html, quantdiff_json

    with _progress() as seen:
        options = QuantOptions(
            context.settings(n_ctx=chunk_size, text=True), chunks, put_back, tensors, bpw, types.split(","), seen
        )
        result = quantisation(big, small, text, options)
    outputs: list[Callable[[], None]] = [lambda: print_quantdiff(result, stdout(json_file, html_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(quantdiff_json(result))))
    if html_file is not None:
        outputs.append(lambda: write("--html", html_file, quantdiff_html(quantdiff_json(result))))
    raise typer.Exit(delivered(True, *outputs))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields what is called before each run: a progress bar, shown on a terminal only."""
    console = stderr()
    with Progress(
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("runs"),
        TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("weights", total=None)

        def seen(done: int, n: int, what: str) -> None:
            progress.update(task, completed=done, total=n, description=printable(what))

        yield seen
