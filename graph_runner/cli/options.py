"""Options and arguments that commands share, and groups of options that a command is given as one object.

A group is a dataclass: a command that has a parameter of that type has an option for each field (`command.as_command`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from graph_runner.base.errors import BadInputError
from graph_runner.base.limits import MOST_CELLS, MOST_DRAFTED, MOST_SEQUENCES, MOST_THREADS
from graph_runner.base.settings import ALL_LAYERS, CACHE_TYPES, Settings
from graph_runner.base.variants import Variants

# beside typer's part of an Annotated: it names a file that is read, one that is written, a folder that traces go to
READS, WRITES, KEEPS_TRACES = "reads", "writes", "keeps traces"
PROMPT = "The capital of France is"


class Device(StrEnum):
    """The devices of --device and --reference."""

    NPU = "npu"
    CPU = "cpu"


class FlashAttention(StrEnum):
    """The values of --flash-attn."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


MODEL_HELP = (
    "A GGUF file, or [bold]demo[/] (SmolLM2-135M-Instruct, from the extra 'demo'), or [bold]tiny[/] "
    "(a small random llama; needs no extra)."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False), READS]


def utf8(prompt: str) -> str:
    """Returns the prompt. Raises BadInputError if it cannot be encoded as UTF-8 for a tokenizer."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"--prompt {prompt!a}: is not UTF-8") from None
    return prompt


def cache_type(name: str) -> str:
    """Returns the name. Raises BadParameter if a cache cannot have a type of that name."""
    if name not in CACHE_TYPES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(map(repr, CACHE_TYPES))}")
    return name


def gpu_layers(text: str | None) -> str | None:
    """Returns the text. Raises BadParameter if it is no number of layers."""
    if text is not None and text not in ("all", "auto") and not re.fullmatch("[0-9]{1,9}", text):
        raise typer.BadParameter(f"{text!r} is not a number, 'all' or 'auto'")
    return text


def device_of_file(name: str | None) -> str | None:
    """Makes the device of a file the default backend, in this process and in those that it starts."""
    if name is not None:
        os.environ["GGML_NPU_DEVICE_FILE"] = name
    return name


def finite(number: float | None) -> float | None:
    """Returns the number. Raises BadParameter if it is NaN or infinite, which ranges let pass."""
    if number is not None and not isfinite(number):
        raise typer.BadParameter(f"{number} is not a finite number")
    return number


Prompt = Annotated[str, typer.Option("-p", "--prompt", callback=utf8, help="Text for the model to continue.")]
PromptFile = Annotated[
    Path | None, typer.Option("-f", "--file", metavar="FILE", help="Read the prompt from a file."), READS
]
Steps = Annotated[int, typer.Option("-n", "--steps", min=0, max=MOST_CELLS, help="Tokens to decode after the prompt.")]
Context = Annotated[
    int,
    typer.Option(
        "-c", "--ctx-size", min=0, max=MOST_CELLS, help="Context size in tokens; 0 = as many as the run needs."
    ),
]
CacheTypeK = Annotated[
    str,
    typer.Option(
        metavar="TYPE", callback=cache_type, help="ggml type of the K cache (-ctk): f16, f32, q8_0, q4_0, ..."
    ),
]
CacheTypeV = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        callback=cache_type,
        help="ggml type of the V cache (-ctv); a quantised one needs --flash-attn on.",
    ),
]
Kernels = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.py",
        help="Your own kernels: a Python file that registers or replaces ops with @op(...). It is run as code. Repeat "
        "the option for more files (GGML_NPU_KERNELS).",
        show_default=False,
    ),
    READS,
]
Threads = Annotated[
    int,
    typer.Option(
        min=0,
        max=MOST_THREADS,
        help="Threads (-t) of llama.cpp's CPU backend and of the kernels; 0 = one per processor that this process may "
        "use. At most 4 per processor.",
    ),
]

LoraFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.gguf",
        help="A LoRA adapter, whose nodes are part of the graph. Repeat the option for more files.",
        show_default=False,
    ),
    READS,
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="Device generation: full, ascend-910b, ascend-310p, ascend-required, or a file of your own "
        "(GGML_NPU_PROFILE).",
        show_default=False,
    ),
    READS,
]
JsonFile = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Also write the result as JSON; with - only the JSON goes to stdout."
    ),
    WRITES,
]
HtmlFile = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE|-", help="Also write the result as one HTML file."),
    WRITES,
]
ExplorerFile = Annotated[
    str | None,
    typer.Option(
        "--model-explorer", metavar="FILE|-", help="Also write the errors as node data for Google's Model Explorer."
    ),
    WRITES,
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="host|device",
        help="Where the device keeps tensors: ggml's buffers, or its own memory (GGML_NPU_MEMORY).",
        show_default=False,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Size of the device's own memory: 512M, 2G (GGML_NPU_MEMORY_LIMIT)."),
]
DeviceType = Annotated[
    str | None,
    typer.Option(
        metavar="accel|gpu",
        help="Device type for ggml (GGML_NPU_DEVICE_TYPE). Default: gpu with --all and --memory device, else accel.",
    ),
]
BackendLibraries = Annotated[
    list[Path] | None,
    typer.Option(
        "--backend",
        metavar="LIBRARY",
        help="A backend library of ggml, whose devices can be named: libggml-vulkan.so. Repeat the option for more.",
        show_default=False,
    ),
    READS,
]
RpcServers = Annotated[
    list[str] | None,
    typer.Option(
        "--rpc",
        metavar="HOST:PORT",
        help="A ggml-rpc-server, whose devices can be named; with --backend libggml-rpc.so. Repeat it for more.",
        show_default=False,
    ),
]
DeviceFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py[:DEVICE]|NAME",
        callback=device_of_file,
        is_eager=True,
        help="What the NPU is: a device of your own, by its file or the name of its entry point; :DEVICE chooses one "
        "of several; sim is a simulated one (GGML_NPU_DEVICE_FILE, docs/vendor.md).",
        show_default=False,
    ),
    READS,
]
AllOps = Annotated[
    bool,
    typer.Option(
        "--all", help="The NPU takes every op it has a kernel for, not only SCALE and data movement (GGML_NPU_OPS=all)."
    ),
]
GpuLayers = Annotated[
    str | None,
    typer.Option(
        metavar="N|all",
        callback=gpu_layers,
        help="Layers to offload (-ngl); above 0 the device is of type gpu. Default: all to a device of type gpu.",
        show_default=False,
    ),
]
Fuse = Annotated[bool, typer.Option(help="Run patterns of nodes as one operator (GGML_NPU_FUSION).")]
Matmul = Annotated[
    str | None,
    typer.Option(
        metavar="exact|fast",
        help="Multiply matrices and attend in ggml's order, or faster (GGML_NPU_MATMUL). Default: "
        "exact when nodes are compared, else fast.",
        show_default=False,
    ),
]
_OF_A_SIDE = (
    "cpu: threads, flash-attn, repack, build (a folder of another llama.cpp), python (that has another); "
    "npu: matmul, kernels; others: op-offload"
)
ReferenceWith = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help=f"A setting of the reference alone: threads=1. Repeat the option for more. {_OF_A_SIDE}.",
        show_default=False,
    ),
    READS,
]
DeviceWith = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="A setting of the device alone; with --device cpu, it is compared with the CPU under other settings, or "
        "with that of another build.",
        show_default=False,
    ),
    READS,
]
ToleranceFile = Annotated[
    str | None,
    typer.Option(
        "--tolerances",
        metavar="FILE.toml|gpu",
        help="Bounds of rounding, by op and type, in place of the built-in ones; gpu: for devices with half floats.",
    ),
    READS,
]
NodeTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        callback=finite,
        help="Time limit of a node; a node that takes longer has failed.",
        show_default=True,
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Compute in this process, for a debugger. If a kernel ends the process, the node is not named.",
    ),
]


@dataclass(frozen=True)
class PromptOptions:
    """The prompt for a model."""

    prompt: Prompt = PROMPT
    prompt_file: PromptFile = None

    @property
    def text(self) -> str:
        """The prompt, or the content of the file if one is given. Raises BadInputError if both are given, or if the
        file cannot be read as UTF-8."""
        file = self.prompt_file
        if file is None:
            return self.prompt
        if self.prompt != PROMPT:
            raise BadInputError(f"--file {str(file)!r}: --prompt is given too")
        from ggml_backend_npu.user_texts import TextError, read_text

        try:
            return utf8(read_text(file))
        except UnicodeDecodeError as error:
            raise BadInputError(f"--file {str(file)!r}: is not UTF-8 at byte {error.start}") from None
        except TextError as error:
            raise BadInputError(f"--file {str(file)!r}: {error}") from None


@dataclass(frozen=True)
class ContextOptions:
    """How a model's context is made."""

    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention (-fa).")] = FlashAttention.AUTO
    cache_type_k: CacheTypeK = "f16"
    cache_type_v: CacheTypeV = "f16"
    threads: Threads = 0
    lora: LoraFiles = None

    def settings(self, **others: Any) -> Settings:
        """Returns the settings of a session: these options and others."""
        return Settings(
            flash_attention=self.flash_attn.value, cache_type_k=self.cache_type_k, cache_type_v=self.cache_type_v,
            threads=self.threads, loras=tuple(self.lora or ()), **others,
        )  # fmt: skip


