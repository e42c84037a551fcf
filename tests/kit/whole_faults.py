"""Faults of whole runs, planted in a device in C++ and in devices of this project, and what each command makes of them.

The commands are tried in the order of a triage, in this process: hazards, diff, flaky, bisect. The first that names a
fault is what the table has.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from kit.diffs import PROMPT, planted
from kit.museum import exhibits
from kit.whole import at, half_as_much_again, spoiling
from kit.whole_device import NAME, whole

from ggml_backend_npu import AnyBackend, Backend, DeviceBackend, Options, Tensor
from ggml_backend_npu.backend.fusion import Fused, Fusion, Span
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import ALL_LAYERS, Settings
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.bisect.flakiness import Flakiness, Way
from graph_runner.bisect.flaky import Repeats
from graph_runner.bisect.running import BisectOptions, Runs
from graph_runner.bisect.whole import WholeOptions
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.hazards.check import check
from graph_runner.hazards.watching import HazardOptions, watched
from graph_runner.reports.bisect import verdict
from graph_runner.run.devices import Devices

COMMANDS = ("hazards", "diff", "flaky", "bisect")
SETTINGS = Settings(flash_attention="off", threads=1)
Make = Callable[[], AnyBackend]


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    kind   what goes wrong, in words
    by     the cheapest command that names it
    says   what a command says that names it: a pattern
    make   the device; None: that in C++, with the fault of this name
    runs   of flaky
    """

    name: str
    kind: str
    by: str
    says: str = ""
    make: Make | None = None
    settings: Settings = SETTINGS
    runs: int = 8

    def __str__(self) -> str:
        return self.name

    @property
    def where(self) -> str:
        return "C++" if self.make is None else "this project's"


@dataclass(frozen=True)
class Named:
    """What named a fault: a command and what it said, after how many seconds. `found`: the first that saw it at all."""

    by: str
    said: str
    found: str
    seconds: float


class Looker:
    """Looks at faults, in a folder for a model and the library."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = write_tiny_llama(folder / "llama.gguf")

    @cached_property
    def _devices(self) -> Devices:
        return Devices((whole(self._folder),))

    def look(self, fault: Fault) -> Named:
        """Tries the commands until one names the fault."""
        begin, found = time.monotonic(), ""
        for command in COMMANDS:
            try:
                with _chosen(fault):
                    is_wrong, said = getattr(self, f"_{command}")(fault)
            except SessionError as error:  # the command ends with it
                is_wrong, said = True, str(error)
            found = found or (command if is_wrong else "")
            if re.search(fault.says, said) and said:
                return Named(command, said, found, time.monotonic() - begin)
        return Named("", "", found, time.monotonic() - begin)

    def is_right(self) -> list[str]:
        """Returns what a command says of the device in C++ without a fault, if it isn't right."""
        none = Fault("NONE", "", "")
        return [command for command in COMMANDS if getattr(self, f"_{command}")(none)[0]]

    def _of(self, fault: Fault) -> tuple[str, Devices, AnyBackend]:
        if fault.make is None:
            return NAME, self._devices, Backend(options=Options())
        return "NPU", Devices(), fault.make()

    def _settings(self, fault: Fault, backend: AnyBackend) -> Settings:
        return replace(fault.settings, gpu_layers=ALL_LAYERS if backend.options.device_type == "gpu" else 0)

    def _hazards(self, fault: Fault) -> tuple[bool, str]:
        device, devices, backend = self._of(fault)
        options = HazardOptions(device, devices, 1, self._settings(fault, backend))
        found = [each for graph in watched(self._model, PROMPT, options, backend) for each in check(graph).findings]
        return bool(found), str(found[0]) if found else ""

    def _diff(self, fault: Fault) -> tuple[bool, str]:
        device, devices, backend = self._of(fault)
        options = DiffOptions(steps=2, settings=fault.settings, device=device, devices=devices, backend=backend)
        result = diff(self._model, PROMPT, options)
        if result.faults:
            return True, str(result.faults[0])
        if result.hazards:
            return True, str(result.hazards[0][1])
        if not result.wrong:
            return not result, ""
        node = result.wrong[0]
        what = node.diagnosis or node.failure or "gives other values"
        where = f"step {node.step} node {node.index}: {node.op} {node.name!r}: {what}"
        return True, f"between {node.since} and {where}" if node.since else where

    def _flaky(self, fault: Fault) -> tuple[bool, str]:
        device, devices, backend = self._of(fault)
        options = WholeOptions(device, devices, 2, fault.settings)
        repeats = Repeats(self._model, PROMPT, options, backend)
        ways = [Way("as it is"), Way("over what other tokens left", dirty=True)]
        runs = [repeats.run(ways[turn % 2], 0) for turn in range(fault.runs)]
        result = Flakiness("", device, 0, 2, fault.settings, runs)
        if result:
            return False, ""
        apart = [each.way for each in result.apart]
        way = max(ways, key=apart.count)
        rate = apart.count(way) / sum(each.way == way for each in runs)
        parting = repeats.parting(way, 2, rate)
        return True, str(parting) if parting.place is not None else ""

    def _bisect(self, fault: Fault) -> tuple[bool, str]:
        device, devices, backend = self._of(fault)
        options = BisectOptions(device, devices, 2, fault.settings, None, 10 if "RUN_IN" in fault.name else 2)
        result = Runs(self._model, PROMPT, options, backend).bisected()
        return not result, verdict(result) if result.needed else ""


