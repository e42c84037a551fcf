"""The command bench."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer
from rich.progress import Progress, TextColumn

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import stderr, stdout
from graph_runner.cli.options import MODEL_HELP, READS, WRITES, JsonFile, Threads
from graph_runner.cli.outputs import delivered, json_text, save, write


class Benchmark(StrEnum):
    """The benchmarks that the command can run."""

    MOVERS = "movers"
    CODECS = "codecs"
    CALLS = "calls"
    SPLITS = "splits"
    DECODE = "decode"
    OPERATORS = "operators"
    OPS = "ops"
    DIFF = "diff"
    START = "start"
    BEST = "best"
    DEPTH = "depth"
    ALL = "all"


_MOST_MIB = 4096  # of which both sides have several tensors
_BUILD_LLAMA_CPP = (Benchmark.BEST, Benchmark.DEPTH)


def bench(
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")] = Benchmark.ALL,
    json_file: JsonFile = None,
    plot_file: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE.png", help="Also draw movers and codecs as a bar chart."),
        WRITES,
    ] = None,
    model: Annotated[str, typer.Option(metavar="MODEL", help=MODEL_HELP), READS] = "demo",
    rounds: Annotated[int, typer.Option(min=1, max=MOST_TIMES, help="Rounds to measure, after one warm-up round.")] = 5,
    threads: Threads = 0,
    mib: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=_MOST_MIB,
            help="MiB of float32 that movers and codecs move.",
            show_default="64",
        ),
    ] = None,
) -> None:
    """Measure speed against other implementations in the same run.

    movers: ops that move 64 MiB (--mib), against ggml's CPU and memcpy.
    codecs: q8_0 and q4_0 of as much, against ggml's own functions, gguf-py and memcpy.
    calls: graphs of one small node, against ggml's CPU.
    splits: what a split costs on a device in Python whose program does nothing.
    decode: a model with the movers on the NPU, and with every node, against the CPU alone; memory.
    operators: nodes that run as one operator, against the same on ggml's CPU.
    ops: convolutions, images, rows and training, against ggml's CPU.
    diff: of a model, against a run of it.
    start: fresh processes that import and register, and a whole diff.
    best: llama.cpp's own benchmarks, compiled for this processor, without and with the plugin.
    depth: the same after up to 16,384 tokens, and with caches of other types; all leaves out both.
    """
    from ggml_backend_npu.default import only_backend
    from graph_runner.bench import WITH_BANDWIDTH, Measurement, bench, bench_json, check_plot, draw, print_bench

    of_all = [name for name in Benchmark if name not in (Benchmark.ALL, *_BUILD_LLAMA_CPP)]
    names = [name.value for name in (of_all if what == Benchmark.ALL else [what])]
    if plot_file is not None:
        if not set(names) & set(WITH_BANDWIDTH):
            raise BadInputError(
                f"--plot {plot_file!r}: {what} has no bandwidth to draw; {' and '.join(WITH_BANDWIDTH)} do"
            )
        check_plot(plot_file)
    only_backend()
    console = stderr()
    with Progress(
        TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False,  # no thread beside
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("measuring")

        def seen(name: str, found: Measurement) -> None:
            progress.update(task, description=f"{name}: {found.what}", refresh=True)

        result = bench(names, model=model, rounds=rounds, threads=threads, mib=mib, seen=seen)
    outputs: list[Callable[[], None]] = [lambda: print_bench(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(bench_json(result))))
    if plot_file is not None:
        outputs.append(lambda: save("--plot", plot_file, draw(result, plot_file)))
    raise typer.Exit(delivered(True, *outputs))
