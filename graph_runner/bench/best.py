"""llama.cpp at its best: its llama-bench and llama-batched-bench, compiled for this processor, with repacked weights,
without and with the plugin. By default, and after many tokens."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
_NEW = (32, 64, 100, 333)  # tokens of prompts of llama-batched-bench, one after the other
_DEPTHS = (0, 1024, 4096)  # tokens before those of llama-bench, with any setting of flash attention
_DEEP = 16384  # tokens before them, with flash attention
_CACHES = ("q8_0", "q4_0", "q4_1", "q5_0")  # types of the cache besides f16, after the last of _DEPTHS
_FLASH_ATTENTION = ("off", "on")
_SIDES = (OURS, LLAMA_CPP)
_BENCH, _BATCHED = "llama-bench", "llama-batched-bench"
_GROUPS = {"sequence": "sequences", "new length": "new lengths", "cache": "caches"}  # the heading, by a word
# llama-batched-bench loads backends of GGML_BACKEND_PATH only to look up a buffer type that a tensor is to have
_LOADS = "-ot", "no_such_tensor=CPU"
# weights that llama.cpp's CPU repacks are its own: no other device may read them
_AS_THEY_ARE = {_BENCH: ("--repack", "0"), _BATCHED: ("--no-repack",)}

Speeds = dict[tuple[str, str], float]  # tokens/s by what was measured and flash attention


def bench_best(model: Path, *, rounds: int, threads: int) -> Iterator[Measurement]:
    """Measures tokens/s of a model in llama.cpp's own programs with every op on the NPU, against the same programs
    alone, in turns: a prompt of 512 tokens and 32 tokens after none (llama-bench); prompts of 64 tokens, and 16 tokens
    after them, of 1 to 32 sequences, and prompts of lengths that are new to the process (llama-batched-bench). Each
    with flash attention off and on; llama.cpp's value is the better one of its two, with repacked weights. The first
    round is not counted.

    Raises SuiteError if the programs cannot be built or end with an error, BenchError if they do not have the plugin.
    """
    programs = suites.build(programs=suites.FASTEST)
    _check_batched(programs)
    yield from _against_best(
        lambda side: _llama_bench(programs, side, model, threads) | _batched_bench(programs, side, model, threads),
        rounds,
        warm=True,
    )


def bench_depth(model: Path, *, rounds: int, threads: int) -> Iterator[Measurement]:
    """Measures as `bench_best` a prompt of 512 tokens and 32 tokens after 0, 1,024, 4,096 and 16,384 others, the last
    with flash attention alone; then after 4,096 with other types of the cache, which need flash attention too. No round
    warms up: llama-bench does."""
    programs = suites.build(programs=suites.FASTEST)

    def speeds(side: str) -> Speeds:
        found: Speeds = {}
        for depths, cache, flash in [
            (_DEPTHS, "f16", "0,1"),
            ((_DEEP,), "f16", "1"),
            *[(_DEPTHS[-1:], cache, "1") for cache in _CACHES],
        ]:
            options = ("-d", ",".join(map(str, depths)), "-ctk", cache, "-ctv", cache)
            found |= _llama_bench(programs, side, model, threads, *options, flash=flash)
        return found

    yield from _against_best(speeds, rounds, warm=False)


def _against_best(speeds: Callable[[str], Speeds], rounds: int, *, warm: bool) -> Iterator[Measurement]:
    """Measures both sides in turns; the better setting of flash attention of the other side counts."""
    found: dict[str, list[Speeds]] = defaultdict(list)
    for round_ in range(rounds + warm):
        for side in _SIDES[:: -1 if round_ % 2 else 1]:
            measured = speeds(side)
            if round_ or not warm:
                found[side].append(measured)
    ours, theirs = found[OURS], found[LLAMA_CPP]
    for what, flash in ours[0]:
        best = [max(each[what, setting] for setting in _FLASH_ATTENTION if (what, setting) in each) for each in theirs]
        values = [each[what, flash] for each in ours]
        group = next((group for word, group in _GROUPS.items() if word in what), _BENCH)
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


def _variables(side: str) -> list[str]:
    """The environment of a side, as words of env."""
    return _with_plugin() if side == OURS else ["-u", "GGML_BACKEND_PATH"]


def _llama_bench(programs: Path, side: str, model: Path, threads: int, *options: str, flash: str = "0,1") -> Speeds:
    speeds: Speeds = {}
    words = ["-m", model, "-t", threads, "-p", _PROMPT, "-n", _GENERATED, "-r", 1, "-fa", flash, "-o", "jsonl"]
    as_they_are = _AS_THEY_ARE[_BENCH] if side == OURS else ()
    for row in _rows([*_variables(side), programs / _BENCH, *words, *options, *as_they_are]):
        if side == OURS and "NPU" not in row["backends"]:
            raise BenchError(f"{_BENCH} has no device NPU, but {row['backends']}")
        what = f"prompt of {_PROMPT}" if row["n_prompt"] else f"{_GENERATED} tokens"
        if row["n_depth"]:
            what += f" after {row['n_depth']:,}"
        if row["type_k"] != "f16":
            what += f", cache of {row['type_k']}"
        speeds[what, _FLASH_ATTENTION[int(row["flash_attn"])]] = row["avg_ts"]
    return speeds


def _batched_bench(programs: Path, side: str, model: Path, threads: int) -> Speeds:
    speeds: Speeds = {}
    cells = max(_SEQUENCES) * (_SHORT + _FEW)
    as_they_are = _AS_THEY_ARE[_BATCHED] if side == OURS else ()
    for flash in _FLASH_ATTENTION:
        shared = [*_variables(side), programs / _BATCHED, "-m", model, "-t", threads, "-c", cells, "-fa", flash]
        shared += [*_LOADS, *as_they_are, "--output-format", "jsonl"]
        counts, lengths = (",".join(map(str, each)) for each in (_SEQUENCES, _NEW))
        for row in _rows([*shared, "-npp", _SHORT, "-ntg", _FEW, "-npl", counts]):
            n = f"{row['pl']} sequence{'s' if row['pl'] > 1 else ''}"
            speeds[f"prompt of {_SHORT}, {n}", flash] = row["speed_pp"]
            speeds[f"{_FEW} tokens, {n}", flash] = row["speed_tg"]
        for row in _rows([*shared, "-npp", lengths, "-ntg", 1, "-npl", 1]):
            speeds[f"prompt of {row['pp']}, a new length", flash] = row["speed_pp"]
    return speeds


def _rows(words: Sequence[object]) -> Iterator[dict[str, Any]]:
    """Yields what a program prints as JSON, a line each. Words are those of env."""
    for line in suites.output_of(["env", *map(str, words)]):
        if line.startswith("{"):
            yield json.loads(line)