@contextmanager
def _chosen(fault: Fault) -> Iterator[None]:
    os.environ["WHOLE_FAULT"] = fault.name if fault.make is None else ""
    try:
        yield
    finally:
        del os.environ["WHOLE_FAULT"]


# devices of this project


def _exhibited(name: str) -> Make:
    """A device of the museum."""
    return lambda: DeviceBackend(exhibits()[name].make(memory=1 << 28))


class Unchecked(Fusion):
    """A fusion that nobody asks whether what it leaves out is read."""

    def of(self, graph, begin, ops):  # type: ignore[no-untyped-def]
        span = Span(graph, begin, begin + len(self.ops))
        return self.match(span) if tuple(node.op for node in span.nodes) == self.op_names else None


def _norm_of_sum(span: Span) -> Fused:
    """RMS_NORM of a sum, which leaves the sum out: the residual, which a later ADD reads."""
    add, norm = span.nodes
    before = add.dst.memory.bytes()[add.dst.offset : add.dst.offset + add.dst.nbytes]
    calls = [OWN[node.op].bind(node) for node in (add, norm)]

    def call() -> None:
        kept = before.copy()
        for each in calls:
            each()
        before[:] = kept

    return Fused(call, {1: norm.dst})


def fuses_residual() -> AnyBackend:
    """A device with a fusion that leaves out a sum that a later node reads."""
    fusion = Unchecked("norm_of_sum", (OWN["ADD"], OWN["RMS_NORM"]), _norm_of_sum)
    return Backend(options=Options(ops="all"), fusions=[fusion])


def _attends_to_sequence_0() -> AnyBackend:
    def attend(dst: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor, params: FlashAttn) -> None:
        k, v = (Tensor.of(np.repeat(x.view()[:1], x.ne[3], axis=0), x.type) for x in (k, v))
        OWN["FLASH_ATTN_EXT"].define(dst, q, k, v, mask, sinks, params=params)

    ops = {**OWN, "FLASH_ATTN_EXT": planted("FLASH_ATTN_EXT", attend)}
    return Backend(ops=ops.values(), options=Options(ops="all"))


def _every(n: int, name: str = "ffn_swiglu-0") -> Make:
    """A node that is wrong in every n-th run."""
    runs = 0

    def spoils(dst: Tensor) -> None:
        nonlocal runs
        runs += dst.name == name and dst.ne[1] > 1
        if dst.name == name and runs % n == n - 1:
            half_as_much_again(dst)

    return lambda: spoiling({"SWIGLU": spoils})


def _keeps_something() -> AnyBackend:
    """One node leaves something for another one, far behind it."""
    seen: list[str] = []

    def first(dst: Tensor) -> None:
        seen.append(dst.name)

    def second(dst: Tensor) -> None:
        if dst.name == "ffn_swiglu-1" and "ffn_norm-0" in seen[-30:] and len(seen) > 5:
            half_as_much_again(dst)
        if dst.name == "ffn_swiglu-1":
            seen.clear()

    return spoiling({"MUL": first, "SWIGLU": second})


FLASH_ON = replace(SETTINGS, flash_attention="on")
TOGETHER = "when nodes run together"
SWIGLU = "SWIGLU 'ffn_swiglu-1'"

