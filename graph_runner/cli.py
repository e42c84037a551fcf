"""The command ggml-npu."""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

PROMPT = "The capital of France is"
_NODES_PER_UPDATE = 64

app = typer.Typer(
    name="ggml-npu",
    help="A ggml backend in Python: run GGUF models with its kernels, and compare them byte for byte with ggml's CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class Device(StrEnum):
    NPU = "npu"
    CPU = "cpu"


class DiffDevice(StrEnum):
    CPU = "CPU"
    NPU = "NPU"


class FlashAttention(StrEnum):
    AUTO = "auto"
    ON = "on"
    OFF = "off"


MODEL_HELP = (
    "A GGUF file, or [bold]demo[/] (SmolLM2-135M-Instruct, from the extra 'demo'), or [bold]tiny[/] "
    "(a small random llama made on the spot)."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]


def _utf8(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"--prompt {prompt!a}: is no UTF-8") from None
    return prompt


Prompt = Annotated[str, typer.Option("-p", "--prompt", callback=_utf8, help="Text that the model goes on from.")]
CacheTypeK = Annotated[str, typer.Option(metavar="TYPE", help="ggml type of the K cache: f16, f32, q8_0, q4_0, ...")]
CacheTypeV = Annotated[
    str, typer.Option(metavar="TYPE", help="ggml type of the V cache; a quantised one needs --flash-attn on.")
]
Kernels = Annotated[
    Path | None,
    typer.Option(metavar="FILE.py", help="Your own kernels: a file that registers or replaces ops with @op(...)."),
]
Threads = Annotated[int, typer.Option(min=0, help="Threads of llama.cpp's CPU and of the kernels; 0 = all cores.")]

ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME|FILE.toml",
        help="Device generation, a name or your own (GGML_NPU_PROFILE).",
        show_default=False,
    ),
]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as JSON too; - is stdout.")
]
HtmlFile = Annotated[
    str | None,
    typer.Option("--html", metavar="FILE|-", help="Write the result as a page for a browser too: one file."),
]
ExplorerFile = Annotated[
    str | None,
    typer.Option("--model-explorer", metavar="FILE|-", help="Write errors as node data for Model Explorer too."),
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


def _chosen(all_ops: bool = False, fusion: bool = True) -> dict[str, str | None]:
    return {"ops": "all" if all_ops else None, "fusion": None if fusion else "off"}


def _type_for_all(device_type: str | None, memory: str | None, all_ops: bool) -> str | None:
    """llama.cpp lets a whole model be in a device's own memory where it takes it for a GPU."""
    return device_type or ("gpu" if memory == "device" and all_ops else None)


def _stderr() -> Console:
    return Console(stderr=True)


@contextmanager
def _loading(console: Console) -> Iterator[Callable[[float], None]]:
    """A progress bar for a model that loads, on a terminal only."""
    with Progress(
        TextColumn("loading"), BarColumn(), TaskProgressColumn(), console=console, transient=True,
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("loading", total=1.0)

        def update(done: float) -> None:
            progress.update(task, completed=done)
            if done >= 1.0:
                progress.stop()

        yield update


def _use_device(**options: str | None) -> None:
    from ggml_backend_npu import DEVICE

    DEVICE.update(options)


def _gpu_layers() -> int:
    """A device of type gpu is to have all layers."""
    from ggml_backend_npu import DEVICE

    return 999 if DEVICE.device_type == "gpu" else 0


def _use_kernels(path: Path | None) -> None:
    if path is None:
        return
    from ggml_backend_npu.kernels import load_kernels

    ops = ", ".join(f"{name} ({how})" for name, how in load_kernels(path).items())
    print(f"kernels of {path}: {ops}", file=sys.stderr)


@app.command()
def run(
    model: Model,
    prompt: Prompt = PROMPT,
    n: Annotated[int, typer.Option("-n", "--n-predict", min=1, help="Tokens to generate.")] = 64,
    device: Annotated[Device, typer.Option(help="Who computes the nodes that the NPU supports.")] = Device.NPU,
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.AUTO,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Mass to sample from, above temperature 0.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
    kernels: Kernels = None,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
    llama_graph: Annotated[
        bool,
        typer.Option(help="Each token's graph comes from llama.cpp, or one that it made once is run (implies --all)."),
    ] = True,
    fusion: Fuse = True,
    threads: Threads = 0,
) -> None:
    """Generate text; the text goes to stdout, what ran where to stderr."""
    from graph_runner.models import model_file
    from graph_runner.report import print_run
    from graph_runner.session import Sampler, Session, Settings, context_for, generate
    from graph_runner.token_graph import GraphRunner

    all_ops = all_ops or not llama_graph
    _use_device(
        profile=profile,
        memory=memory,
        memory_limit=memory_limit,
        device_type=_type_for_all(device_type, memory, all_ops),
        **_chosen(all_ops, fusion),
    )
    _use_kernels(kernels)
    settings = Settings(
        device=device.value,
        n_ctx=context_for(prompt, n),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attn.value,
        threads=threads,
        gpu_layers=_gpu_layers(),
    )
    console = _stderr()
    with (
        model_file(model) as file,
        _loading(console) as progress,
        Session(file, settings, progress=progress) as session,
    ):
        tokens = session.tokenize(prompt)
        runner = None if llama_graph else GraphRunner(session)
        text = codecs.getincrementaldecoder("utf-8")("replace")
        times = [time.perf_counter()]
        for token in generate(runner or session, tokens, n, Sampler(temperature, top_p, seed)):
            times.append(time.perf_counter())
            sys.stdout.write(text.decode(session.piece(token)))
            sys.stdout.flush()
        sys.stdout.write(text.decode(b"", True) + "\n")
        sys.stdout.flush()
        print_run(session, runner, len(tokens), times, console)


@app.command()
def diff(
    model: Model,
    prompt: Prompt = PROMPT,
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
        Path | None, typer.Option(metavar="FOLDER", help="Save the first wrong nodes as traces, for ggml-npu replay.")
    ] = None,
    reference: Annotated[DiffDevice, typer.Option(help="Who is right; NPU: this project's kernels.")] = DiffDevice.CPU,
    device: Annotated[DiffDevice, typer.Option(help="Who is compared with it.")] = DiffDevice.NPU,
    tolerances: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Bounds of rounding, by op and type, over the own ones.")
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

    _use_device(profile=profile, **_chosen(all_ops, fusion))
    _use_kernels(kernels)
    chosen = _chosen_ops(ops)
    if reproducers is not None and not reproducers.is_dir():
        raise BadInputError(f"--reproducers {str(reproducers)!r}: no such directory")
    outputs = {"--json": json_file, "--html": html_file, "--model-explorer": explorer_file}
    _check_outputs(outputs)
    settings = Settings(
        cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=flash_attn.value, threads=threads
    )
    console = _stderr()
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
                reference=reference.value,
                device=device.value,
                tolerances=Tolerances(tolerances),
                reproducers=reproducers,
                seen=seen,
            )
    data = diff_json(result) if any(outputs.values()) else {}
    if json_file is not None:
        _write("--json", json_file, _json_text(data))
    if html_file is not None:
        _write("--html", html_file, diff_html(data))
    if explorer_file is not None:
        _write("--model-explorer", explorer_file, _json_text(explorer_json(data)))
    print_diff(result, console if "-" in outputs.values() else Console())
    raise typer.Exit(0 if result else 1)


def _chosen_ops(ops: str | None) -> set[str] | None:
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


def _check_outputs(files: dict[str, str | None]) -> None:
    """Files to write, by option: each in a folder that exists, no two the same."""
    seen: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        path = Path(file).resolve()
        if path in seen:
            raise BadInputError(f"{option} {file!r}: {seen[path]} writes there")
        seen[path] = option
        if file == "-":
            continue
        if path.is_dir():
            raise BadInputError(f"{option} {file!r}: is a directory")
        if not path.parent.is_dir():
            raise BadInputError(f"{option} {file!r}: no such directory")


def _json_text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _write(option: str, file: str, text: str) -> None:
    if file == "-":
        sys.stdout.write(text)
    else:
        _save(option, file, text.encode())


def _save(option: str, file: str, data: bytes) -> None:
    path = Path(file)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_bytes(data)
        else:
            partial = path.with_name(path.name + ".part")
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        raise BadInputError(f"{option} {file!r}: {error.strerror}") from None


Output = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE.gguf", help="The trace to write.", show_default=False)
]
NODES_HELP = (
    "Which nodes, with commas between them: an op (GET_ROWS), a node's name (ffn_out-*; * and ? stand for any text and "
    "character), places in a step (17, 17-40), each in one step alone with its number in front (2:GET_ROWS). Left out: "
    "what the NPU takes."
)