@dataclass(frozen=True)
class NodesContextOptions(ContextOptions):
    """The same, for commands that observe single nodes."""

    flash_attn: Annotated[
        FlashAttention,
        typer.Option(help="Flash attention (-fa); with off, a graph has CONT nodes and more kinds of SET_ROWS."),
    ] = FlashAttention.OFF
    sequences: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_SEQUENCES,
            help="Sequences decoded together, each with caches of its own and fewer of the prompt's tokens, in another "
            "order.",
        ),
    ] = 1  # fmt: skip
    draft: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_DRAFTED,
            help="Tokens that each step after the prompt decodes besides the next one, as a server checks those of a "
            "draft model: products of few columns.",
        ),
    ] = 0  # fmt: skip

    def settings(self, **others: Any) -> Settings:
        """Returns the settings of a session: these options and others."""
        return super().settings(sequences=self.sequences, draft=self.draft, **others)


@dataclass(frozen=True)
class SettingsOfSides:
    """Settings that only one side of a diff has."""

    reference_with: ReferenceWith = None
    device_with: DeviceWith = None

    def of(self, reference: str, device: str) -> Variants:
        """Returns them, for the devices of these names. Raises BadInputError as `Variants.of` does."""
        return Variants.of((reference, self.reference_with or ()), (device, self.device_with or ()))


