"""How this project measures: both sides in one run, through the same interface, in turns; medians of paired rounds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from ggml_backend_npu.ggml import lib, llama
from quant.kernels.processor import processor_name, processors

ELEMENTS = 1 << 24  # of a benchmark of bandwidth: 64 MiB of float32
OURS, GGML_CPU = "ggml-npu", "ggml CPU"
GGML = "ggml"  # its functions, without a graph

_QUIET = 0.02  # seconds in front of a measurement: for so long the CPU's threads spin when they have nothing to do
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class Measurement:
    """One line of a benchmark.

    what    what is measured
    unit    of the values: "s", "ms", "us" or "MB" (less is better), "tokens/s" (more is better)
    values  our values, one per round
    others  values of what it is compared with, by name, one per round
    nbytes  bytes of the work's wider side (the float side if there is one), for a bandwidth; 0 if that says nothing
    group   the heading that it is shown under
    """

    what: str
    unit: str
    values: list[float]
    others: Mapping[str, list[float]] = field(default_factory=dict)
    nbytes: int = 0
    group: str = ""

    @property
    def median(self) -> float:
        """The median of our values, in `unit`."""
        return statistics.median(self.values)

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller value is better: true for every unit but tokens/s."""
        return self.unit != "tokens/s"

    def ratio(self, other: str) -> float:
        """Returns how many times as fast as `other` ours is (for MB: how many times as small), as the median over the
        rounds."""
        pairs = zip(self.values, self.others[other], strict=True)
        return statistics.median(b / a if self.less_is_better else a / b for a, b in pairs)

    def bandwidth(self, other: str | None = None) -> float:
        """Returns the median bandwidth in bytes per second: ours, or that of `other` by its name in `others`."""
        values = self.values if other is None else self.others[other]
        return self.nbytes / (statistics.median(values) * _SECONDS[self.unit])


def in_turns(
    jobs: Mapping[str, Callable[[], object]], rounds: int, *, unit: str = "ms", calls: int = 1, quiet: float = _QUIET
) -> dict[str, list[float]]:
    """Times each job and returns one value per round, after one warm-up round. The order of the jobs is reversed each
    round.

    unit   "s", "ms" or "us"
    calls  calls of a job in each of its turns; the value is their median
    quiet  seconds to sleep before each turn
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for round_ in range(rounds + 1):
        for name in list(jobs)[:: -1 if round_ % 2 else 1]:
            time.sleep(quiet)
            value = _median_time(jobs[name], calls) / _SECONDS[unit]
            if round_:
                times[name].append(value)
    return times


def _median_time(job: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        job()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def against(times: dict[str, list[float]], what: str, unit: str, *, nbytes: int = 0, group: str = "") -> Measurement:
    """Makes a measurement of what `in_turns` returned in `unit`: the first job is ours, the others are compared with
    it."""
    (_, values), *others = times.items()
    return Measurement(what, unit, values, dict(others), nbytes, group)


def groups(measurements: Iterable[Measurement]) -> dict[str, list[Measurement]]:
    """Returns measurements by heading, both in their original order."""
    found: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        found.setdefault(measurement.group, []).append(measurement)
    return found


def geometric_mean(measurements: Sequence[Measurement], other: str) -> float:
    """Returns the geometric mean of the ratios to `other`."""
    return statistics.geometric_mean(found.ratio(other) for found in measurements)


def worst(measurements: Sequence[Measurement], other: str) -> Measurement:
    """Returns the measurement with the smallest ratio to `other`."""
    return min(measurements, key=lambda found: found.ratio(other))


def cores() -> int:
    """Returns the number of threads that stands for "all cores"."""
    return processors()


@dataclass(frozen=True)
class Header:
    """The machine, versions and options of a benchmark."""

    machine: str
    cores: int
    python: str
    numpy: str
    numba: str
    ggml: str
    llama_cpp_python: str
    gguf: str
    threads: int
    rounds: int

    def __str__(self) -> str:
        return (
            f"{self.machine}, {count(self.cores, 'core')}; "
            f"Python {self.python}, numpy {self.numpy}, numba {self.numba}, ggml {self.ggml} "
            f"(llama-cpp-python {self.llama_cpp_python}), gguf {self.gguf}; "
            f"{count(self.threads, 'thread')}, {count(self.rounds, 'round')}"
        )


def count(n: int, what: str) -> str:
    """Returns a number with its noun: 1 round, 2 rounds."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def header(*, rounds: int, threads: int) -> Header:
    """Returns the header for measurements on this machine."""
    packages = ("numpy", "numba", "gguf")
    return Header(
        machine=processor_name(),
        cores=cores(),
        python=platform.python_version(),
        ggml=lib.ggml().version,
        llama_cpp_python=llama.version(),
        threads=threads,
        rounds=rounds,
        **{package: version(package) for package in packages},
    )
