"""No hazard in the models that ggml's test-llama-archs writes, on ggml's CPU, on this project's device and on devices
of other backends: ggml-blas, a ggml-rpc-server on loopback, and ggml-vulkan where kit/vulkan.py can build that. Each
model is run in so many contexts that each pair of settings that it runs with is in one of them. On Vulkan nothing is
computed: its driver compiles for seconds what a graph runs, and hazards depend on no value.

    python tests/tools/hazards.py FOLDER                     all models on all devices: some 16,000 runs
    python tests/tools/hazards.py FOLDER --device Vulkan0    on one
    python tests/tools/hazards.py FOLDER --every 8           each eighth model

The models are made in FOLDER where it has none. Prints a line for each model on each device, each hazard with the
context in which it was found, and a table. Exits with 1 where there is a hazard, where a run fails, or where the order
in which the nodes were built is not known.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import astuple, dataclass, field, fields
from functools import cached_property
from itertools import combinations, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit import vulkan
from kit.backends import blas, rpc_library, served
from kit.covering import covering
from rich.console import Console
from rich.table import Table
from tools.architectures import SETTINGS, models, prompt, runs, ways

from ggml_backend_npu import Backend, Options
from ggml_backend_npu.ggml import convert, lib
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import ALL_LAYERS, Settings
from graph_runner.hazards import Graph, check, watching
from graph_runner.hazards.graph import COPY
from graph_runner.hazards.watching import CPU, NPU, HazardOptions, Watch, watched
from graph_runner.run.devices import Devices

_SOME = (1, 2, ALL_LAYERS)  # the output; with the last layer; the whole model
LAYERS = {CPU: (0,), NPU: (0, *_SOME), "RPC0": _SOME, "BLAS": (0,), vulkan.DEVICE: _SOME}
PROMPTS = tuple(map(int, SETTINGS["n_prompt"]))
SEQUENCES = (1, 2)


@dataclass(frozen=True)
class Context:
    """How a model is run on a device."""

    layers: int
    flash_attention: str
    cache_type: str
    sequences: int
    n_prompt: int

    @cached_property
    def pairs(self) -> set[tuple[object, ...]]:
        return set(combinations(zip([each.name for each in fields(self)], astuple(self), strict=True), 2))

    @property
    def settings(self) -> Settings:
        return Settings(
            cache_type_k=self.cache_type,
            cache_type_v=self.cache_type,
            flash_attention="on" if self.flash_attention == "on" else "off",
            threads=1,
            gpu_layers=self.layers,
            sequences=self.sequences,
        )

    def __str__(self) -> str:
        of = f"{self.layers} layers, flash attention {self.flash_attention}, {self.cache_type} caches"
        return f"{of}, {self.sequences} sequences, {self.n_prompt} tokens"


def contexts(model: Path, device: str) -> list[Context]:
    """Those that a model is run with on a device: each pair of settings is in one of them."""
    allowed = sorted(ways(lambda *way: runs(model, *way)))
    possible = product(LAYERS[device], allowed, SEQUENCES, PROMPTS)
    return covering([Context(layers, *way, *of) for layers, way, *of in possible], model.stem)


@dataclass
class Outcome:
    """What was found in a model on a device.

    contexts, graphs, nodes, reads  how many there were
    reordered  graphs of which the device runs nodes in another order than that in which they were built
    found    the hazards, each with its context and its graph; runs that failed, and graphs whose nodes the CPU does not
             have
    """

    device: str
    model: str
    contexts: int = 0
    graphs: int = 0
    reordered: int = 0
    nodes: int = 0
    reads: int = 0
    found: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, context: Context, graph: Graph) -> None:
        report, order = check(graph), [place for step in graph.order for place in step.nodes]
        order = [place for place in order if graph.nodes[place].op != COPY]
        self.reordered += order != sorted(order)
        self.graphs, self.nodes, self.reads = self.graphs + 1, self.nodes + report.nodes, self.reads + report.reads
        self.found += [f"{context}, {report.graph}: {each}" for each in report.findings]
        if not report.is_as_built:
            self.found.append(f"{context}, {report.graph}: the CPU's graph has other nodes")


class Idle(Watch):
    """For a device that computes nothing: numbers of rows and of experts that it should have computed become zeros, as
    ggml ends the process if it reads one there that is none."""

    def before(self, node: int) -> bool:
        super().before(node)
        return convert.tensor(lib.ggml(), node).type in ("i32", "i64")

    def after(self, node: int) -> None:
        ggml = lib.ggml()
        if not ggml.ggml_backend_buffer_is_host(convert.buffer_of(node)):
            size = convert.tensor(ggml, node).nbytes
            ggml.ggml_backend_tensor_set(node, ctypes.create_string_buffer(size), 0, size)


def checked(model: Path, device: str, devices: Devices) -> Outcome:
    """Checks a model in each of its contexts on a device."""
    outcome, begin = Outcome(device, model.stem), time.perf_counter()
    if device == vulkan.DEVICE:
        watching.Watch = Idle  # type: ignore[misc]
    for context in contexts(model, device):
        outcome.contexts += 1
        options = HazardOptions(device, devices, settings=context.settings)
        kind = "gpu" if context.layers else "accel"
        backend = Backend(options=Options(memory="device" if context.layers else "host", device_type=kind, ops="all"))
        try:
            for graph in watched(model, prompt(model.stem, context.n_prompt), options, backend):
                outcome.add(context, graph)
        except SessionError as error:
            outcome.found.append(f"{context}: {error}")
    outcome.seconds = time.perf_counter() - begin
    return outcome


def apart(model: Path, device: str, devices: Devices) -> Outcome:
    """The same in a process of its own, which may end."""
    spawn = get_context("spawn")
    received, sent = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_checked_into, args=(sent, model, device, devices))
    process.start()
    sent.close()
    try:
        outcome: Outcome = received.recv()
    except EOFError:
        process.join()
        outcome = Outcome(device, model.stem, found=[f"the process ended with {process.exitcode}"])
    process.join()
    return outcome


def _checked_into(sent: Connection, model: Path, device: str, devices: Devices) -> None:
    sent.send(checked(model, device, devices))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for models and what is built")
    parser.add_argument("--device", choices=LAYERS, action="append", help="repeat it for more")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th model")
    parser.add_argument("--models", default="", metavar="REGEX", help="those alone in whose names it is found")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    wanted = options.device or [*LAYERS]
    if vulkan.missing() and vulkan.DEVICE in wanted:
        print(f"no {vulkan.DEVICE}: this machine has no {vulkan.missing()}")
        wanted.remove(vulkan.DEVICE)
    files = [file for file in models(options.folder) if re.search(options.models, file.stem)][:: options.every]
    libraries = [rpc_library(), blas(options.folder)]
    if vulkan.DEVICE in wanted:
        libraries.append(vulkan.library())
        os.environ.update({**vulkan.environment(), **vulkan.idle(options.folder)})
    found: list[Outcome] = []
    with (
        served(options.folder / "server.log") as (address, _),
        ThreadPoolExecutor(options.processes) as pool,
    ):
        devices = Devices(tuple(libraries), (address,))
        for done in as_completed([pool.submit(apart, file, name, devices) for name in wanted for file in files]):
            found.append(done.result())
            print(told(found[-1]), *found[-1].found, sep="\n", flush=True)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    return int(any(outcome.found for outcome in found))


def told(outcome: Outcome) -> str:
    """An outcome as a line."""
    graphs = f"{outcome.graphs:,} graphs, {outcome.reordered:,} reordered"
    of = f"{outcome.contexts} contexts, {graphs}, {outcome.reads:,} reads, {outcome.seconds:.0f} s"
    return f"{outcome.device}, {outcome.model}: {len(outcome.found)} found ({of})"


def table(found: list[Outcome]) -> Table:
    """The sums for each device."""
    columns = ("models", "contexts", "graphs", "reordered", "nodes", "reads", "found", "seconds")
    shown = Table("device")
    for column in columns:
        shown.add_column(column, justify="right")
    for device in LAYERS:
        of = [outcome for outcome in found if outcome.device == device]
        sums = [sum(getattr(each, column) for each in of) for column in columns[1:-2]]
        sums += [sum(len(each.found) for each in of), round(sum(each.seconds for each in of))]
        if of:
            shown.add_row(device, *(f"{n:,}" for n in (len(of), *sums)))
    return shown


if __name__ == "__main__":
    sys.exit(main())
