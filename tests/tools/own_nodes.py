"""Every node of a diff's own run was judged, or left out by an operator that ran, or ran on the CPU: it adds up.

    python tests/tools/own_nodes.py FOLDER                   8 diffs of each model that ggml's test-llama-archs writes
    python tests/tools/own_nodes.py FOLDER --models REGEX    of those in whose names it is found

The models are made in FOLDER where it has none. Exits with 1 where nodes are missing, were not judged, or are wrong.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pytest
from kit.diffs import FLASH_OFF, planted
from rich.console import Console
from rich.table import Table
from tools.architectures import models

from ggml_backend_npu import default_backend
from ggml_backend_npu.ops import OWN
from graph_runner.diff.judge import Judge
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import Fate

USERS = ("SOFT_MAX", "ARGSORT")  # ops of fusions, for which a user has kernels
PROMPT = "one two three four"


@dataclass(frozen=True)
class Way:
    """How the device runs a model.

    kernels  whose kernels of USERS
    """

    ops: str
    fusion: str
    kernels: str

    def __str__(self) -> str:
        return f"{self.ops} ops, fusion {self.fusion}, {self.kernels} kernels"


Row = tuple[str, str, Counter[str], str]  # model, way, what was counted, and what is wrong
WAYS = [Way(*way) for way in product(("default", "all"), ("on", "off"), ("own", "user"))]


@dataclass
class Counted:
    """What was counted beside a diff.

    nodes      the reference's, that compute something
    on_device  nodes that the device says that it has computed, alone or in an operator
    """

    nodes: int = 0
    on_device: int = 0


@contextmanager
def counting() -> Iterator[Counted]:
    """Counts what the diff within it does until its step by step run ends."""
    counted = Counted()

    def after(judge: Judge, address: int, place: int, *rest: Any, right: Callable[..., None] = Judge.after) -> None:
        counted.nodes += judge._turn.node.dst.n_elements > 0
        right(judge, address, place, *rest)

    def finish(judge: Judge, *, right: Callable[..., None] = Judge.finish, **keywords: bool) -> None:
        if judge._device.plugin is not None:
            counted.on_device = judge._device.plugin.statistics.computed.total()
        right(judge, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Judge, "after", after)
        patch.setattr(Judge, "finish", finish)
        yield counted


def counted_diff(model: Path, way: Way, steps: int = 1) -> tuple[DiffResult, Counted]:
    """A diff of a model, and what was counted beside it."""
    backend = default_backend()
    before = backend.options
    users = [planted(op, OWN[op].define) for op in USERS] if way.kernels == "user" else []
    backend.options = before.updated({"ops": way.ops, "fusion": way.fusion})
    try:
        with backend.ops.having(*users), counting() as counted:
            return diff(model, PROMPT, DiffOptions(steps=steps, settings=FLASH_OFF)), counted
    finally:
        backend.options = before


def missing(result: DiffResult, counted: Counted) -> str:
    """What does not add up; "" if all does."""
    fates = result.fates
    if fates.total() != counted.nodes:
        return f"{counted.nodes} nodes, but {dict(fates)}"
    if fates[Fate.JUDGED] + fates[Fate.FUSED] != counted.on_device:
        return f"the device computed {counted.on_device} nodes, but {dict(fates)}"
    if result.not_judged:
        return f"not judged: {result.not_judged[0]}"
    left_out = [node for node in result.nodes if node.fate is Fate.FUSED and not node.fused]
    return f"left out by nobody: {left_out[0]}" if left_out else ""


# the models of test-llama-archs


def _of_model(model: Path, ways: Sequence[Way], steps: int) -> list[Row]:
    rows: list[Row] = []
    for way in ways:
        try:
            result, counted = counted_diff(model, way, steps)
        except Exception as error:
            rows.append((model.stem, str(way), Counter[str](), f"{type(error).__name__}: {error}"))
            continue
        counts = Counter({"nodes": counted.nodes, "on the device": counted.on_device})
        counts.update({str(fate): count for fate, count in result.fates.items()})
        wrong = f"wrong: {result.wrong[0]}" if result.wrong else ""
        rows.append((model.stem, str(way), counts, missing(result, counted) or wrong))
    return rows


def found(files: Sequence[Path], ways: Sequence[Way] = WAYS, steps: int = 1, at_once: int = 2) -> Iterator[Row]:
    """For each model and way: their names, what was counted, and what is wrong or does not add up; "" if nothing."""
    with ProcessPoolExecutor(at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        for rows in pool.map(partial(_of_model, ways=ways, steps=steps), files):
            yield from rows


def table(rows: Sequence[Row]) -> Table:
    """By way: how many diffs, how many of them wrong, and what was counted."""
    names = ["nodes", "on the device", *map(str, Fate)]
    shown = Table("", "diffs", "wrong", *names)
    for column in shown.columns[1:]:
        column.justify = "right"
    for way in [*dict.fromkeys(row[1] for row in rows), ""]:
        own = [row for row in rows if way in row[1]]
        counts = sum((row[2] for row in own), Counter[str]())
        wrong = sum(bool(row[3]) for row in own)
        shown.add_row(way or "all", f"{len(own):,}", f"{wrong:,}", *(f"{counts[name]:,}" for name in names))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--models", default="", metavar="REGEX", help="those alone in whose names it is found")
    parser.add_argument("-n", "--steps", type=int, default=1, help="tokens to decode after the prompt")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    options = parser.parse_args()
    files = [file for file in models(options.folder) if re.search(options.models, file.stem)]
    rows = []
    for row in found(files, steps=options.steps, at_once=options.processes):
        rows.append(row)
        if row[3]:
            print(f"{row[0]}, {row[1]}: {row[3]}", file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 140).print(table(rows))
    return int(any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