FAULTS = [
    Fault("KEY_SET_TOO_LATE", "a cell of K is set after attention has read it: an optimiser moved SET_ROWS",
          "hazards", "cache_k_l1"),
    Fault("VALUE_SET_TOO_LATE", "an alias that graph_optimize misses: SET_ROWS moves across a view of V's cache",
          "hazards", "cache_v_l0"),
    Fault("READ_BEFORE_WRITTEN", "an optimiser moves a node before one that it reads", "hazards", "ffn_swiglu-0"),
    Fault("RESIDUAL_TOO_EARLY", "a sum runs before the product that it adds", "hazards", "ffn_out-0|l_out-0"),
    Fault("WRONG_INPUT", "an optimiser gives a product another input of the same shape", "hazards", "ffn_up-0"),
    Fault("CELLS_OF_ANOTHER_LAYER", "cells of one layer are set in the cache of another", "hazards", "cache_k_l1"),
    Fault("ONE_NODE", "one node of one layer is wrong, in a whole run and alone", "diff", SWIGLU),
    Fault("TWO_NODES", "a node is wrong if a certain other one is in the same submission", "bisect",
          "from MUL 'ffn_norm-0' to SWIGLU 'ffn_swiglu-1'"),
    Fault("SUBMITTED_TOGETHER", "a product is wrong only if another one is submitted with it", "diff",
          "ffn_(up|gate)-1"),
    Fault("SUBMITTED_IN_EIGHTS", "wrong only if seven nodes or more are submitted before", "bisect", "ffn_out-1"),
    Fault("SCRATCH_USED_TWICE", "a buffer reused too early: a product writes where another has its result", "diff",
          "ffn_(up|gate|swiglu)-1"),
    Fault("FUSED_SUM_LEFT_OUT", "a fused value that is read later: the sum is not written if its norm follows", "diff",
          "ffn_inp-1|l_out-1"),
    Fault("COPY_NOT_AWAITED", "a copy not waited for: cells are set once they have been read", "bisect",
          "cache_k_l0|kq-0"),
    Fault("STALE_GRAPH", "a stale graph reused with another shape: rows are left", "diff",
          "a graph of another shape before"),
    Fault("THIRD_GRAPH", "every third graph of a context is wrong", "bisect", "ffn_out-1"),
    Fault("NOT_CLEARED", "what memory held before is read", "diff", "ffn_out-1"),
    Fault("ONE_RUN_IN_FOUR", "a race of one in four runs", "diff", "ffn_out-1"),
    Fault("ONE_RUN_IN_FIFTY", "a race of one in 50 runs", "flaky", "ffn_out-1", runs=150),
    Fault("KEEPS_SOMETHING", "one kernel leaves something that makes another one wrong", "diff", "ffn_swiglu-1",
          _keeps_something),
    Fault("SELDOM", "a node is wrong in every fifth run", "diff", "ffn_swiglu-0", _every(5), runs=12),
    Fault("IN_TWO_LAYERS", "one op is wrong in both layers", "diff", "ffn_swiglu-0",
          lambda: spoiling({"SWIGLU": at("ffn_swiglu-0", "ffn_swiglu-1")})),
    Fault("IN_DEVICE_MEMORY", "one node is wrong in the device's own memory", "diff", "ffn_swiglu-1",
          lambda: spoiling({"SWIGLU": at("ffn_swiglu-1")}, memory="device")),
    Fault("FUSES_RESIDUAL", "a fusion leaves out the residual, which a later node reads", "hazards",
          "left out by a fusion: ADD 'l_out-0'", fuses_residual),
    Fault("SEQUENCE_0", "two sequences' cells confused: all attend to those of the first", "diff", "FLASH_ATTN_EXT",
          _attends_to_sequence_0, replace(FLASH_ON, sequences=2)),
    Fault("EPS_OF_MUL", "a fused norm takes eps from another node", "diff", TOGETHER,
          _exhibited("NormTakesEpsOfMul")),
    Fault("ORDERS_VIEWS", "a device moves SET_ROWS across a view of its cache, which nobody sees", "diff", TOGETHER,
          _exhibited("OrdersViewsAsOthers")),
    Fault("ORDERS_BY_READS", "nodes run at once if neither reads the other, though memory is reused", "diff", TOGETHER,
          _exhibited("OrdersByReadsAlone")),
]  # fmt: skip


NOTHING = "nothing"


def row(fault: Fault, seen: Named) -> str:
    """A line of the table as Markdown."""
    said = re.sub(r"\s+", " ", re.sub(r" at 0x[0-9a-f]+,", ",", seen.said)).replace("|", "/").replace("<", "&lt;")
    named = re.search(fault.says, said)
    if named is not None and named.end() > 160:
        said = f"... {said[: named.end()][-150:].partition(' ')[2]}"
    said = said if len(said) <= 160 else f"{said[:160].rpartition(' ')[0]} ..."
    found, by = seen.found or NOTHING, seen.by or NOTHING
    return f"| {fault.kind} | {fault.where} | {found} | {by} | {said} | {seen.seconds:.1f} |"


def report(rows: Sequence[str]) -> list[str]:
    """The table, with what it counts above it."""
    cells = [each.split(" | ") for each in rows]
    found, named = (sum(each[column] != NOTHING for each in cells) for column in (2, 3))
    return [
        f"{len(rows)} faults: {found} found, {named} of them named rightly.",
        "",
        "| fault | device | found by | named by | what it says | seconds |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
