"""The command hazards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from graph_runner.base.limits import MOST_CELLS
from graph_runner.cli.common import gpu_layers, refuse_without_the_npu, stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import (
    BackendLibraries,
    DeviceFile,
    JsonFile,
    Kernels,
    Model,
    NodesContextOptions,
    OpOptions,
    PromptOptions,
    RpcServers,
)
from graph_runner.cli.outputs import delivered, json_text, write


def hazards(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Annotated[
        int, typer.Option("-n", "--steps", min=0, max=MOST_CELLS, help="Tokens to decode after the prompt.")
    ] = 1,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: OpOptions,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device to run on: npu, cpu, or any that ggml has, by its name.")
    ] = "npu",
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
) -> None:
    """Find reads of memory that another node wrote over, or has not written yet.

    Reads the graphs as they run on the device: order, addresses, strides, copies between devices, operators. What a
    node should read follows from the graph as llama.cpp built it. Values do not matter, and nothing is compared.
    Exit code 0: no hazard; 1: hazards; 2: bad input; 3: an internal error.
    """
    from graph_runner.base.models import model_file
    from graph_runner.hazards.watching import CPU, NPU, HazardOptions, find
    from graph_runner.reports.hazards import hazards_json, print_hazards
    from graph_runner.run.devices import Devices

    text = prompt.text
    if device.upper() == NPU:
        use_device(npu)
        use_kernels(kernels)
    else:
        refuse_without_the_npu(device, npu, kernels=kernels, takes_layers=device.upper() != CPU)
    device = device.upper() if device.upper() in (CPU, NPU) else device
    layers = gpu_layers(npu) if device == NPU else npu.layers
    options = HazardOptions(
        device, Devices(tuple(libraries or ()), tuple(servers or ())), steps, context.settings(gpu_layers=layers)
    )
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        reports = find(file, text, options)
    outputs: list[Callable[[], None]] = [lambda: print_hazards(reports, device, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(hazards_json(reports, device))))
    raise typer.Exit(delivered(all(reports), *outputs))
