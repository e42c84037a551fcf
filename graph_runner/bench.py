"""Benchmarks: both sides in one run, through the same door, interleaved; medians, and the median of paired ratios."""

from __future__ import annotations

import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import ggml_backend_npu
from ggml_backend_npu.abi import lib
from ggml_backend_npu.abi.build import Builder
from ggml_backend_npu.abi.embedding import plugin
from graph_runner import suites
from graph_runner.session import DeviceName, Sampler, Session, Settings, context_for, generate

_QUIET = 0.02  # seconds in front of a measurement: for so long the CPU's threads spin when they have nothing to do


@dataclass(frozen=True)
class Measurement:
    """One line of a benchmark.

    values  one per round; reference: the same of what it is compared with, round by round, or empty
    unit    of the values: "s" or "ms" (less is better), "tokens/s" (more is better)
    """

    what: str
    values: list[float]
    reference: list[float]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def less_is_better(self) -> bool:
        return self.unit in ("s", "ms")

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of how many times as fast as the reference it is."""
        if not self.reference:
            return None
        pairs = zip(self.values, self.reference, strict=True)
        return statistics.median(b / a if self.less_is_better else a / b for a, b in pairs)


def machine() -> str:
    """What the numbers were measured on."""
    names = [line.split(":", 1)[1] for line in _cpuinfo() if line.startswith("model name")]
    model = names[0].strip() if names else platform.machine()
    return f"{model}, {len(names)} cores, Python {platform.python_version()}, ggml {lib.ggml().version}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def bench_decode(model: Path, *, rounds: int = 5, n: int = 64, threads: int = 0) -> list[Measurement]:
    """Prompt and generation with the movers on the NPU against the CPU alone, in turns."""
    prompt = "The history of computing begins with " + "counting boards, gears, relays and valves; " * 12
    speeds: dict[tuple[DeviceName, str], list[float]] = {}
    for round_ in range(rounds + 1):
        for device in ("npu", "cpu"):
            prompt_speed, speed = _decode_once(model, device, prompt, n, threads)
            if round_:  # the first round warms up
                speeds.setdefault((device, "prompt"), []).append(prompt_speed)
                speeds.setdefault((device, "generation"), []).append(speed)
    return [
        Measurement(f"{what}, NPU against CPU", speeds["npu", what], speeds["cpu", what], "tokens/s")
        for what in ("prompt", "generation")
    ]


def _decode_once(model: Path, device: DeviceName, prompt: str, n: int, threads: int) -> tuple[float, float]:
    settings = Settings(device=device, n_ctx=context_for(prompt, n), threads=threads)
    with Session(model, settings) as session:
        tokens = session.tokenize(prompt)
        times = [time.perf_counter()]
        for _ in generate(session, tokens, n, Sampler()):
            times.append(time.perf_counter())
    return len(tokens) / (times[1] - times[0]), (len(times) - 2) / (times[-1] - times[1])


def bench_diff(model: Path, *, rounds: int = 5) -> list[Measurement]:
    """Whole commands: a diff of a prompt of some 128 tokens and 16 steps, and a run of the same."""
    command = shutil.which("ggml-npu", path=str(Path(sys.executable).parent)) or "ggml-npu"
    prompt = "The history of computing begins with " + "counting boards, gears, relays and valves; " * 14
    jobs = {
        "diff": [command, "diff", str(model), "-p", prompt, "-n", "16"],
        "run": [command, "run", str(model), "-p", prompt, "-n", "17"],
    }
    times: dict[str, list[float]] = {what: [] for what in jobs}
    for round_ in range(rounds + 1):
        for what, job in jobs.items():
            begin = time.perf_counter()
            subprocess.run(job, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if round_:
                times[what].append(time.perf_counter() - begin)
    return [Measurement("a diff, against a run", times["diff"], times["run"], "s")]


def bench_start(model: Path, *, rounds: int = 5) -> list[Measurement]:
    """Fresh processes, kernels already compiled: import and register, and a whole diff of the model.

    Where ggml's own programs have been built, also the plugin in one of them: test-backend-ops that lists its devices.
    """
    register = [sys.executable, "-c", "import ggml_backend_npu; ggml_backend_npu.register()"]
    command = shutil.which("ggml-npu", path=str(Path(sys.executable).parent)) or "ggml-npu"
    jobs = {
        "import and register": register,
        "diff": [command, "diff", str(model)],
        "Python itself": [sys.executable, "-c", "pass"],
    }
    if suites.folder().is_dir():
        jobs["plugin in a ggml program"] = [str(suites.folder() / "test-backend-ops"), "-b", "none"]
    times: dict[str, list[float]] = {what: [] for what in jobs}
    environment = {**os.environ, "GGML_BACKEND_PATH": str(plugin())}
    for round_ in range(rounds + 1):
        for what, job in jobs.items():
            begin = time.perf_counter()
            subprocess.run(job, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if round_:
                times[what].append(time.perf_counter() - begin)
    return [Measurement(what, values, [], "s") for what, values in times.items()]


@dataclass(frozen=True)
class Pattern:
    """A piece of a model's graph that the NPU runs as one operator.

    fusion  the operator's name
    build   makes inputs and nodes; returns the output
    """

    what: str
    fusion: str
    build: Callable[[Builder], int]


def _token_shift(build: Builder, width: int = 4096, n_tokens: int = 512) -> int:
    """RWKV-7's time mix: SUB, REPEAT, MUL, ADD."""
    previous, x = (build.tensor("f32", (width, n_tokens)) for _ in range(2))
    mu = build.tensor("f32", (width, 1, 1, 6))
    wide = build.tensor("f32", (width, n_tokens, 1, 6))
    difference = build.op("repeat", build.op("sub", previous, x), wide)
    return build.op("add", build.op("mul", difference, mu), x)


