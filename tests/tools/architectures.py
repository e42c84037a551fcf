"""No false alarm: an unmodified device is right, by a diff, in every model that ggml's test-llama-archs writes, and in
models with the attention of real ones (tests/kit/shapes.py).

    python tests/tools/architectures.py FOLDER                        each pair of settings for each model: 4,000 diffs
    python tests/tools/architectures.py FOLDER --sample 100 --seed 7  so many of them
    python tests/tools/architectures.py FOLDER --text                 not the nodes: 12 greedy tokens beside the CPU's

The models are made in FOLDER where it has none. Exits with 1 where a diff is wrong, or a text is another one than the
CPU's though every logit before it was the CPU's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, groupby, product, takewhile, zip_longest
from pathlib import Path
from queue import SimpleQueue
from subprocess import PIPE
from threading import Semaphore, Thread, Timer
from typing import Any

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
from kit.covering import covering
from kit.shapes import SHAPES, written
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ggml_backend_npu import default_backend
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.reports.diff_report import diff_json
from graph_runner.reports.nodes import describe
from graph_runner.run.session import Sampler, Session, SessionError, Settings, generate
from graph_runner.tools.suites import build

SETTINGS: dict[str, tuple[str, ...]] = {
    "ops": ("all", "default"),
    "flash_attention": ("on", "off"),
    "memory": ("host", "device"),
    "device_type": ("accel", "gpu"),
    "cache_type": ("f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"),
    "n_prompt": ("1", "59", "71", "200"),
}
SEED = "1"  # of the models' weights
N_STEPS, N_TOKENS = 2, 12
THREADS = 2
MOST_SECONDS = 600  # that a case may take
CHARACTERS = 5  # that a token of the models of test-llama-archs has


@dataclass(frozen=True)
class Case:
    """A model and the settings that it is run with."""

    model: str
    ops: str
    flash_attention: str
    memory: str
    device_type: str
    cache_type: str
    n_prompt: int

    @property
    def process(self) -> tuple[str, str]:
        """What stays as it is while a process lives."""
        return self.memory, self.device_type

    @cached_property
    def pairs(self) -> set[tuple[str, ...]]:
        return set(combinations((f"{name} {getattr(self, name)}" for name in SETTINGS), 2))

    @property
    def prompt(self) -> str:
        return prompt(self.model, self.n_prompt)

    @property
    def settings(self) -> Settings:
        return Settings(
            "npu",
            n_ctx=512,
            cache_type_k=self.cache_type,
            cache_type_v=self.cache_type,
            flash_attention="on" if self.flash_attention == "on" else "off",
            threads=THREADS,
            gpu_layers=999 if self.device_type == "gpu" else 0,
        )

    def __str__(self) -> str:
        settings = f"{self.ops} ops, flash attention {self.flash_attention}, {self.memory} memory, {self.device_type}"
        return f"{self.model}: {settings}, {self.cache_type} caches, {self.n_prompt} tokens"


@dataclass(frozen=True)
class Outcome:
    """What became of a case. Falsy where it is wrong.

    why      what is wrong in it: the first node, or the error that ended it; "" where nothing is
    counts   of a diff, nodes by verdict; of texts, tokens, how many are the CPU's from the first on, and for how many
             the logits are, in every byte
    seconds  that it took
    nmse     of the first logits that are not the CPU's
    """

    case: Case
    why: str
    counts: dict[str, int]
    seconds: float = 0.0
    nmse: float = 0.0

    def __bool__(self) -> bool:
        return not self.why

    @staticmethod
    def of(data: Mapping[str, Any]) -> Outcome:
        return Outcome(**{**data, "case": Case(**data["case"])})


# the design

_QUANTISED = "q8_0"  # a type of caches that stands for all quantised ones


def prompt(model: str, n_tokens: int) -> str:
    """Random letters of so many tokens of a model, by its name."""
    characters = 1 if model in SHAPES else CHARACTERS
    return "".join(random.Random(model).choices("abcdefghijklmnopqrstuvwxyz ", k=characters * n_tokens))


def ways(runs: Callable[[str, str], bool]) -> set[tuple[str, str]]:
    """With which flash attention and which type of caches a model runs.

    runs  says so; one type is asked for all quantised ones
    """
    asked = {way: runs(*way) for way in product(SETTINGS["flash_attention"], ("f16", _QUANTISED))}
    every = product(SETTINGS["flash_attention"], SETTINGS["cache_type"])
    return {(flash, cache) for flash, cache in every if asked[flash, cache if cache == "f16" else _QUANTISED]}


def models(folder: Path) -> list[Path]:
    """The models of test-llama-archs and of SHAPES in a folder, made there where there are none."""
    if {file.stem for file in folder.glob("*.gguf")} <= SHAPES.keys():
        folder.mkdir(parents=True, exist_ok=True)
        command: list[str | Path] = [build() / "test-llama-archs", "-s", SEED, "-o", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    written(folder)
    return sorted(folder.glob("*.gguf"))


def runs(model: Path, flash_attention: str, cache_type: str) -> bool:
    """Whether llama.cpp's CPU runs a model so: a quantised cache takes flash attention, and heads of whole blocks.

    All quantised types of caches have blocks of 32, so what is true of one is true of the others.
    """
    case = Case(model.stem, "all", flash_attention, "host", "accel", cache_type, 1)
    try:
        with Session(model, replace(case.settings, device="cpu", gpu_layers=0)):
            return True
    except SessionError:
        return False


def design(names: Iterable[str], runs: Callable[[str, str, str], bool], seed: int = 0) -> list[Case]:
    """For each model cases such that each pair of settings that it runs with is in one of them.

    runs  says so of a model's name, flash attention, and the caches' type
    """
    cases = []
    for name in names:
        possible = [
            Case(name, ops, flash_attention, memory, kind, cache, int(n))
            for ops, flash_attention, memory, kind, cache, n in product(*SETTINGS.values())
        ]
        allowed = ways(lambda *way, name=name: runs(name, *way))
        possible = [case for case in possible if (case.flash_attention, case.cache_type) in allowed]
        cases += covering(possible, f"{seed} {name}")
    return cases


# a process that runs cases


def judged(model: Path, case: Case) -> Outcome:
    """A diff of the case. If a scheduler leaves all nodes to the CPU, it is right if what the device computes alone
    is."""
    result = diff(model, case.prompt, DiffOptions(steps=N_STEPS, settings=case.settings))
    why = ""
    if not result and not (result.ran_none and result.compared and not result.wrong):
        why = next(map(describe, result.wrong), diff_json(result)["verdict"])
    return Outcome(case, why, dict(Counter(str(node.verdict) for node in result.nodes)))


class Recorder(Sampler):
    """A greedy sampler that keeps the logits which it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[NDArray[np.float32]] = []

    def __call__(self, logits: NDArray[np.float32]) -> int:
        self.logits.append(logits)
        return super().__call__(logits)