@app.command()
def capture(
    model: Model,
    output: Output,
    prompt: Prompt = PROMPT,
    steps: Annotated[int, typer.Option("-n", "--steps", min=0, help="Tokens to decode behind the prompt.")] = 1,
    nodes: Annotated[str | None, typer.Option(metavar="ITEM,ITEM,...", help=NODES_HELP)] = None,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.OFF,
    profile: ProfileName = None,
    threads: Threads = 0,
) -> None:
    """Keep nodes of a run in a file: what each reads, and what ggml's CPU makes of it.

    The file (a GGUF) is computed again with `ggml-npu replay`, without the model.
    """
    from graph_runner.models import model_file
    from graph_runner.report import print_captured
    from graph_runner.session import Settings
    from graph_runner.trace import Selection, capture, check_output, taken_by_the_npu

    _use_device(profile=profile)
    check_output(output)
    select = taken_by_the_npu if nodes is None else Selection(nodes)
    settings = Settings(
        cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=flash_attn.value, threads=threads
    )
    console = _stderr()
    with model_file(model) as file, console.status("running the model"):
        captured = capture(file, prompt, output, steps=steps, settings=settings, select=select)
    print_captured(captured, str(output), console)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.gguf", help="What `capture` wrote.", show_default=False)],
    device: Annotated[str, typer.Option(metavar="NAME", help="NPU, CPU, or any other that ggml has.")] = "NPU",
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

    _use_device(profile=profile)
    _use_kernels(kernels)
    _check_outputs({"--json": json_file})
    if device.upper() != NPU:
        import ggml_backend_npu

        ggml_backend_npu.register()
    console = _stderr()
    with console.status("computing"):
        result = replay(trace, device)
    if json_file is not None:
        _write("--json", json_file, _json_text(replay_json(result)))
    print_replay(result, console if json_file == "-" else Console())
    raise typer.Exit(0 if result else 1)


