"""The command diff."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from graph_runner.cli.common import op_options, prompt_text, stderr, stdout, use_device, use_kernels
from graph_runner.cli.options import (
    KEEPS_TRACES,
    PROMPT,
    READS,
    AllOps,
    CacheTypeK,
    CacheTypeV,
    Device,
    ExplorerFile,
    FlashAttention,
    Fuse,
    HtmlFile,
    JsonFile,
    Kernels,
    Model,
    ProfileName,
    Prompt,
    PromptFile,
    Threads,
)
from graph_runner.cli.outputs import json_text, write
from graph_runner.errors import BadInputError

_NODES_PER_UPDATE = 64


def diff(
    model: Model,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    steps: Annotated[int, typer.Option("-n", "--steps", min=0, help="Tokens to decode behind the prompt.")] = 4,
    ops: Annotated[
        str | None, typer.Option(metavar="OP,OP,...", help="Compare these ops only, e.g. GET_ROWS,CPY.")
    ] = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    flash_attn: Annotated[
        FlashAttention,
        typer.Option(help="Flash attention; off, a graph has CONT nodes and more kinds of SET_ROWS."),
    ] = FlashAttention.OFF,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    explorer_file: ExplorerFile = None,
    kernels: Kernels = None,
    profile: ProfileName = None,
    all_ops: AllOps = False,
    fusion: Fuse = True,
    reproducers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Save the first wrong nodes as traces, for ggml-npu replay."),
        KEEPS_TRACES,
    ] = None,
    reference: Annotated[
        Device, typer.Option(case_sensitive=False, help="Who is right; npu: this project's kernels.")
    ] = Device.CPU,
    device: Annotated[Device, typer.Option(case_sensitive=False, help="Who is compared with it.")] = Device.NPU,
    tolerances: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", help="Bounds of rounding, by op and type, over the own ones."),
        READS,
    ] = None,
    threads: Threads = 0,
) -> None:
    """Compare each node of a model on two devices, byte for byte.

    Runs the prompt and a few decoding steps on both in step. Computes each supported node again on the device from the
    reference's own inputs, and each pattern of nodes that the NPU runs as one operator from the pattern's; and compares
    what comes out of the device's own run.
    Exit code 0: every byte equal, or apart by rounding in an op that has it; 1: a node is wrong; 2: bad input.
    """
    from graph_runner.diff import diff
    from graph_runner.explorer import explorer_json
    from graph_runner.html import diff_html
    from graph_runner.models import model_file
    from graph_runner.report import diff_json, print_diff
    from graph_runner.results import NodeResult
    from graph_runner.session import Settings
    from graph_runner.tolerances import Tolerances

    prompt = prompt_text(prompt, prompt_file)
    use_device(profile=profile, **op_options(all_ops, fusion))
    use_kernels(kernels)
    chosen = chosen_ops(ops)
    if reproducers is not None and not reproducers.is_dir():
        raise BadInputError(f"--reproducers {str(reproducers)!r}: no such directory")
    outputs = {"--json": json_file, "--html": html_file, "--model-explorer": explorer_file}
    settings = Settings(
        cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=flash_attn.value, threads=threads
    )
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
            result = diff(
                file,
                prompt,
                steps=steps,
                settings=settings,
                ops=chosen,
                reference=reference.value.upper(),
                device=device.value.upper(),
                tolerances=Tolerances(tolerances),
                reproducers=reproducers,
                seen=seen,
            )
    data = diff_json(result) if any(outputs.values()) else {}
    if json_file is not None:
        write("--json", json_file, json_text(data))
    if html_file is not None:
        write("--html", html_file, diff_html(data))
    if explorer_file is not None:
        write("--model-explorer", explorer_file, json_text(explorer_json(data)))
    print_diff(result, stdout(*outputs.values()))
    raise typer.Exit(0 if result else 1)


def chosen_ops(ops: str | None) -> set[str] | None:
    """Names of ops out of an option's text. Raises BadInputError for one that the backend has not."""
    if ops is None:
        return None
    from ggml_backend_npu import OPS
    from ggml_backend_npu.fusion import FUSIONS

    known = {name.upper(): name for name in (*OPS, *(fusion.name for fusion in FUSIONS))}
    chosen = {name.strip().upper() for name in ops.split(",") if name.strip()}
    unknown = sorted(chosen - set(known)) or ([ops] if not chosen else [])
    if unknown:
        raise BadInputError(f"unknown op {unknown[0]!r} in --ops; the backend has: {' '.join(sorted(known.values()))}")
    return {known[name] for name in chosen}
