"""The command run."""

from __future__ import annotations

import codecs
import sys
import time
from typing import Annotated

import typer

from graph_runner.cli.common import (
    gpu_layers,
    loading,
    op_options,
    prompt_text,
    reading,
    refuse_without_the_npu,
    stderr,
    type_for_all,
    use_device,
    use_kernels,
    warn,
)
from graph_runner.cli.options import (
    PROMPT,
    AllOps,
    CacheTypeK,
    CacheTypeV,
    Context,
    Device,
    DeviceFile,
    DeviceMemory,
    DeviceType,
    FlashAttention,
    Fuse,
    Kernels,
    Matmul,
    MemoryLimit,
    Model,
    ProfileName,
    Prompt,
    PromptFile,
    Threads,
)
from graph_runner.console import printable


def run(
    model: Model,
    prompt: Prompt = PROMPT,
    prompt_file: PromptFile = None,
    context: Context = 0,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Tokens to generate.")] = 64,
    device: Annotated[
        Device, typer.Option(case_sensitive=False, help="Device for the nodes that the NPU supports.")
    ] = Device.NPU,
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.AUTO,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 = always the most likely token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Probability mass to sample from, if the temperature is above 0.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sampling.")] = 0,
    kernels: Kernels = None,
    device_file: DeviceFile = None,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
    llama_graph: Annotated[
        bool,
        typer.Option(
            help="Get each token's graph from llama.cpp. Without: get it once, run it for each token (implies --all)."
        ),
    ] = True,
    fusion: Fuse = True,
    matmul: Matmul = None,
    threads: Threads = 0,
) -> None:
    """Generate text. The text goes to stdout; a table of what ran on which device goes to stderr."""
    from graph_runner.models import model_file
    from graph_runner.report import print_run
    from graph_runner.session import Sampler, Session, Settings, context_for, generate
    from graph_runner.token_graph import GraphRunner

    if device is Device.CPU:
        refuse_without_the_npu(
            device, all_ops=all_ops, kernels=kernels, memory=memory, memory_limit=memory_limit,
            device_type=device_type, profile=profile, matmul=matmul, no_llama_graph=not llama_graph,
            no_fusion=not fusion,
        )  # fmt: skip
    all_ops = all_ops or not llama_graph
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
        device=device.value,
        n_ctx=context or context_for(prompt, n),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attn.value,
        threads=threads,
        gpu_layers=gpu_layers(),
    )
    console = stderr()
    with (
        model_file(model) as file,
        loading(console) as progress,
        Session(file, settings, progress=progress) as session,
    ):
        tokens = session.tokenize(prompt)
        if len(tokens) + n > session.trained_for:
            warn(f"{len(tokens)} + {n} tokens are more than the {session.trained_for} that the model was trained for")
        runner = None if llama_graph else GraphRunner(session)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        shown = printable if sys.stdout.isatty() else str
        times = [time.perf_counter()]
        with reading(console, len(tokens)) as seen:
            for token in generate(runner or session, tokens, n, Sampler(temperature, top_p, seed), seen):
                times.append(time.perf_counter())
                sys.stdout.write(shown(decoder.decode(session.piece(token))))
                sys.stdout.flush()
        sys.stdout.write(shown(decoder.decode(b"", True)) + "\n")
        sys.stdout.flush()
        print_run(session, runner, len(tokens), times, console)