@dataclass(frozen=True)
class KindOptions:
    """The options of the device, but for where it keeps tensors."""

    profile: ProfileName = None
    memory_limit: MemoryLimit = None
    device_type: DeviceType = None

    @property
    def chosen(self) -> dict[str, str | None]:
        """Options of the device by field name; None leaves one unchanged."""
        return {"profile": self.profile, "memory_limit": self.memory_limit, "device_type": self.device_type}


@dataclass(frozen=True)
class DeviceOptions(KindOptions):
    """The options of the device."""

    memory: DeviceMemory = None

    @property
    def chosen(self) -> dict[str, str | None]:
        """Options of the device by field name, with memory."""
        return super().chosen | {"memory": self.memory}


@dataclass(frozen=True)
class ComputeOptions(DeviceOptions):
    """The options of the device, and how it computes nodes."""

    fusion: Fuse = True
    matmul: Matmul = None

    @property
    def chosen(self) -> dict[str, str | None]:
        """Options of the device by field name, with matmul and fusion."""
        return super().chosen | {"matmul": self.matmul, "fusion": None if self.fusion else "off"}


@dataclass(frozen=True)
class OpOptions(ComputeOptions):
    """The options of the device, how it computes nodes, and which ops it takes."""

    all_ops: AllOps = False
    gpu_layers: GpuLayers = None

    @property
    def layers(self) -> int:
        """How many layers to offload to a device of type gpu."""
        return int(self.gpu_layers) if self.gpu_layers and self.gpu_layers.isdigit() else ALL_LAYERS

    @property
    def chosen(self) -> dict[str, str | None]:
        """Options of the device by field name, with ops. For a whole model in the device's own memory, and for layers
        to offload, the type is gpu, since llama.cpp offloads layers only to a GPU."""
        offloads = (self.memory == "device" and self.all_ops) or (self.gpu_layers is not None and self.layers > 0)
        device_type = self.device_type or ("gpu" if offloads else None)
        return super().chosen | {"ops": "all" if self.all_ops else None, "device_type": device_type}
