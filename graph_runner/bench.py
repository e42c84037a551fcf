"""Benchmarks: both sides in one run, through the same door, interleaved; medians, and the median of paired ratios."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ggml_backend_npu.abi import lib
from ggml_backend_npu.abi.embedding import plugin
from graph_runner import suites
from graph_runner.session import DeviceName, Sampler, Session, Settings, context_for, generate


@dataclass(frozen=True)
class Measurement:
    """One line of a benchmark.

    values  one per round; reference: the same of what it is compared with, round by round, or empty
    unit    of the values: "s" (less is better) or "tokens/s" (more is better)
    """

    what: str
    values: list[float]
    reference: list[float]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        """Median over the rounds of value / reference."""
        if not self.reference:
            return None
        return statistics.median(a / b for a, b in zip(self.values, self.reference, strict=True))


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
