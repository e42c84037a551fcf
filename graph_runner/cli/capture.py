"""The command capture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graph_runner.cli.common import op_options, prompt_text, stderr, type_for_all, use_device
from graph_runner.cli.options import (
    PROMPT,
    WRITES,
    AllOps,
    CacheTypeK,
    CacheTypeV,
    DeviceMemory,
    DeviceType,
    FlashAttention,
    Fuse,
    Matmul,
    MemoryLimit,
    Model,
    ProfileName,
    Prompt,
    PromptFile,
    Threads,
)

Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE.gguf", help="Trace file to write.", show_default=False), WRITES
]
NODES_HELP = (
    "Nodes to save, separated by commas: an op (GET_ROWS), a node's name (ffn_out-*; * and ? are wildcards), indices "
    "within a step (17, 17-40). A step's number in front limits an item to that step (2:GET_ROWS). Default: every node "
    "that the NPU takes."
)


def capture(
    model: Model,
    output: Output,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    steps: Annotated[int, typer.Option("-n", "--steps", min=0, help="Tokens to decode after the prompt.")] = 1,
    nodes: Annotated[str | None, typer.Option(metavar="ITEM,ITEM,...", help=NODES_HELP)] = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.OFF,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
    fusion: Fuse = True,
    matmul: Matmul = None,
    threads: Threads = 0,
) -> None:
    """Save nodes of a run in a file: the inputs of each, and the result of ggml's CPU.

    `ggml-npu replay` computes the file (a GGUF) again without the model. The file also holds the device's options for
    the replay.
    """
    from graph_runner.models import model_file
    from graph_runner.report import print_captured
    from graph_runner.session import Settings
    from graph_runner.trace import Selection, capture, check_output, taken_by_the_npu

    prompt = prompt_text(prompt, prompt_file)
    use_device(
        profile=profile,
        memory=memory,
        memory_limit=memory_limit,
        device_type=type_for_all(device_type, memory, all_ops),
        matmul=matmul,
        **op_options(all_ops, fusion),
    )
    check_output(output)
    select = taken_by_the_npu if nodes is None else Selection(nodes)
    settings = Settings(
        cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=flash_attn.value, threads=threads
    )
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        captured = capture(file, prompt, output, steps=steps, settings=settings, select=select)
    print_captured(captured, str(output), console)
