"""Whole models: how fast they decode, how long a diff takes, how long a fresh process takes to begin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ggml_backend_npu.abi.embedding import plugin
from graph_runner import suites
from graph_runner.bench.measure import GGML_CPU, Measurement, against, in_turns
from graph_runner.session import Session, Settings, context_for

_PROMPT = "The history of computing begins with " + "counting boards, gears, relays and valves; " * 12
_LONGER = _PROMPT + "counting boards, gears, relays and valves; " * 2


def bench_decode(model: Path, *, rounds: int, threads: int, n: int = 64) -> Iterator[Measurement]:
    """A prompt, four times, and n tokens behind it one by one, with the movers on the NPU against the CPU alone.

    Both are open at once and take turns, within a round after every 8 tokens.
    """
    settings = Settings(n_ctx=context_for(_PROMPT, n), threads=threads)
    speeds: dict[str, dict[str, list[float]]] = {"prompt": {}, "generation": {}}
    with (
        Session(model, replace(settings, device="npu"), counts_nodes=False) as npu,
        Session(model, replace(settings, device="cpu"), counts_nodes=False) as cpu,
    ):
        tokens = npu.tokenize(_PROMPT)
        steps = [[token] for token in (tokens * n)[:n]]
        turns = [*[("prompt", [tokens])] * 4, *(("generation", steps[i : i + 8]) for i in range(0, n, 8))]
        for round_ in range(rounds + 1):
            seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
            for turn, (what, batches) in enumerate(turns):
                for name, session in [("NPU", npu), (GGML_CPU, cpu)][:: -1 if (turn + round_) % 2 else 1]:
                    if what == "prompt":
                        session.clear()
                    seconds[what, name] += _decode(session, batches)
            if round_:  # the first round warms up
                for (what, name), time_ in seconds.items():
                    count = 4 * len(tokens) if what == "prompt" else n
                    speeds[what].setdefault(name, []).append(count / time_)
    for what, found in speeds.items():
        yield Measurement(what, "tokens/s", found["NPU"], {GGML_CPU: found[GGML_CPU]})


def _decode(session: Session, batches: list[list[int]]) -> float:
    """Seconds that a session takes for batches of tokens."""
    begin = time.perf_counter()
    for batch in batches:
        session.decode(batch)
    return time.perf_counter() - begin


def bench_diff(model: Path, *, rounds: int, threads: int, n: int = 16) -> Iterator[Measurement]:
    """Whole commands: a diff of a prompt of some 128 tokens and n steps, and a run of the same."""
    options = ["-p", _LONGER, "--threads", str(threads)]
    jobs = {
        "a diff": _process(_command(), "diff", str(model), "-n", str(n), *options),
        "a run": _process(_command(), "run", str(model), "-n", str(n + 1), *options),
    }
    yield against(in_turns(jobs, rounds, unit="s"), "a diff", "s")


def bench_start(model: Path, *, rounds: int, threads: int) -> Iterator[Measurement]:
    """Fresh processes, kernels already compiled: import and register, and a whole diff of the model.

    Where ggml's own programs have been built, also the plugin in one of them: test-backend-ops that lists its devices.
    """
    jobs = {
        "import and register": _process(sys.executable, "-c", "import ggml_backend_npu; ggml_backend_npu.register()"),
        "diff": _process(_command(), "diff", str(model), "--threads", str(threads)),
        "Python itself": _process(sys.executable, "-c", "pass"),
    }
    if suites.folder().is_dir():
        lists_devices = [str(suites.folder() / "test-backend-ops"), "-b", "none"]
        jobs["plugin in a ggml program"] = _process(*lists_devices, GGML_BACKEND_PATH=str(plugin()))
    for what, values in in_turns(jobs, rounds, unit="s").items():
        yield Measurement(what, "s", values)


def _command() -> str:
    return shutil.which("ggml-npu", path=str(Path(sys.executable).parent)) or "ggml-npu"


def _process(*command: str, **environment: str) -> Callable[[], object]:
    """A process that has to end with 0."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return partial(subprocess.run, command, env={**os.environ, **environment}, check=True, **silent)
