"""Benchmarks: this project against ggml's CPU and functions, gguf-py and memcpy, on one machine in one run.

measure    a measurement, turns, means, and the header with the machine and the versions
nodes      nodes to measure, on the NPU and on ggml's CPU
movers     GET_ROWS, SET_ROWS, CPY, CONT and DUP of 64 MiB
codecs     quantize and dequantize of 64 MiB
memcpy     the upper bound of these two
calls      graphs of one node of a few rows
splits     what a split costs on a device in Python
operators  patterns of nodes that run as one operator
ops        single nodes: convolutions, images, rows, training
models     decode, diff and start of a model
memory     peak memory of a process that decodes
run        benchmarks by name
report     tables and JSON
plot       movers and codecs as bars, with memcpy as their upper bound
"""

from graph_runner.bench.measure import Header, Measurement, geometric_mean, in_turns, worst
from graph_runner.bench.plot import check_plot, draw
from graph_runner.bench.report import BENCH_SCHEMA, bench_json, print_bench
from graph_runner.bench.run import WITH_BANDWIDTH, BenchResult, bench

__all__ = [
    "BENCH_SCHEMA",
    "WITH_BANDWIDTH",
    "BenchResult",
    "Header",
    "Measurement",
    "bench",
    "bench_json",
    "check_plot",
    "draw",
    "geometric_mean",
    "in_turns",
    "print_bench",
    "worst",
]
