"""The command run."""

from __future__ import annotations

import codecs
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.base.console import printable
from graph_runner.base.limits import MOST_CELLS
from graph_runner.base.settings import context_for
from graph_runner.cli.common import (
    gpu_layers,
    loading,
    reading,
    refuse_without_the_npu,
    stderr,
    use_device,
    use_kernels,
    warn,
)
from graph_runner.cli.options import (
    Context,
    ContextOptions,
    Device,
    DeviceFile,
    Kernels,
    Model,
    OpOptions,
    PromptOptions,
    finite,
)

if TYPE_CHECKING:
    from graph_runner.run.session import Session


def run(
    model: Model,
    *,
    prompt: PromptOptions,
    n_ctx: Context = 0,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=1, max=MOST_CELLS, help="Tokens to generate.")] = 64,
    device: Annotated[
        Device, typer.Option(case_sensitive=False, help="Device for the nodes that the NPU supports.")
    ] = Device.NPU,
    context: ContextOptions,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=finite, help="Sampling temperature; 0 = always the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Probability mass to sample from, if the temperature is above 0."
        ),
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 64) - 1, help="Random seed of the sampling.")] = 0,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: OpOptions,
    llama_graph: Annotated[
        bool,
        typer.Option(
            help="Get each token's graph from llama.cpp. Without: get it once, run it for each token (implies --all)."
        ),
    ] = True,
) -> None:
    """Generate text. The text goes to stdout; a table of what ran on which device goes to stderr."""
    from graph_runner.base.models import model_file
    from graph_runner.reports.report import print_run
    from graph_runner.run.session import Sampler, Session, generate
    from graph_runner.run.token_graph import GraphRunner

    if device is Device.CPU:
        refuse_without_the_npu(device, npu, kernels=kernels, no_llama_graph=not llama_graph)
    text = prompt.text
    use_device(npu if llama_graph else replace(npu, all_ops=True))
    use_kernels(kernels)
    settings = context.settings(
        device=device.value, n_ctx=n_ctx or context_for(text, n), gpu_layers=gpu_layers(npu), text=True
    )
    console = stderr()
    with (
        model_file(model) as file,
        loading(console) as progress,
        Session(file, settings, progress=progress) as session,
    ):
        tokens = session.tokenize(text)
        if len(tokens) + n > session.trained_for:
            warn(f"{len(tokens)} + {n} tokens are more than the {session.trained_for} that the model was trained for")
        runner = None if llama_graph else GraphRunner(session)
        with reading(console, len(tokens)) as seen:
            sampler = Sampler(temperature, top_p, seed)
            times = _write_text(session, generate(runner or session, tokens, n, sampler, seen))
        print_run(session, runner, len(tokens), times, console)


def _write_text(session: Session, tokens: Iterable[int]) -> list[float]:
    """Writes the text of tokens to stdout, each as it comes. Returns the time of the start and of each token, in
    seconds."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = printable if sys.stdout.isatty() else str
    times = [time.perf_counter()]
    for token in tokens:
        times.append(time.perf_counter())
        sys.stdout.write(shown(decoder.decode(session.piece(token))))
        sys.stdout.flush()
    sys.stdout.write(shown(decoder.decode(b"", True)) + "\n")
    sys.stdout.flush()
    return times
