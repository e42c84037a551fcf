"""Benchmarks by name, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from graph_runner.base.models import model_file
from graph_runner.bench.best import bench_best, bench_depth
from graph_runner.bench.calls import bench_calls
from graph_runner.bench.codecs import bench_codecs
from graph_runner.bench.measure import ELEMENTS, Header, Measurement, cores, header
from graph_runner.bench.memcpy import bench_memcpy
from graph_runner.bench.models import bench_decode, bench_diff, bench_start
from graph_runner.bench.movers import bench_movers
from graph_runner.bench.operators import bench_operators
from graph_runner.bench.ops import bench_ops
from graph_runner.bench.splits import bench_splits

WITH_BANDWIDTH = ("movers", "codecs")
_WITH_MODEL = ("decode", "diff", "start", "best", "depth")


@dataclass(frozen=True)
class BenchResult:
    """Results of benchmarks by name; "memcpy" is added if one of them has a bandwidth."""

    header: Header
    measurements: dict[str, list[Measurement]]


def bench(
    names: Collection[str],
    *,
    model: str = "demo",
    rounds: int = 5,
    threads: int = 0,
    mib: int | None = None,
    seen: Callable[[str, Measurement], object] = lambda name, found: None,
) -> BenchResult:
    """Runs benchmarks in the given order.

    names    any of movers, codecs, calls, splits, decode, operators, ops, diff, start, best, depth
    model    as on the command line, for the benchmarks that run a model
    rounds   rounds to measure, after one warm-up round
    threads  of the CPU and of the kernels; 0 = all cores
    mib      MiB of float32 that memcpy, movers and codecs move; None: 64
    seen     called with each measurement when it is done

    Raises SessionError for a model that cannot be used, before anything is measured; RuntimeError if a node fails or
    bytes that have to be equal differ; BenchError if the memory of a process cannot be measured; SuiteError if
    llama.cpp's programs cannot be built.
    """
    threads = threads or cores()
    result = BenchResult(header(rounds=rounds, threads=threads), {})
    elements = ELEMENTS if mib is None else mib << 18
    benchmarks: dict[str, Callable[[], Iterator[Measurement]]] = {
        "memcpy": partial(bench_memcpy, rounds=rounds, threads=threads, elements=elements),
        "movers": partial(bench_movers, rounds=rounds, threads=threads, elements=elements),
        "codecs": partial(bench_codecs, rounds=rounds, threads=threads, elements=elements),
        "calls": partial(bench_calls, rounds=rounds, threads=threads),
        "splits": partial(bench_splits, rounds=rounds, threads=threads),
        "operators": partial(bench_operators, rounds=rounds, threads=threads),
        "ops": partial(bench_ops, rounds=rounds, threads=threads),
    }
    with ExitStack() as stack:
        if any(name in _WITH_MODEL for name in names):
            file = stack.enter_context(model_file(model))
            benchmarks |= {
                "decode": partial(bench_decode, file, rounds=rounds, threads=threads),
                "diff": partial(bench_diff, file, rounds=rounds, threads=threads),
                "start": partial(bench_start, file, rounds=rounds, threads=threads),
                "best": partial(bench_best, file, rounds=rounds, threads=threads),
                "depth": partial(bench_depth, file, rounds=rounds, threads=threads),
            }
        roof = ["memcpy"] if any(name in WITH_BANDWIDTH for name in names) else []
        for name in [*roof, *names]:
            for found in benchmarks[name]():
                result.measurements.setdefault(name, []).append(found)
                seen(name, found)
    return result
