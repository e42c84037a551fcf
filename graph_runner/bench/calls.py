"""What small graphs, as those of a token, cost: one node of a few rows, computed many times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ggml_backend_npu.plugin.build import Builder
from graph_runner.bench import nodes
from graph_runner.bench.measure import Measurement, against, in_turns

_NODES: dict[str, tuple[str, Callable[[Builder, int, int], int]]] = {
    "GET_ROWS": ("q8_0 -> f32", partial(nodes.get_rows, "q8_0")),
    "SET_ROWS": ("f32 -> f16", partial(nodes.set_rows, "f16")),
    "CPY": ("f32 -> f16", partial(nodes.cpy, "f32", "f16")),
    "CONT": ("f32 heads <-> tokens", partial(nodes.cont_heads, "f32")),
}
_SHAPES = [(1, 576), (1, 4096), (8, 576), (8, 4096)]  # rows, elements of each


def bench_calls(*, rounds: int, threads: int, calls: int = 400) -> Iterator[Measurement]:
    """Measures a graph of one node on both devices, in microseconds from the call in Python to its return.

    calls  calls of each graph in a round; the round's value is their median

    Raises RuntimeError if a node fails or the bytes of the two devices differ.
    """
    for op, (types, build) in _NODES.items():
        for rows, width in _SHAPES:
            what = f"{op} {types}, {rows} x {width}"
            with nodes.on_both_devices(what, build, width, rows, threads=threads) as runs:
                nodes.check_equal(what, runs)
                times = in_turns(runs, rounds, unit="us", calls=calls)
            yield against(times, what, "us", group=op)
