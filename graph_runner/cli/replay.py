"""The command replay."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_TIMES
from graph_runner.cli.common import refuse_without_the_npu, stderr, stdout
from graph_runner.cli.options import (
    READS,
    BackendLibraries,
    ComputeOptions,
    Device,
    DeviceFile,
    InProcess,
    JsonFile,
    Kernels,
    NodeTimeout,
    RpcServers,
    ToleranceFile,
)
from graph_runner.cli.outputs import delivered, json_text, write
from graph_runner.process.child import begun
from graph_runner.process.start import REPLAY


def replay(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE.gguf", help="A trace written by `ggml-npu capture`.", show_default=False),
        READS,
    ],
    *,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="npu, cpu, or another ggml device. Default: cpu if the trace holds the NPU's results, else npu.",
            show_default=False,
        ),
    ] = None,
    libraries: BackendLibraries = None,
    servers: RpcServers = None,
    json_file: JsonFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    npu: ComputeOptions,
    tolerances: ToleranceFile = None,
    repeat: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_TIMES,
            help="Compute each node this many times, with other values at the same addresses in between. This shows "
            "whether a kernel reuses data of an earlier call.",
        ),
    ] = 1,
    node_timeout: NodeTimeout = 60.0,
    in_process: InProcess = False,
) -> None:
    """Compute the nodes of a trace again and compare.

    The device has the options it had when the trace was written, unless an option here changes them. On the NPU this
    needs neither the model nor llama.cpp. Exit code 0: right; 1: a node is wrong, or the device takes none; 2: bad
    input; 3: an internal error.
    """
    if device is not None and device.lower() != Device.NPU:
        refuse_without_the_npu(device, npu, kernels=kernels, device_file=device_file)
    with nullcontext() if in_process else begun(REPLAY) as child:
        from graph_runner.process.jobs import NpuOptions, ReplayJob, run_replay

        chosen = NpuOptions(npu.chosen, tuple(kernels or ()))
        from graph_runner.run.devices import Devices

        devices = Devices(tuple(libraries or ()), tuple(servers or ())) if libraries or servers else None
        if devices is not None and device is None:
            raise BadInputError("--backend and --rpc: --device says which of their devices it is")
        job = ReplayJob(chosen, trace, tolerances, {"device": device, "repeat": repeat}, devices)
        console = stderr()
        with console.status("computing"):
            result = job(lambda _: None) if child is None else run_replay(child, job, node_timeout=node_timeout)
    from graph_runner.reports.replay import print_replay, replay_json

    outputs: list[Callable[[], None]] = [lambda: print_replay(result, stdout(json_file))]
    if json_file is not None:
        outputs.append(lambda: write("--json", json_file, json_text(replay_json(result))))
    raise typer.Exit(delivered(bool(result), *outputs))
