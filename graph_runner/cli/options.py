"""Options and arguments that commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graph_runner.errors import BadInputError
from graph_runner.limits import MOST_CELLS, MOST_THREADS

# beside typer's part of an Annotated: it names a file that is read, one that is written, a folder that traces go to
READS, WRITES, KEEPS_TRACES = "reads", "writes", "keeps traces"
PROMPT = "The capital of France is"


class Device(StrEnum):
    NPU = "npu"
    CPU = "cpu"


class FlashAttention(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


MODEL_HELP = (
    "A GGUF file, or [bold]demo[/] (SmolLM2-135M-Instruct, from the extra 'demo'), or [bold]tiny[/] "
    "(a small random llama made on the spot)."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False), READS]


def utf8(prompt: str) -> str:
    """The prompt, where it can be given to a tokenizer."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"--prompt {prompt!a}: is no UTF-8") from None
    return prompt


Prompt = Annotated[str, typer.Option("-p", "--prompt", callback=utf8, help="Text that the model goes on from.")]
PromptFile = Annotated[
    Path | None, typer.Option("-f", "--file", metavar="FILE", help="A file with that text, in place of it."), READS
]
Context = Annotated[
    int,
    typer.Option("-c", "--ctx-size", min=0, max=MOST_CELLS, help="Cells of the context; 0 = what it needs."),
]
CacheTypeK = Annotated[str, typer.Option(metavar="TYPE", help="ggml type of the K cache: f16, f32, q8_0, q4_0, ...")]
CacheTypeV = Annotated[
    str, typer.Option(metavar="TYPE", help="ggml type of the V cache; a quantised one needs --flash-attn on.")
]
Kernels = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.py",
        help="Your own kernels: a file that registers or replaces ops with @op(...), and is run. More than one file: "
        "give it again (GGML_NPU_KERNELS).",
        show_default=False,
    ),
    READS,
]
Threads = Annotated[
    int,
    typer.Option(
        min=0, max=MOST_THREADS, help="Threads of llama.cpp's CPU and of the kernels; 0 = all cores. At most 4 a core."
    ),
]

ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="Device generation, a name or your own (GGML_NPU_PROFILE).",
        show_default=False,
    ),
    READS,
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the result as JSON too; - is stdout, and then that alone."),
    WRITES,
]
HtmlFile = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE|-", help="Write the result as a page for a browser too: one file."),
    WRITES,
]
ExplorerFile = Annotated[
    str | None,
    typer.Option("--model-explorer", metavar="FILE|-", help="Write errors as node data for Model Explorer too."),
    WRITES,
]
DeviceMemory = Annotated[
    str | None,
    typer.Option("--memory", metavar="host|device", help="Where tensors lie (GGML_NPU_MEMORY).", show_default=False),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Of the device's own memory: 512M, 2G (GGML_NPU_MEMORY_LIMIT)."),
]
DeviceType = Annotated[
    str | None,
    typer.Option(
        metavar="accel|gpu",
        help="What ggml takes the device for (GGML_NPU_DEVICE_TYPE). With --all and --memory device: gpu.",
    ),
]


AllOps = Annotated[
    bool,
    typer.Option(
        "--all", help="The NPU takes every op it has, not only SCALE and those that move data (GGML_NPU_OPS=all)."
    ),
]
Fuse = Annotated[bool, typer.Option(help="Run patterns of nodes as one operator (GGML_NPU_FUSION).")]
Matmul = Annotated[
    str | None,
    typer.Option(
        metavar="exact|fast",
        help="Matrices multiplied in ggml's own steps, or by BLAS where columns are many (GGML_NPU_MATMUL). Left out: "
        "exact where nodes are compared, else fast.",
        show_default=False,
    ),
]
ToleranceFile = Annotated[
    str | None,
    typer.Option(
        "--tolerances",
        metavar="FILE.toml|gpu",
        help="Bounds of rounding, by op and type, over the own ones; gpu: for devices that compute in half floats.",
    ),
    READS,
]
NodeTimeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, help="A node that takes longer has failed.", show_default=True)
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process", help="Compute in this process, for a debugger: a kernel that ends it then names no node."
    ),
]
