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
    Path, typer.Option("-o", "--output", metavar="FILE.gguf", help="The trace to write.", show_default=False), WRITES
]
NODES_HELP = (
    "Which nodes, with commas between them: an op (GET_ROWS), a node's name (ffn_out-*; * and ? stand for any text and "
    "character), places in a step (17, 17-40), each in one step alone with its number in front (2:GET_ROWS). Left out: "
    "what the NPU takes."
)


def capture(
    model: Model,
    output: Output,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    steps: Annotated[int, typer.Option("-n", "--steps", min=0, help="Tokens to decode behind the prompt.")] = 1,
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
    """Keep nodes of a run in a file: what each reads, and what ggml's CPU makes of it.

    The file (a GGUF) is computed again with `ggml-npu replay`, without the model. Options of the device are kept in it,
    for the replay.
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
