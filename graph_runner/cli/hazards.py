"""The command hazards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.cli.common import gpu_layers, refuse_without_the_npu, stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import (
    MODEL_HELP,
    READS,
    WRITES,
    BackendLibraries,
    DeviceFile,
    JsonFile,
    Kernels,
    NodesContextOptions,
    OpOptions,
    PromptOptions,
    RpcServers,
    Steps,
)
from graph_runner.cli.outputs import delivered, json_text, write

if TYPE_CHECKING:
    from graph_runner.hazards.graph import Graph
    from graph_runner.hazards.watching import HazardOptions

_SAVED = ".json"  # how the name of a file of graphs ends
ModelOrGraphs = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or graphs of --graphs: FILE{_SAVED}.", show_default=False),
    READS,
]
GraphsFile = Annotated[
    str | None,
    typer.Option(
        "--graphs", metavar=f"FILE{_SAVED}|-", help="Also write the graphs: nodes, order, addresses, strides."
    ),
    WRITES,
]


def hazards(
    model: ModelOrGraphs,
    *,
    prompt: PromptOptions,
    steps: Steps = 1,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    graphs_file: GraphsFile = None,
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
    from graph_runner.hazards.check import check
    from graph_runner.hazards.files import graphs_json, read_graphs
    from graph_runner.hazards.watching import CPU, NPU, HazardOptions
    from graph_runner.reports.hazards import hazards_json, print_hazards
    from graph_runner.run.devices import Devices

    text, is_npu = prompt.text, device.upper() == NPU
    if is_npu:
        use_device(npu)
        use_kernels(kernels)
    else:
        refuse_without_the_npu(device, npu, kernels=kernels, takes_layers=device.upper() != CPU)
    layers = gpu_layers(npu) if is_npu else npu.layers
    device = device.upper() if device.upper() in (CPU, NPU) else device
    devices = Devices(tuple(libraries or ()), tuple(servers or ()))
    if model.endswith(_SAVED):
        graphs, where = read_graphs(Path(model)), f"of {model}"
    else:
        options = HazardOptions(device, devices, steps, context.settings(gpu_layers=layers))
        graphs, where = _watched(model, text, options), f"on {device}"
    reports = [check(graph) for graph in graphs]
    outputs: list[Callable[[], None]] = [lambda: print_hazards(reports, where, stdout(json_file, graphs_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(hazards_json(reports, where))))
    if graphs_file is not None:
        outputs.append(lambda: write("--graphs", graphs_file, json_text(graphs_json(graphs))))
    raise typer.Exit(delivered(all(reports), *outputs))


def _watched(model: str, text: str, options: HazardOptions) -> list[Graph]:
    from graph_runner.base.models import model_file
    from graph_runner.hazards.watching import watched

    with model_file(model) as file, stderr().status("running the model"):
        return watched(file, text, options)
