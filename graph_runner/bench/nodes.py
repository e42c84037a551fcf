"""Nodes to measure, each on the NPU and on ggml's CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ggml_backend_npu
import quant
from ggml_backend_npu.ggml.guard import interrupts_wait
from ggml_backend_npu.plugin.build import Builder
from graph_runner.bench.measure import GGML_CPU

HEAD = 64  # elements of an attention head

_TILE = 1 << 20  # elements that differ from each other in a tensor's content


def get_rows(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes GET_ROWS of every row of a table, in random order."""
    return build.op("get_rows", build.tensor(type, (width, rows)), build.tensor("i32", (rows,)))


def set_rows(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes SET_ROWS of every row of a table, in random order."""
    dst, src = build.tensor(type, (width, rows)), build.tensor("f32", (width, rows))
    return build.op("set_rows", dst, src, build.tensor("i64", (rows,)))


def cpy(src: str, dst: str, build: Builder, width: int, rows: int) -> int:
    """Makes CPY from one type to another."""
    return build.op("cpy", build.tensor(src, (width, rows)), build.tensor(dst, (width, rows)))


def cont_transposed(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes CONT of a transposed matrix."""
    return build.op("cont", build.permute(build.tensor(type, (width, rows)), (1, 0, 2, 3)))


def cont_heads(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes CONT of (HEAD, heads, rows) as (HEAD, rows, heads), as attention does with its queries."""
    return build.op("cont", build.permute(build.tensor(type, (HEAD, width // HEAD, rows)), (0, 2, 1, 3)))


def cont_strided(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes CONT of the first half of each row."""
    row = 2 * width * quant.codec(type).block_bytes
    source = build.tensor(type, (2 * width, rows))
    return build.op("cont", build.view(source, (width, rows, 1, 1), (row, row * rows, row * rows)))


def dup(type: str, build: Builder, width: int, rows: int) -> int:
    """Makes DUP of a matrix."""
    return build.op("dup", build.tensor(type, (width, rows)))


class Run:
    """A graph on one device with its inputs filled; a call computes it. Raises RuntimeError if a node fails."""

    def __init__(self, what: str, build: Builder, node: int, graph: int) -> None:
        self.what = what
        self._build, self._node = build, node
        self._compute = build.job(graph)
        rng = np.random.default_rng(0)
        for tensor in filter(build.is_allocated, build.inputs):
            build.set(tensor, _content(build, tensor, rng))

    def __call__(self) -> None:
        if self._compute() != 0:
            raise RuntimeError(f"{self.what} failed: {ggml_backend_npu.register().statistics.error}")

    def output(self) -> NDArray[np.uint8]:
        """Returns the bytes of the node's output."""
        return self._build.get(self._node)

    @property
    def type(self) -> str:
        """The type of the node's output."""
        return self._build.as_tensor(self._node).type


def _content(build: Builder, tensor: int, rng: np.random.Generator) -> NDArray[Any]:
    """Returns normal deviates; for integers, which are row numbers, a permutation."""
    shape = build.as_tensor(tensor)
    if shape.type in ("i32", "i64"):
        return rng.permutation(shape.n_elements).astype(shape.type.replace("i", "int"))
    tile = quant.quantize(rng.standard_normal(min(shape.n_elements, _TILE), dtype=np.float32), shape.type)
    return np.resize(tile, build.nbytes(tensor))


@contextmanager
def on_both_devices(
    what: str,
    make: Callable[..., int],
    *arguments: int,
    threads: int,
    graph: Callable[[Builder, int], int] = Builder.graph_of,
) -> Iterator[dict[str, Run]]:
    """Yields the same node on the NPU, which comes first, and on ggml's CPU, with the same input bytes. Ctrl-C waits
    for the end of the context.

    what   names the node in an error
    make   makes inputs and nodes, given a builder and the arguments; returns the output
    graph  makes the graph: `Builder.graph_of` or `Builder.graph`
    """
    ggml = ggml_backend_npu.register().ggml
    with Builder(ggml, "NPU") as npu, Builder(ggml, "CPU") as cpu, interrupts_wait(npu.failures):
        runs = {}
        for name, device, build in (("NPU", "NPU", npu), (GGML_CPU, "CPU", cpu)):
            build.use_threads(threads)
            node = make(build, *arguments)
            runs[name] = Run(f"{what} on {device}", build, node, graph(build, node))
        yield runs


def check_equal(what: str, runs: dict[str, Run]) -> None:
    """Computes on both devices. Raises RuntimeError if their bytes differ."""
    for run in runs.values():
        run()
    npu, cpu = (run.output() for run in runs.values())
    if not np.array_equal(npu, cpu):
        raise RuntimeError(f"{what}: the bytes of the NPU are not the CPU's")
