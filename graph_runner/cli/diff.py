"""The command diff."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from graph_runner.child import begun
from graph_runner.cli.common import (
    op_options,
    prompt_text,
    refuse_without_the_npu,
    stderr,
    stdout,
    type_for_all,
    warn,
)
from graph_runner.cli.options import (
    KEEPS_TRACES,
    PROMPT,
    AllOps,
    CacheTypeK,
    CacheTypeV,
    Device,
    DeviceFile,
    DeviceMemory,
    DeviceType,
    ExplorerFile,
    FlashAttention,
    Fuse,
    HtmlFile,
    InProcess,
    JsonFile,
    Kernels,
    Matmul,
    MemoryLimit,
    Model,
    NodeTimeout,
    ProfileName,
    Prompt,
    PromptFile,
    Threads,
    ToleranceFile,
)
from graph_runner.cli.outputs import json_text, write
from graph_runner.errors import BadInputError

_NODES_PER_UPDATE = 64


def diff(
    model: Model,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    steps: Annotated[int, typer.Option("-n", "--steps", min=0, help="Tokens to decode after the prompt.")] = 4,
    ops: Annotated[
        str | None, typer.Option(metavar="OP,OP,...", help="Compare only these ops, e.g. GET_ROWS,CPY.")
    ] = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    flash_attn: Annotated[
        FlashAttention,
        typer.Option(help="Flash attention; with off, a graph has CONT nodes and more kinds of SET_ROWS."),
    ] = FlashAttention.OFF,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    explorer_file: ExplorerFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
    fusion: Fuse = True,
    matmul: Matmul = None,
    reproducers: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Save wrong nodes as traces in this folder, for ggml-npu replay. Default: the user's cache directory.",
        ),
        KEEPS_TRACES,
    ] = None,
    reference: Annotated[
        Device,
        typer.Option(case_sensitive=False, help="Reference device, taken as right; npu: this project's kernels."),
    ] = Device.CPU,
    device: Annotated[
        Device, typer.Option(case_sensitive=False, help="Device to compare with the reference.")
    ] = Device.NPU,
    tolerances: ToleranceFile = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Check every buffer after every node of the device's own run. This happens automatically if that run "
            "is wrong but no node is.",
        ),
    ] = False,
    repeat: Annotated[
        int,
        typer.Option(min=1, help="Number of runs on the device; a node whose result changes between runs is wrong."),
    ] = 1,
    node_timeout: NodeTimeout = 60.0,
    in_process: InProcess = False,
    threads: Threads = 0,
) -> None:
    """Compare each node of a model on two devices.

    Runs the prompt and a few decoding steps on both, node by node. Each node is judged twice from equal inputs: the
    device computes it from what the reference read, and the reference computes it from what the device's own run read.
    Exit code 0: right; 1: a node or the device's run is wrong; 2: bad input; 3: an internal error.
    """
    if device is reference is Device.CPU:
        refuse_without_the_npu(
            device, all_ops=all_ops, kernels=kernels, memory=memory, memory_limit=memory_limit,
            device_type=device_type, profile=profile, matmul=matmul, no_fusion=not fusion,
        )  # fmt: skip
    prompt = prompt_text(prompt, prompt_file)
    if reproducers is not None and not reproducers.is_dir():
        raise BadInputError(f"--reproducers {str(reproducers)!r}: no such directory")
    with nullcontext() if in_process else begun("graph_runner.diff") as child:
        from graph_runner.jobs import DiffJob, NpuOptions, run_diff
        from graph_runner.models import model_file
        from graph_runner.results import NodeResult
        from graph_runner.session import Settings

        options = {
            "profile": profile, "memory": memory, "memory_limit": memory_limit, "matmul": matmul,
            "device_type": type_for_all(device_type, memory, all_ops), **op_options(all_ops, fusion),
        }  # fmt: skip
        settings = Settings(
            cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=flash_attn.value, threads=threads
        )
        arguments = {
            "steps": steps, "settings": settings, "reference": reference.value.upper(), "device": device.value.upper(),
            "strict": strict, "repeat": repeat, "reproducers": reproducers or _folder(model),
        }  # fmt: skip
        console = stderr()
        with Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[nodes]}"),
            console=console, transient=True, disable=not console.is_terminal,
        ) as progress:  # fmt: skip
            task = progress.add_task("loading", total=None, nodes="")
            compared = Counter[str]()

            def seen(node: NodeResult) -> None:
                compared["nodes"] += 1
                if compared["nodes"] % _NODES_PER_UPDATE == 0:
                    progress.update(
                        task,
                        description="steps",
                        total=steps + 1,
                        completed=node.step,
                        nodes=f"{compared['nodes']:,} nodes",
                    )

            with model_file(model) as file:
                chosen = NpuOptions(options, tuple(kernels or ()))
                job = DiffJob(chosen, file, prompt, ops, tolerances, arguments)
                if child is None:
                    result = job(lambda _: None)
                else:
                    result = run_diff(child, job, node_timeout=node_timeout, seen=seen)
    outputs = {"--json": json_file, "--html": html_file, "--model-explorer": explorer_file}
    from graph_runner.diff_report import diff_json, print_diff
    from graph_runner.explorer import explorer_json
    from graph_runner.html import diff_html

    data = diff_json(result) if any(outputs.values()) else {}
    if json_file is not None:
        write("--json", json_file, json_text(data))
    if html_file is not None:
        write("--html", html_file, diff_html(data))
    if explorer_file is not None:
        write("--model-explorer", explorer_file, json_text(explorer_json(data)))
    print_diff(result, stdout(*outputs.values()))
    raise typer.Exit(0 if result else 1)


def _folder(model: str) -> Path | None:
    """Where wrong nodes of a model are kept: in the user's cache directory, where that can be written."""
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("ggml-npu")) / "reproducers" / Path(model).stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warn(f"wrong nodes are not kept: {str(folder)!r}: {error.strerror}")
        return None
    return folder
