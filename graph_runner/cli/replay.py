"""The command replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graph_runner.cli.common import stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import READS, JsonFile, Kernels, ProfileName
from graph_runner.cli.outputs import json_text, write


def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.gguf", help="What `capture` wrote.", show_default=False), READS
    ],
    device: Annotated[str, typer.Option(metavar="NAME", help="npu, cpu, or any other that ggml has.")] = "npu",
    json_file: JsonFile = None,
    kernels: Kernels = None,
    profile: ProfileName = None,
) -> None:
    """Compute the nodes of a trace again and compare, byte for byte.

    On the NPU this takes neither the model nor llama.cpp. Exit code 0: every byte as in the trace, or apart by rounding
    in an op that says so; 1: a node differs, or none was taken; 2: bad input.
    """
    from graph_runner.kernels import NPU
    from graph_runner.report import print_replay, replay_json
    from graph_runner.trace import replay

    use_device(profile=profile)
    use_kernels(kernels)
    if device.upper() != NPU:
        import ggml_backend_npu

        ggml_backend_npu.register()
    console = stderr()
    with console.status("computing"):
        result = replay(trace, device)
    if json_file is not None:
        write("--json", json_file, json_text(replay_json(result)))
    print_replay(result, stdout(json_file))
    raise typer.Exit(0 if result else 1)
