"""The command coverage."""

from __future__ import annotations

from typing import Annotated

import typer

from graph_runner.cli.common import (
    gpu_layers,
    op_options,
    prompt_text,
    stderr,
    stdout,
    type_for_all,
    use_device,
    use_kernels,
)
from graph_runner.cli.options import (
    PROMPT,
    AllOps,
    CacheTypeK,
    CacheTypeV,
    DeviceFile,
    DeviceMemory,
    DeviceType,
    FlashAttention,
    Fuse,
    JsonFile,
    Kernels,
    Matmul,
    MemoryLimit,
    Model,
    ProfileName,
    Prompt,
    PromptFile,
    Threads,
)
from graph_runner.cli.outputs import json_text, write


def coverage(
    model: Model,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.AUTO,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    json_file: JsonFile = None,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
    fusion: Fuse = True,
    matmul: Matmul = None,
    threads: Threads = 0,
) -> None:
    """Show which nodes of a model the NPU computes, why not the others, and which kernels to write next.

    Runs the prompt and one token with the NPU; counts graph splits and copied bytes, and works out which ops would
    remove the most splits.
    """
    from graph_runner.coverage import cover
    from graph_runner.models import model_file
    from graph_runner.report import coverage_json, print_coverage
    from graph_runner.session import Settings

    prompt = prompt_text(prompt, prompt_file)
    use_device(
        profile=profile,
        memory=memory,
        memory_limit=memory_limit,
        device_type=type_for_all(device_type, memory, all_ops),
        matmul=matmul,
        **op_options(all_ops, fusion),
    )
    use_kernels(kernels)
    settings = Settings(
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attn.value,
        threads=threads,
        gpu_layers=gpu_layers(),
    )
    console = stderr()
    with model_file(model) as file, console.status("running the model"):
        found = cover(file, prompt, settings=settings)
    if json_file is not None:
        write("--json", json_file, json_text(coverage_json(found)))
    print_coverage(found, stdout(json_file))
