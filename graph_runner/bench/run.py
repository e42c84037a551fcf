"""Benchmarks by name, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from graph_runner.bench.calls import bench_calls
from graph_runner.bench.codecs import bench_codecs
from graph_runner.bench.measure import Header, Measurement, cores, header
from graph_runner.bench.memcpy import bench_memcpy
from graph_runner.bench.models import bench_decode, bench_diff, bench_start
from graph_runner.bench.movers import bench_movers
from graph_runner.bench.operators import bench_operators
from graph_runner.models import model_file

WITH_BANDWIDTH = ("movers", "codecs")
_WITH_MODEL = ("decode", "diff", "start")


@dataclass(frozen=True)
class BenchResult:
    """What benchmarks found, by their names; "memcpy" is beside those that have a bandwidth."""

    header: Header
    measurements: dict[str, list[Measurement]]


def bench(
    names: Collection[str],
    *,
    model: str = "demo",
    rounds: int = 5,
    threads: int = 0,
    seen: Callable[[str, Measurement], object] = lambda name, found: None,
) -> BenchResult:
    """Runs benchmarks, in the order of their names.

    names    of movers, codecs, calls, decode, operators, diff, start
    model    as on the command line, for those that run one
    rounds   behind one that warms up
    threads  of the CPU and of the kernels; 0 = all cores
    seen     called with each measurement as it comes

    Raises SessionError for a model that cannot be used, before anything is measured, and RuntimeError where a node
    fails or bytes differ that have to be equal.
    """
    threads = threads or cores()
    result = BenchResult(header(rounds=rounds, threads=threads), {})
    benchmarks: dict[str, Callable[[], Iterator[Measurement]]] = {
        "memcpy": partial(bench_memcpy, rounds=rounds, threads=threads),
        "movers": partial(bench_movers, rounds=rounds, threads=threads),
        "codecs": partial(bench_codecs, rounds=rounds, threads=threads),
        "calls": partial(bench_calls, rounds=rounds, threads=threads),
        "operators": partial(bench_operators, rounds=rounds, threads=threads),
    }
    with ExitStack() as stack:
        if any(name in _WITH_MODEL for name in names):
            file = stack.enter_context(model_file(model))
            benchmarks |= {
                "decode": partial(bench_decode, file, rounds=rounds, threads=threads),
                "diff": partial(bench_diff, file, rounds=rounds, threads=threads),
                "start": partial(bench_start, file, rounds=rounds, threads=threads),
            }
        roof = ["memcpy"] if any(name in WITH_BANDWIDTH for name in names) else []
        for name in [*roof, *names]:
            for found in benchmarks[name]():
                result.measurements.setdefault(name, []).append(found)
                seen(name, found)
    return result
