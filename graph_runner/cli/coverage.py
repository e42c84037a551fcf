"""The command coverage."""

from __future__ import annotations

from graph_runner.cli.common import gpu_layers, stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import ContextOptions, DeviceFile, JsonFile, Kernels, Model, OpOptions, PromptOptions
from graph_runner.cli.outputs import json_text, write


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
    from graph_runner.coverage import cover
    from graph_runner.models import model_file
    from graph_runner.report import coverage_json, print_coverage

    text = prompt.text
    use_device(npu)
    use_kernels(kernels)
    settings = context.settings(gpu_layers=gpu_layers(npu))
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        found = cover(file, text, settings=settings)
    if json_file is not None:
        write("--json", json_file, json_text(coverage_json(found)))
    print_coverage(found, stdout())