def told(model: Path, case: Case) -> Outcome:
    """What `run` writes, on the CPU and on the NPU."""
    texts, logits = [], []
    for settings in (replace(case.settings, device="cpu", gpu_layers=0), case.settings):
        sampler = Recorder()
        with Session(model, settings) as session:
            texts.append([*generate(session, session.tokenize(case.prompt), N_TOKENS, sampler)])
        logits.append(sampler.logits)
    pairs = [*zip(*logits, strict=False)]
    same = first_false(a == b for a, b in zip_longest(*texts))
    equal = first_false(cpu.tobytes() == npu.tobytes() for cpu, npu in pairs)
    nmse = normalised_error(*pairs[equal]) if equal < len(pairs) else 0.0
    why = ""
    if not np.isfinite(nmse):
        why = f"the logits of token {equal} are not finite"
    elif same < equal:
        why = f"token {same} is not the CPU's, though all logits are, up to it"
    return Outcome(case, why, {"tokens": max(map(len, texts)), "same": same, "equal logits": equal}, nmse=nmse)


def first_false(values: Iterable[bool]) -> int:
    """How many are true before the first that is not."""
    return sum(1 for _ in takewhile(bool, values))


def normalised_error(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    return float(((actual.astype(np.float64) - expected) ** 2).sum() / (expected.astype(np.float64) ** 2).sum())


def work(folder: Path, run: Callable[[Path, Case], Outcome]) -> None:
    """Runs the cases that stand on stdin, one a line, and prints each one's outcome."""
    for line in sys.stdin:
        case = Case(**json.loads(line))
        default_backend().options = default_backend().options.updated(
            {"ops": case.ops, "memory": case.memory, "device_type": case.device_type}
        )
        begin = time.perf_counter()
        try:
            outcome = run(folder / f"{case.model}.gguf", case)
        except Exception as error:
            outcome = Outcome(case, f"{type(error).__name__}: {error}", {})
        print(json.dumps(asdict(replace(outcome, seconds=time.perf_counter() - begin))), flush=True)


# processes


def outcomes(folder: Path, cases: Iterable[Case], *, text: bool = False, at_once: int = 2) -> Iterator[Outcome]:
    """Of each case, as they come, from processes: one for each device memory and type, another where one dies."""
    ordered = sorted(cases, key=lambda case: case.process)
    groups = [list(group) for _, group in groupby(ordered, key=lambda case: case.process)]
    found = SimpleQueue[Outcome]()
    free = Semaphore(at_once)
    for group in groups:
        Thread(target=_run_group, args=(folder, group, text, free, found.put), daemon=True).start()
    for _ in ordered:
        yield found.get()


def _run_group(folder: Path, cases: list[Case], text: bool, free: Semaphore, put: Callable[[Outcome], None]) -> None:
    """One case at a time, in processes that Ctrl-C does not reach: they end with their stdin."""
    command = [sys.executable, __file__, str(folder), "--work", *(["--text"] if text else [])]
    with free, ExitStack() as alive:
        process: subprocess.Popen[str] | None = None
        for case in cases:
            if process is None:
                process = alive.enter_context(
                    subprocess.Popen(
                        command, stdin=PIPE, stdout=PIPE, text=True, process_group=0
                    )  # Ctrl-C ends it by stdin
                )
            assert process.stdin is not None
            assert process.stdout is not None
            alarm = Timer(MOST_SECONDS, process.kill)
            alarm.start()
            print(json.dumps(asdict(case)), file=process.stdin, flush=True)
            line = process.stdout.readline()
            alarm.cancel()
            if line:
                put(Outcome.of(json.loads(line)))
            else:
                code = process.wait()
                why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                put(Outcome(case, f"the process ended with {why}", {}))
                process = None


def table(found: list[Outcome]) -> Table:
    """By model, and by each setting: how many cases, how many wrong, and what was counted in them."""
    counted = sorted({name for outcome in found for name in outcome.counts})
    rows = Table("", "cases", "wrong", *counted, "seconds")
    for column in rows.columns[1:]:
        column.justify = "right"

    def row(name: str, chosen: list[Outcome]) -> None:
        sums = [sum(outcome.counts.get(count, 0) for outcome in chosen) for count in counted]
        wrong = sum(not outcome for outcome in chosen)
        seconds = sum(outcome.seconds for outcome in chosen)
        rows.add_row(name, f"{len(chosen):,}", f"{wrong:,}", *(f"{count:,}" for count in sums), f"{seconds:,.0f}")

    for model in sorted({outcome.case.model for outcome in found}):
        row(model, [outcome for outcome in found if outcome.case.model == model])
    for setting, values in SETTINGS.items():
        rows.add_section()
        for value in values:
            row(
                f"{setting.replace('_', ' ')} {value}",
                [outcome for outcome in found if str(getattr(outcome.case, setting)) == value],
            )
    rows.add_section()
    row("all", found)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--sample", type=int, metavar="N", help="so many cases of the design")
    parser.add_argument("--seed", type=int, default=0, help="of the design, and of the sample")
    parser.add_argument("--models", default="", metavar="REGEX", help="those alone in whose names it is found")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    parser.add_argument("--text", action="store_true", help="generate text and compare it with the CPU's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="each case and what became of it")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"  # read by ggml when it aborts, here and in processes of its own
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the cores from the other processes'
    if options.work:
        work(options.folder, told if options.text else judged)
        return 0
    cases = chosen(options.folder, options.sample, options.seed, only=options.models)
    found: list[Outcome] = []
    try:
        for outcome in outcomes(options.folder, cases, text=options.text, at_once=options.processes):
            found.append(outcome)
            if not outcome:
                print(f"{outcome.case}: {outcome.why}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{len(found)} of {len(cases)} cases", file=sys.stderr)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in found], indent=1))
    return 0 if len(found) == len(cases) and all(found) else 1


def chosen(folder: Path, sample: int | None = None, seed: int = 0, only: str = "") -> list[Case]:
    """The design of the models in a folder, or a sample of it."""
    files = {file.stem: file for file in models(folder) if re.search(only, file.stem)}
    cases = design(files, lambda name, flash, cache: runs(files[name], flash, cache), seed)
    return cases if sample is None else random.Random(seed).sample(cases, min(sample, len(cases)))


if __name__ == "__main__":
    sys.exit(main())
