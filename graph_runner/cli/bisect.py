"""The command bisect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import refuse_without_the_npu, stderr, stdout
from graph_runner.cli.diff import OURS
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
    Steps,
    finite,
)
from graph_runner.cli.outputs import delivered, json_text, write

if TYPE_CHECKING:
    from graph_runner.bisect.result import Trial


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
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device to run on: npu, or any that ggml has, by its name.")
    ] = "npu",
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
            help="NMSE of the logits beyond which a run is wrong. Default: what flash attention, on or off, changes on "
            "the CPU.",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, max=MOST_TIMES, help="Runs of all nodes on the device, to see how many are wrong.")
    ] = 3,
    run_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=1e6, callback=finite, help="Time limit of a run.")
    ] = 600.0,
) -> None:
    """Find the nodes with which a whole run is wrong, without looking at any.

    Runs the model whole, with all nodes on the device, then with some of them: the others run on the CPU. Compares the
    logits at the end with those of the CPU alone. For faults that vanish when nodes are run one by one.
    Exit code 0: the run is right; 1: it is wrong; 2: bad input; 3: an internal error.
    """
    if device.lower() == "cpu":
        raise BadInputError(f"--device {device!r}: the CPU is what runs are compared with")
    if device.lower() != "npu":
        refuse_without_the_npu(device, npu, kernels=kernels, takes_layers=True)
    from graph_runner.base.models import model_file
    from graph_runner.bisect.running import BisectOptions
    from graph_runner.process.bisecting import BisectJob, run_bisect
    from graph_runner.process.jobs import NpuOptions
    from graph_runner.reports.bisect import bisect_json, print_bisection
    from graph_runner.run.devices import Devices

    options = BisectOptions(
        device.upper() if device.lower() in OURS else device, Devices(tuple(libraries or ()), tuple(servers or ())),
        steps, context.settings(gpu_layers=npu.layers), limit, repeat,
    )  # fmt: skip
    with model_file(model) as file, _running() as seen:
        job = BisectJob(NpuOptions(npu.chosen, tuple(kernels or ())), file, prompt.text, options)
        result = run_bisect(job, timeout=run_timeout, seen=seen)
    outputs: list[Callable[[], None]] = [lambda: print_bisection(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(bisect_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))


@contextmanager
def _running() -> Iterator[Callable[[Trial], None]]:
    """Yields what is called with each run, and says on a terminal how many there were."""
    n = 0
    with stderr().status("running the model") as status:

        def seen(trial: Trial) -> None:
            nonlocal n
            n += 1
            status.update(f"{n} runs")

        yield seen
