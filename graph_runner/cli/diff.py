"""The command diff."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from graph_runner.base.console import Console
from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import refuse_without_the_npu, stderr, stdout
from graph_runner.cli.options import (
    KEEPS_TRACES,
    BackendLibraries,
    DeviceFile,
    ExplorerFile,
    HtmlFile,
    InProcess,
    JsonFile,
    Kernels,
    Model,
    NodesContextOptions,
    NodeTimeout,
    OpOptions,
    PromptOptions,
    RpcServers,
    SettingsOfSides,
    Steps,
    ToleranceFile,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.process.child import begun
from graph_runner.process.start import DIFF
from quant.folders import FolderError, cache_root

if TYPE_CHECKING:
    from graph_runner.diff.result import DiffResult
    from graph_runner.judging.results import NodeResult

_NODES_PER_UPDATE = 64
OURS = ("cpu", "npu")  # names of devices that may be written in any case
Ops = Annotated[str | None, typer.Option(metavar="OP,OP,...", help="Compare only these ops, e.g. GET_ROWS,CPY.")]
Reference = Annotated[
    str, typer.Option(metavar="DEVICE", help="Reference device, taken as right: cpu; npu: this project's kernels.")
]
DeviceName = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        help="Device to compare with the reference: npu, cpu, or any that ggml has, by its name; A,B share the layers.",
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_TIMES,
        help="Number of runs on the device; a node whose result changes between runs is wrong.",
    ),
]
Reproducers = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Save wrong nodes as traces in this folder, for ggml-npu replay. Default: the user's cache directory.",
    ),
    KEEPS_TRACES,
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Check every buffer after every node of the device's own run. This happens automatically if that run "
        "is wrong but no node is.",
    ),
]
StrictCoverage = Annotated[
    bool,
    typer.Option(
        "--strict-coverage",
        help="The run is not judged if no node could have shown that a parameter is ignored: exit code 1.",
    ),
]
Replace = Annotated[
    list[str] | None,
    typer.Option(
        "--replace",
        metavar="ITEM,ITEM,...",
        help="Run the model whole once more with these nodes on the CPU, which tells whether they make its end wrong: "
        "an op (MUL_MAT), a node's name (ffn_out-*), places within a step (17, 17-40), layers (layer3, layers3-5). "
        "Repeat the option for more runs. If several nodes are wrong, the first is tried by itself.",
        show_default=False,
    ),
]
See = Annotated[
    bool,
    typer.Option(
        "--see",
        help="Also compare small synthetic nodes that show parameters which no node of the run could have shown to be "
        "ignored.",
    ),
]
CanarySeed = Annotated[
    int | None,
    typer.Option(
        "--canary",
        metavar="SEED",
        min=0,
        max=(1 << 64) - 1,
        help="Seed of the faults that are planted into copies of results, to see whether the diff finds them. "
        "Default: drawn; the report prints it.",
    ),
]


def diff(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Steps = 4,
    ops: Ops = None,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    explorer_file: ExplorerFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: OpOptions,
    reproducers: Reproducers = None,
    reference: Reference = "cpu",
    device: DeviceName = "npu",
    settings: SettingsOfSides,
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
    tolerances: ToleranceFile = None,
    strict: Strict = False,
    strict_coverage: StrictCoverage = False,
    see: See = False,
    repeat: Repeat = 1,
    replaces: Replace = None,
    canary: CanarySeed = None,
    node_timeout: NodeTimeout = 60.0,
    in_process: InProcess = False,
) -> None:
    """Compare each node of a model on two devices.

    Runs the prompt and a few decoding steps on both, node by node. A node is judged from equal inputs: the device
    computes it from what the reference read, and the reference from what the device's own run read, if that differs.
    Exit code 0: right; 1: a node or the device's run is wrong, or was not judged; 2: bad input; 3: an internal error,
    or the diff does not see a fault that it has planted itself.
    """
    if "npu" not in (reference.lower(), device.lower()):
        refuse_without_the_npu(device, npu, kernels=kernels, takes_layers=device.lower() != "cpu")
    reference, device = (name.upper() if name.lower() in OURS else name for name in (reference, device))
    variants = settings.of(reference, device)
    text = prompt.text
    if reproducers is not None and not reproducers.is_dir():
        raise BadInputError(f"--reproducers {str(reproducers)!r}: no such directory")
    build = variants.reference.build
    with nullcontext() if build is None else build.used(), nullcontext() if in_process else begun(DIFF) as child:
        from graph_runner.base.models import model_file
        from graph_runner.diff.run import DiffOptions
        from graph_runner.process.jobs import DiffJob, NpuOptions, run_diff
        from graph_runner.process.replacing import may_be_replaced, with_replaced
        from graph_runner.process.retried import retried
        from graph_runner.run.devices import Devices

        options = DiffOptions(
            steps=steps, settings=context.settings(gpu_layers=npu.layers), reference=reference, device=device,
            variants=variants, devices=Devices(tuple(libraries or ()), tuple(servers or ())), strict=strict,
            repeat=repeat, reproducers=reproducers or _folder(model), canary=canary, strict_coverage=strict_coverage,
            see=see,
        )  # fmt: skip
        if replaces and not may_be_replaced(options):
            why = "needs --reference cpu, another device, and no settings of one side"
            raise BadInputError(f"--replace {replaces[0]!r}: {why}")
        own = variants.device
        chosen = NpuOptions(npu.chosen | own.options, (*(kernels or ()), *own.kernels))
        with _comparing(stderr(), steps) as seen, model_file(model) as file:
            job = DiffJob(chosen, file, text, options, ops, tolerances)
            if child is None:
                result = job(lambda _: None)
            else:
                result = retried(run_diff(child, job, node_timeout=node_timeout, seen=seen), job, node_timeout)
            if replaces or child is not None:
                result = with_replaced(result, job, replaces or ())
    raise typer.Exit(_delivered(result, json_file, html_file, explorer_file))


@contextmanager
def _comparing(console: Console, steps: int) -> Iterator[Callable[[NodeResult], None]]:
    """Yields the update of a progress bar for compared nodes, shown on a terminal only."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[nodes]}"),
        console=console, transient=True, disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("loading", total=None, nodes="")
        numbers = count(1)

        def seen(node: NodeResult) -> None:
            n = next(numbers)
            if n % _NODES_PER_UPDATE == 0:
                progress.update(task, description="steps", total=steps + 1, completed=node.step, nodes=f"{n:,} nodes")

        yield seen


def _delivered(result: DiffResult, json_file: str | None, html_file: str | None, explorer_file: str | None) -> int:
    """Prints the report and writes the requested files. Returns the exit code."""
    from graph_runner.reports.diff_report import diff_json, print_diff
    from graph_runner.reports.explorer import explorer_json
    from graph_runner.reports.html import diff_html

    files = (json_file, html_file, explorer_file)
    outputs: list[Callable[[], None]] = [lambda: print_diff(result, stdout(*files))]
    data = diff_json(result) if any(files) else {}
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(data)))
    if html_file is not None:
        outputs.append(lambda: write("--html", html_file, diff_html(data)))
    if explorer_file is not None:
        outputs.append(lambda: write("--model-explorer", explorer_file, json_text(explorer_json(data))))
    return delivered(bool(result), *outputs)


def _folder(model: str) -> Path | None:
    """Returns the folder for wrong nodes of a model, in the user's cache directory; None for a user without one. Two
    models of one name have two folders."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(model).stem).lstrip(".")[:64]
    if model not in ("demo", "tiny"):
        name += f"-{sha256(os.fsencode(Path(model).resolve())).hexdigest()[:12]}"
    try:
        return cache_root() / "reproducers" / name
    except FolderError:
        return None
