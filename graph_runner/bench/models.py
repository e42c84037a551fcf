"""Whole models: how fast they decode, how long a diff takes, how long a new process takes to start."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import ggml_backend_npu
from ggml_backend_npu.plugin.embedding import plugin
from ggml_backend_npu.plugin.plugin import Plugin
from graph_runner.base.errors import BenchError
from graph_runner.base.python import environment, python
from graph_runner.bench.measure import GGML_CPU, Measurement, against, in_turns
from graph_runner.bench.memory import bench_memory
from graph_runner.run.session import Session, Settings, context_for
from graph_runner.tools import suites
from quant.folders import FolderError

MOVERS, EVERY_NODE = "movers on the NPU", "every node on the NPU"
_PROMPT = "The history of computing begins with " + "counting boards, gears, relays and valves; " * 12
_OF_A_NEW_LENGTH, _NEW = "prompt of a new length", 64  # tokens of the first one
_LONGER = _PROMPT + "counting boards, gears, relays and valves; " * 2


def bench_decode(model: Path, *, rounds: int, threads: int, n: int = 64, long: int = 512) -> Iterator[Measurement]:
    """Measures tokens/s of a prompt (four times), of a prompt of `long` tokens, of one whose length is new in each
    round, and of n tokens decoded one by one: with the movers on the NPU and with every node on the NPU, against the
    CPU alone. Then of tokens of 4 and 16 sequences decoded together with every node on the NPU, and the memory of a
    process with that.

    All sessions are open at once and take turns; within a round they switch after every 8 generated tokens.

    Raises BenchError for a model with an encoder, and if the memory cannot be measured.
    """
    settings = Settings(n_ctx=max(context_for(_PROMPT, n), long), threads=threads, text=True)
    ours = ggml_backend_npu.register()
    npus = {
        name: Plugin(ours.ggml, ours.backend.like(options=ours.backend.options.updated({"ops": ops})))
        for name, ops in ((MOVERS, "default"), (EVERY_NODE, "all"))
    }
    speeds: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        sessions = []
        for name in (*npus, GGML_CPU):
            npu = npus.get(name)
            whose = replace(settings, device="cpu" if npu is None else "npu")
            session = stack.enter_context(Session(model, whose, npu=npu, counts_nodes=False))
            sessions.append((name, session))
        if session.encodes:
            raise BenchError(f"model {str(model)!r}: has an encoder; models that only decode are measured")
        tokens = session.tokenize(_PROMPT)
        many = (tokens * long)[:long]
        steps = [[token] for token in (tokens * n)[:n]]
        always = [(f"prompt of {long}", [many]), *[("prompt", [tokens])] * 4]
        always += [("generation", steps[i : i + 8]) for i in range(0, n, 8)]
        for round_ in range(rounds + 1):
            seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
            new = many[: _NEW + round_]
            turns = [(_OF_A_NEW_LENGTH, [new]), *always]
            for turn, (what, batches) in enumerate(turns):
                for name, session in sessions[:: -1 if (turn + round_) % 2 else 1]:
                    if what != "generation":
                        session.clear()
                    seconds[what, name] += _decode(session, batches)
            if round_:  # the first round warms up
                counts = {"prompt": 4 * len(tokens), "generation": n, _OF_A_NEW_LENGTH: len(new)}
                for (what, name), time_ in seconds.items():
                    speeds[what, name].append(counts.get(what, long) / time_)
    for name in (MOVERS, EVERY_NODE):
        for what in dict.fromkeys(what for what, _ in turns):
            others = {GGML_CPU: speeds[what, GGML_CPU]}
            yield Measurement(f"{what}, {name}", "tokens/s", speeds[what, name], others, group=name)
    for sequences in (4, 16):
        yield _bench_together(model, npus[EVERY_NODE], tokens, n, replace(settings, sequences=sequences), rounds)
    yield bench_memory(model, many, threads=threads)


def _bench_together(
    model: Path, npu: Plugin, tokens: list[int], n: int, settings: Settings, rounds: int
) -> Measurement:
    """Measures tokens/s of several sequences, of which each batch has one token; they switch after every 8 batches."""
    batches = [[[token]] * settings.sequences for token in (tokens * n)[: max(8, n // 4)]]
    speeds: dict[str, list[float]] = {EVERY_NODE: [], GGML_CPU: []}
    with ExitStack() as stack:
        sessions = {
            EVERY_NODE: stack.enter_context(
                Session(model, replace(settings, device="npu"), npu=npu, counts_nodes=False)
            ),
            GGML_CPU: stack.enter_context(Session(model, replace(settings, device="cpu"), counts_nodes=False)),
        }
        for round_ in range(rounds + 1):
            seconds: defaultdict[str, float] = defaultdict(float)
            for session in sessions.values():
                session.clear()
                session.decode(*[tokens[:32]] * settings.sequences)
            for begin in range(0, len(batches), 8):
                for name in [*sessions][:: -1 if (begin // 8 + round_) % 2 else 1]:
                    start = time.perf_counter()
                    for batch in batches[begin : begin + 8]:
                        sessions[name].decode(*batch)
                    seconds[name] += time.perf_counter() - start
            if round_:  # the first round warms up
                for name, time_ in seconds.items():
                    speeds[name].append(settings.sequences * len(batches) / time_)
    what = f"{settings.sequences} sequences, {EVERY_NODE}"
    return Measurement(what, "tokens/s", speeds[EVERY_NODE], {GGML_CPU: speeds[GGML_CPU]}, group="sequences")


def _decode(session: Session, batches: list[list[int]]) -> float:
    """Returns the seconds that a session takes to decode batches of tokens."""
    begin = time.perf_counter()
    for batch in batches:
        session.decode(batch)
    return time.perf_counter() - begin


def bench_diff(model: Path, *, rounds: int, threads: int, n: int = 16) -> Iterator[Measurement]:
    """Measures whole commands, in seconds: a diff of a prompt of some 128 tokens and n steps, against a run of the
    same."""
    options = ["-p", _LONGER, "--threads", str(threads)]
    jobs = {
        "a diff": _process(_command(), "diff", str(model), "-n", str(n), *options),
        "a run": _process(_command(), "run", str(model), "-n", str(n + 1), *options),
    }
    yield against(in_turns(jobs, rounds, unit="s"), "a diff", "s")


def bench_start(model: Path, *, rounds: int, threads: int) -> Iterator[Measurement]:
    """Measures new processes, in seconds, with kernels already compiled: import and register, and a whole diff of the
    model.

    If ggml's own programs have been built, also the plugin in one of them: test-backend-ops, which lists its devices.
    """
    jobs = {
        "import and register": _process(*python("-c", "import ggml_backend_npu; ggml_backend_npu.register()")),
        "diff": _process(_command(), "diff", str(model), "--threads", str(threads)),
        "Python itself": _process(*python("-c", "pass")),
    }
    with suppress(FolderError):  # nothing is built for a user without a home
        if suites.folder().is_dir():
            lists_devices = [str(suites.folder() / "test-backend-ops"), "-b", "none"]
            jobs["plugin in a ggml program"] = _process(*lists_devices, GGML_BACKEND_PATH=str(plugin()))
    for what, values in in_turns(jobs, rounds, unit="s").items():
        yield Measurement(what, "s", values)


def _command() -> str:
    return shutil.which("ggml-npu", path=str(Path(sys.executable).parent)) or "ggml-npu"


def _process(*command: str, **variables: str) -> Callable[[], object]:
    """Returns a call that runs a command, which has to end with exit code 0."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return partial(subprocess.run, command, env=environment(**variables), check=True, **silent)
