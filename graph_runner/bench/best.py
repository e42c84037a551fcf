"""llama.cpp at its best: its llama-bench and llama-batched-bench, compiled for this processor, with repacked weights,
without and with the plugin."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ggml_backend_npu.plugin.embedding import plugin
from graph_runner.base.errors import BenchError, SuiteError
from graph_runner.bench.measure import OURS, Measurement
from graph_runner.tools import suites

LLAMA_CPP = "llama.cpp"
_PROMPT, _GENERATED = 512, 32  # tokens of llama-bench
_SHORT, _FEW = 64, 16  # of each sequence of llama-batched-bench
_SEQUENCES = (1, 2, 4, 8, 16, 32)
_FLASH_ATTENTION = ("off", "on")
_SIDES = (OURS, LLAMA_CPP)
_BENCH, _BATCHED = "llama-bench", "llama-batched-bench"
# llama-batched-bench loads backends of GGML_BACKEND_PATH only to look up a buffer type that a tensor is to have
_LOADS = "-ot", "no_such_tensor=CPU"
# weights that llama.cpp's CPU repacks are its own: no other device may read them
_AS_THEY_ARE = {_BENCH: ("--repack", "0"), _BATCHED: ("--no-repack",)}

Speeds = dict[tuple[str, str], float]  # tokens/s by what was measured and flash attention


def bench_best(model: Path, *, rounds: int, threads: int) -> Iterator[Measurement]:
    """Measures tokens/s of a model in llama.cpp's own programs with every op on the NPU, against the same programs
    alone, in turns: a prompt of 512 tokens and 32 tokens after none (llama-bench); prompts of 64 tokens, and 16 tokens
    after them, of 1 to 32 sequences (llama-batched-bench). Each with flash attention off and on; llama.cpp's value is
    the better one of its two, with repacked weights. The first round is not counted.

    Raises SuiteError if the programs cannot be built or end with an error, BenchError if they do not have the plugin.
    """
    programs = suites.build(programs=suites.FASTEST)
    _check_batched(programs)
    found: dict[str, list[Speeds]] = defaultdict(list)
    for round_ in range(rounds + 1):
        for side in _SIDES[:: -1 if round_ % 2 else 1]:
            speeds = _speeds(programs, side, model, threads)
            if round_:
                found[side].append(speeds)
    ours, theirs = found[OURS], found[LLAMA_CPP]
    for what, flash in ours[0]:
        best = [max(each[what, setting] for setting in _FLASH_ATTENTION) for each in theirs]
        values = [each[what, flash] for each in ours]
        group = "sequences" if "sequence" in what else "llama-bench"
        yield Measurement(f"{what}, flash attention {flash}", "tokens/s", values, {LLAMA_CPP: best}, group=group)


def _with_plugin() -> list[str]:
    """The environment of our side, as words of env."""
    return [f"GGML_BACKEND_PATH={plugin()}", "GGML_NPU_OPS=all", "GGML_NO_BACKTRACE=1"]


def _check_batched(programs: Path) -> None:
    """Raises BenchError if llama-batched-bench, which does not say what it runs on, does not load the plugin: there is
    no buffer type NPU then."""
    words = ["-ot", _LOADS[1].replace("CPU", "NPU"), "--list-devices"]
    try:
        list(suites.printed_by(["env", *_with_plugin(), "GGML_NPU_MEMORY=device", str(programs / _BATCHED), *words]))
    except SuiteError as error:
        raise BenchError(f"{_BATCHED} has no device NPU: {error}") from None


def _speeds(programs: Path, side: str, model: Path, threads: int) -> Speeds:
    """Runs both programs."""
    speeds: Speeds = {}
    variables = _with_plugin() if side == OURS else ["-u", "GGML_BACKEND_PATH"]
    shared = ["-m", model, "-t", threads]
    as_they_are = _AS_THEY_ARE if side == OURS else {_BENCH: (), _BATCHED: ()}
    words = [*shared, "-p", _PROMPT, "-n", _GENERATED, "-r", 1, "-fa", "0,1", "-o", "jsonl", *as_they_are[_BENCH]]
    for row in _rows([*variables, programs / _BENCH, *words]):
        if side == OURS and "NPU" not in row["backends"]:
            raise BenchError(f"{_BENCH} has no device NPU, but {row['backends']}")
        what = f"prompt of {_PROMPT}" if row["n_prompt"] else f"{_GENERATED} tokens"
        speeds[what, _FLASH_ATTENTION[int(row["flash_attn"])]] = row["avg_ts"]
    cells = max(_SEQUENCES) * (_SHORT + _FEW)
    for flash in _FLASH_ATTENTION:
        counts = ",".join(map(str, _SEQUENCES))
        words = [
            *shared,
            "-npp",
            _SHORT,
            "-ntg",
            _FEW,
            "-npl",
            counts,
            "-c",
            cells,
            "-fa",
            flash,
            *_LOADS,
            *as_they_are[_BATCHED],
        ]
        for row in _rows([*variables, programs / _BATCHED, *words, "--output-format", "jsonl"]):
            n = f"{row['pl']} sequence{'s' if row['pl'] > 1 else ''}"
            speeds[f"prompt of {_SHORT}, {n}", flash] = row["speed_pp"]
            speeds[f"{_FEW} tokens, {n}", flash] = row["speed_tg"]
    return speeds


def _rows(words: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Yields what a program prints as JSON, a line each. Words are those of env."""
    for line in suites.output_of(["env", *map(str, words)]):
        if line.startswith("{"):
            yield json.loads(line)