def _routing(build: Builder, n_expert: int = 128, k: int = 8, n_tokens: int = 4096) -> int:
    """A mixture of experts: SOFT_MAX, ARGSORT, GET_ROWS, SUM_ROWS, CLAMP, DIV."""
    logits = build.tensor("f32", (n_expert, n_tokens))
    p = build.op("soft_max_ext", logits, None, 1.0, 0.0)
    whole = 4 * n_expert
    ids = build.view(build.op("argsort", p, 1), (k, n_tokens, 1, 1), (whole, whole * n_tokens, whole * n_tokens))
    chosen = build.op("get_rows", build.op("reshape_4d", p, 1, n_expert, n_tokens, 1), ids)
    weights = build.op("reshape_4d", chosen, k, n_tokens, 1, 1)
    total = build.op("clamp", build.op("sum_rows", weights), 2.0**-14, math.inf)
    return build.op("div", weights, total)


PATTERNS = [
    Pattern("token_shift, C 4096, T 512", "token_shift", _token_shift),
    Pattern("TopKSoftmax, 128 experts, k 8, N 4096", "TopKSoftmax", _routing),
]


def bench_operators(*, rounds: int = 5, threads: int = 0) -> list[Measurement]:
    """Patterns as one operator on the NPU, and the same nodes on ggml's CPU: the same graph, through
    ggml_backend_graph_compute."""
    npu = ggml_backend_npu.register()
    found = []
    for pattern in PATTERNS:
        times: dict[str, list[float]] = {"NPU": [], "CPU": []}
        with ExitStack() as stack:
            runs = {}
            for device in times:
                build = stack.enter_context(Builder(npu.ggml, device))
                build.use_threads(threads or os.cpu_count() or 1)
                graph = build.graph(pattern.build(build))
                rng = np.random.default_rng(0)
                for tensor in build.inputs:
                    if build.is_allocated(tensor):
                        build.set(tensor, rng.standard_normal(build.nbytes(tensor) // 4, dtype=np.float32))
                runs[device] = partial(build.run, graph)
            before = npu.statistics.fused[pattern.fusion]
            for round_ in range(4 * rounds + 1):
                for device, run in runs.items():
                    time.sleep(_QUIET)
                    begin = time.perf_counter()
                    status = run()
                    if round_:
                        times[device].append(1e3 * (time.perf_counter() - begin))
                    if status != 0:
                        raise RuntimeError(f"{pattern.what} on {device}: {npu.statistics.error}")
            if npu.statistics.fused[pattern.fusion] - before != 4 * rounds + 1:
                raise RuntimeError(f"{pattern.what}: the NPU did not run it as {pattern.fusion}")
        found.append(Measurement(f"{pattern.what}, NPU against CPU", times["NPU"], times["CPU"], "ms"))
    return found
