"""The command bisect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import refuse_without_the_npu, stderr, stdout
from graph_runner.cli.options import (
    WRITES,
    BackendLibraries,
    DeviceFile,
    JsonFile,
    Kernels,
    Model,
    NodesContextOptions,
    OpOptions,
    PromptOptions,
    RpcServers,
    Steps,
    finite,
)
from graph_runner.cli.outputs import delivered, json_text, write

RunDevice = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="Device to run on: npu, or any that ggml has, by its name.")
]
RunTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, max=1e6, callback=finite, help="Time limit of a run.")
]


def bisect(
    model: Model,
    *,
    prompt: PromptOptions,
    steps: Steps = 4,
    context: NodesContextOptions,
    json_file: JsonFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: OpOptions,
    device: RunDevice = "npu",
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
    limit: Annotated[
        float | None,
        typer.Option(
            "--nmse",
            metavar="LIMIT",
            min=0,
            max=1e9,
            callback=finite,
            help="NMSE at the end beyond which a run is wrong. Default: what flash attention, on or off, changes on "
            "the CPU.",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=MOST_TIMES, help="Runs of all nodes on the device, to see how many are wrong.")
    ] = 3,
    by_token: Annotated[
        bool, typer.Option("--text", help="A run is wrong if another token is the most likely, whatever the NMSE.")
    ] = False,
    ends: Annotated[
        bool, typer.Option("--ends", help="Only tell whether the end is wrong with all nodes on the device.")
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write each run into this file, and do not make those again that it has.",
            show_default=False,
        ),
        WRITES,
    ] = None,
    run_timeout: RunTimeout = 600.0,
) -> None:
    """Find the nodes with which a whole run is wrong, without looking at any.

    Runs the model whole, with all nodes on the device, then with some of them: the others run on the CPU. Compares the
    logits, or embeddings, at the end with those of the CPU alone. For faults that vanish when nodes are run one by one.
    --resume goes on where a bisection was stopped.
    Exit code 0: the run is right; 1: it is wrong; 2: bad input; 3: an internal error.
    """
    if by_token and limit is not None:
        raise BadInputError(f"--nmse {limit}: with --text, tokens say whether a run is wrong")
    name = device_named(device, npu, kernels)
    from graph_runner.base.models import model_file
    from graph_runner.bisect.kept import Kept
    from graph_runner.bisect.running import BisectOptions
    from graph_runner.process.bisecting import BisectJob, run_bisect
    from graph_runner.process.jobs import NpuOptions
    from graph_runner.reports.bisect import bisect_json, print_bisection
    from graph_runner.run.devices import Devices

    options = BisectOptions(
        name, Devices(tuple(libraries or ()), tuple(servers or ())), steps, context.settings(gpu_layers=npu.layers),
        limit, repeat, by_token, ends,
    )  # fmt: skip
    with model_file(model) as file, running() as seen:
        job = BisectJob(NpuOptions(npu.chosen, tuple(kernels or ())), file, prompt.text, options)
        kept = None if resume is None else Kept(resume, job.asked)
        result = run_bisect(job, timeout=run_timeout, seen=seen, kept=kept)
    outputs: list[Callable[[], None]] = [lambda: print_bisection(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(bisect_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))


def device_named(device: str, npu: OpOptions, kernels: list[Path] | None) -> str:
    """Returns the name of a device to run on. Raises BadInputError for the CPU, and for options of the NPU with another
    one."""
    if device.lower() == "cpu":
        raise BadInputError(f"--device {device!r}: the CPU is what runs are compared with")
    if device.lower() == "npu":
        return "NPU"
    refuse_without_the_npu(device, npu, kernels=kernels, takes_layers=True)
    return device


@contextmanager
def running(what: str = "runs") -> Iterator[Callable[[object], None]]:
    """Yields what is called with each run, or step, and says on a terminal how many there were."""
    n = 0
    with stderr().status("running the model") as status:

        def seen(_: object) -> None:
            nonlocal n
            n += 1
            status.update(f"{n} {what}")

        yield seen
