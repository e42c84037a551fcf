"""Whole models: how fast they decode, how long a diff takes, how long a fresh process takes to begin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ggml_backend_npu.abi.embedding import plugin
from graph_runner import suites
from graph_runner.bench.measure import GGML_CPU, Measurement, against, in_turns
from graph_runner.session import DeviceName, Sampler, Session, Settings, context_for, generate

_PROMPT = "The history of computing begins with " + "counting boards, gears, relays and valves; " * 12
_LONGER = _PROMPT + "counting boards, gears, relays and valves; " * 2


def bench_decode(model: Path, *, rounds: int, threads: int, n: int = 64) -> Iterator[Measurement]:
    """Prompt and n generated tokens with the movers on the NPU against the CPU alone, in turns."""
    speeds: dict[tuple[DeviceName, str], list[float]] = {}
    for round_ in range(rounds + 1):
        for device in ("npu", "cpu"):
            prompt, generation = _decode_once(model, device, n, threads)
            if round_:  # the first round warms up
                speeds.setdefault((device, "prompt"), []).append(prompt)
                speeds.setdefault((device, "generation"), []).append(generation)
    for what in ("prompt", "generation"):
        yield Measurement(what, "tokens/s", speeds["npu", what], {GGML_CPU: speeds["cpu", what]})


def _decode_once(model: Path, device: DeviceName, n: int, threads: int) -> tuple[float, float]:
    settings = Settings(device=device, n_ctx=context_for(_PROMPT, n), threads=threads)
    with Session(model, settings) as session:
        tokens = session.tokenize(_PROMPT)
        times = [time.perf_counter()]
        for _ in generate(session, tokens, n, Sampler()):
            times.append(time.perf_counter())
    return len(tokens) / (times[1] - times[0]), (len(times) - 2) / (times[-1] - times[1])


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
