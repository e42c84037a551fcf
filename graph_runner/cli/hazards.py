"""The command hazards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.cli.common import stderr, stdout
from graph_runner.cli.options import (
    MODEL_HELP,
    READS,
    WRITES,
    JsonFile,
    NodesContextOptions,
    PromptOptions,
    Steps,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.cli.runs_on import RunsOn

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
    on: RunsOn,
) -> None:
    """Find reads of memory that another node wrote over, or has not written yet.

    Reads the graphs as they run on the device: order, addresses, strides, copies between devices, operators. What a
    node should read follows from the graph as llama.cpp built it. Values do not matter, and nothing is compared.
    Exit code 0: no hazard; 1: hazards; 2: bad input; 3: an internal error.
    """
    from graph_runner.hazards.check import check
    from graph_runner.hazards.files import graphs_json, read_graphs
    from graph_runner.hazards.watching import HazardOptions
    from graph_runner.reports.hazards import hazards_json, print_hazards

    text, layers, device = prompt.text, on.use(), on.named()
    if model.endswith(_SAVED):
        graphs, where = read_graphs(Path(model)), f"of {model}"
    else:
        options = HazardOptions(device, on.devices, steps, context.settings(gpu_layers=layers))
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