@app.command()
def coverage(
    model: Model,
    prompt: Prompt = PROMPT,
    flash_attn: Annotated[FlashAttention, typer.Option(help="Flash attention.")] = FlashAttention.AUTO,
    cache_type_k: CacheTypeK = "f16",
    cache_type_v: CacheTypeV = "f16",
    json_file: JsonFile = None,
    kernels: Kernels = None,
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
    all_ops: AllOps = False,
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

    _use_device(
        profile=profile,
        memory=memory,
        memory_limit=memory_limit,
        device_type=_type_for_all(device_type, memory, all_ops),
        **_chosen(all_ops),
    )
    _use_kernels(kernels)
    _check_outputs({"--json": json_file})
    settings = Settings(
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attn.value,
        threads=threads,
        gpu_layers=_gpu_layers(),
    )
    console = _stderr()
    with model_file(model) as file, console.status("running the model"):
        found = cover(file, prompt, settings=settings)
    if json_file is not None:
        _write("--json", json_file, _json_text(coverage_json(found)))
    print_coverage(found, console if json_file == "-" else Console())


@app.command()
def devices(
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
) -> None:
    """List the devices that ggml knows, the NPU among them, and the NPU's profile."""
    import ggml_backend_npu
    from ggml_backend_npu.abi.lib import list_devices

    _use_device(profile=profile, memory=memory, memory_limit=memory_limit, device_type=device_type)
    ggml = ggml_backend_npu.register().ggml
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("device", "type", "backend", "description"):
        table.add_column(column)
    for device in list_devices(ggml):
        table.add_row(device.name, device.type, device.backend, device.description)
    console = Console()
    console.print(table)
    chosen = ggml_backend_npu.DEVICE.profile
    console.print(f"ggml {ggml.version}; profile {chosen.name}: {chosen.description}", highlight=False)


@app.command()
def plugin() -> None:
    """Print the path of the plugin that gives any ggml program the device NPU.

    GGML_BACKEND_PATH="$(ggml-npu plugin)" llama-bench -m model.gguf
    """
    from ggml_backend_npu.abi.embedding import plugin

    print(plugin())


@app.command("test")
def judge(
    kernels: Annotated[
        Path, typer.Argument(metavar="FILE.py", help="Your own kernels, as for --kernels.", show_default=False)
    ],
    profile: ProfileName = None,
    memory: DeviceMemory = None,
    memory_limit: MemoryLimit = None,
    device_type: DeviceType = None,
) -> None:
    """Judge your kernels: run ggml's own test cases (test-backend-ops) of the ops that a file registers.

    ggml's tests are built the first time, from the sources of llama-cpp-python. Exit code 0: every case that is
    supported passes; 1: one fails, or none is supported; 2: bad input.
    """
    from ggml_backend_npu.kernels import load_kernels
    from graph_runner.report import print_cases
    from graph_runner.suites import backend_ops, build

    chosen = {"profile": profile, "memory": memory, "memory_limit": memory_limit, "device_type": device_type}
    _use_device(**chosen)
    ops = list(load_kernels(kernels))
    options = {f"GGML_NPU_{name.upper()}": value for name, value in chosen.items() if value is not None}
    build(_stderr())
    with _stderr().status("test-backend-ops") as status:
        cases = backend_ops(
            ops,
            {**options, "GGML_NPU_KERNELS": str(kernels)},
            seen=lambda case: status.update(f"{case.group}({case.name})"),
        )
    print_cases(ops, cases, Console())
    verdicts = {case.verdict for case in cases}
    raise typer.Exit(0 if "passed" in verdicts and "failed" not in verdicts else 1)


@app.command()
def ops() -> None:
    """List the ops that the backend supports, by type."""
    from ggml_backend_npu import OPS

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("op", "sources", "output"):
        table.add_column(column)
    for name in sorted(OPS):
        for sources, outputs in OPS[name].signatures():
            table.add_row(name, sources, outputs)
            name = ""
    Console().print(table)


class Benchmark(StrEnum):
    MOVERS = "movers"
    CODECS = "codecs"
    CALLS = "calls"
    DECODE = "decode"
    OPERATORS = "operators"
    DIFF = "diff"
    START = "start"
    ALL = "all"


@app.command()
def bench(
    what: Annotated[Benchmark, typer.Argument(help="What to measure.")] = Benchmark.ALL,
    json_file: JsonFile = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.png", help="Draw movers and codecs as bars too.")
    ] = None,
    model: Annotated[str, typer.Option(metavar="MODEL", help=MODEL_HELP)] = "demo",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, behind one that warms up.")] = 5,
    threads: Threads = 0,
) -> None:
    """Measure how fast this is, beside others in the same run.

    movers: ops that move 64 MiB, against ggml's CPU and memcpy.
    codecs: q8_0 and q4_0 of 64 MiB, against libgguf, gguf-py and memcpy.
    calls: graphs of one small node, against ggml's CPU.
    decode: a model with the movers on the NPU, and with every node, against the CPU alone; memory.
    operators: nodes that run as one operator, against the same on ggml's CPU.
    diff: of a model, against a run of it.
    start: fresh processes that import and register, and a whole diff.
    """
    from graph_runner.bench import WITH_BANDWIDTH, Measurement, bench, bench_json, check_plot, draw, print_bench

    names = [name.value for name in Benchmark if what in (name, Benchmark.ALL) and name != Benchmark.ALL]
    _check_outputs({"--json": json_file, "--plot": plot_file})
    if plot_file is not None:
        if not set(names) & set(WITH_BANDWIDTH):
            raise BadInputError(
                f"--plot {plot_file!r}: {what} has no bandwidth to draw; {' and '.join(WITH_BANDWIDTH)} do"
            )
        check_plot(plot_file)
    console = _stderr()
    with Progress(
        TextColumn("{task.description}"), console=console, transient=True, auto_refresh=False,  # no thread beside
        disable=not console.is_terminal,
    ) as progress:  # fmt: skip
        task = progress.add_task("measuring")

        def seen(name: str, found: Measurement) -> None:
            progress.update(task, description=f"{name}: {found.what}", refresh=True)

        result = bench(names, model=model, rounds=rounds, threads=threads, seen=seen)
    if json_file is not None:
        _write("--json", json_file, _json_text(bench_json(result)))
    if plot_file is not None:
        _save("--plot", plot_file, draw(result, plot_file))
    print_bench(result, console if json_file == "-" else Console())


class BadInputError(Exception):
    """What the user gave cannot be used: one line."""


def main() -> None:
    """Runs the command; a user's mistake is one line on stderr and exit code 2."""
    from ggml_backend_npu import DeviceError
    from ggml_backend_npu.abi.embedding import PluginError
    from ggml_backend_npu.abi.lib import UnknownGgmlError
    from ggml_backend_npu.kernels import KernelFileError
    from ggml_backend_npu.registry import KernelError
    from graph_runner.errors import BenchError, SessionError, TraceError
    from graph_runner.suites import SuiteError
    from graph_runner.tolerances import ToleranceError
    from quant.jit import EngineError

    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(prog_name="ggml-npu")
    except (
        BadInputError, BenchError, DeviceError, EngineError, KernelError, KernelFileError, PluginError, SessionError,
        SuiteError, ToleranceError, TraceError, UnknownGgmlError,
    ) as error:  # fmt: skip
        print("ggml-npu:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
