"""The command capture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graph_runner.cli.common import stderr, use_device
from graph_runner.cli.options import WRITES, DeviceFile, Model, NodesContextOptions, OpOptions, PromptOptions, Steps

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE.gguf", help="Trace file to write.", show_default=False), WRITES
]
NODES_HELP = (
    "Nodes to save, separated by commas: an op (GET_ROWS), a node's name (ffn_out-*; * and ? are wildcards), indices "
    "within a step (17, 17-40). A step's number in front limits an item to that step (2:GET_ROWS). Default: every node "
    "that the NPU has a kernel for, as a diff compares them, also those that it takes only with --all."
)


def capture(
    model: Model,
    output: Output,
    *,
    prompt: PromptOptions,
    steps: Steps = 1,
    nodes: Annotated[str | None, typer.Option(metavar="ITEM,ITEM,...", help=NODES_HELP)] = None,
    context: NodesContextOptions,
    device_file: DeviceFile = None,
    npu: OpOptions,
) -> None:
    """Save nodes of a run in a file: the inputs of each, and the result of ggml's CPU.

    `ggml-npu replay` computes the file (a GGUF) again without the model. The file also holds the device's options for
    the replay.
    """
    from graph_runner.base.models import model_file
    from graph_runner.reports.report import print_captured
    from graph_runner.trace import CaptureOptions, Selection, capture, check_output, taken_by_the_npu

    text = prompt.text
    use_device(npu)
    check_output(output)
    select = taken_by_the_npu if nodes is None else Selection(nodes)
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        captured = capture(file, text, output, CaptureOptions(steps=steps, settings=context.settings(), select=select))
    print_captured(captured, str(output), console)
