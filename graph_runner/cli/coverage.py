"""The command coverage."""

from __future__ import annotations

from collections.abc import Callable

import typer

from graph_runner.cli.common import gpu_layers, stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import ContextOptions, DeviceFile, JsonFile, Kernels, Model, OpOptions, PromptOptions
from graph_runner.cli.outputs import delivered, json_text, write


def coverage(
    model: Model,
    *,
    prompt: PromptOptions,
    context: ContextOptions,
    json_file: JsonFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: OpOptions,
) -> None:
    """Show which nodes of a model the NPU computes, why not the others, and which kernels to write next.

    Runs the prompt and one token with the NPU; counts graph splits and copied bytes, and works out which ops would
    remove the most splits.
    """
    from graph_runner.base.models import model_file
    from graph_runner.reports.report import coverage_json, print_coverage
    from graph_runner.tools.coverage import cover

    text = prompt.text
    use_device(npu)
    use_kernels(kernels)
    settings = context.settings(gpu_layers=gpu_layers(npu))
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        found = cover(file, text, settings=settings)
    outputs: list[Callable[[], None]] = [lambda: print_coverage(found, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(coverage_json(found))))
    raise typer.Exit(delivered(True, *outputs))
