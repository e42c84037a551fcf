"""What a split costs on a device in Python: its program does nothing, so what is left is this project's part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import ggml_backend_npu
from ggml_backend_npu import Device, Graph
from ggml_backend_npu.device.backend import DeviceBackend
from ggml_backend_npu.device.device import Bytes, Program
from ggml_backend_npu.ggml.guard import interrupts_wait
from ggml_backend_npu.plugin.build import Builder
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.registration import alone
from graph_runner.bench.measure import Measurement, against, in_turns
from graph_runner.bench.nodes import Run


class _Idle(Device):
    """Takes ADD, and computes nothing."""

    name, ops = "IDLE0", ("ADD",)

    def alloc(self, size: int) -> Bytes:
        return np.zeros(size, np.uint8)

    def copy_in(self, handle: Bytes, offset: int, data: Bytes) -> None:
        handle[offset : offset + data.size] = data

    def copy_out(self, handle: Bytes, offset: int, out: Bytes) -> None:
        out[:] = handle[offset : offset + out.size]

    def compile(self, graph: Graph) -> Program:
        return _nothing


def _nothing(*places: Any) -> None:
    """Computes nothing."""


def bench_splits(*, rounds: int, threads: int, calls: int = 400) -> Iterator[Measurement]:
    """Measures a split of one node and one of 300, in microseconds from the call in Python to its return.

    calls  calls of each in a round; the round's value is their median

    Raises RuntimeError if a split fails.
    """
    ggml = ggml_backend_npu.register().ggml
    plugin = Plugin(ggml, DeviceBackend(_Idle()))
    for n_nodes in (1, 300):
        what = f"a split of {n_nodes} nodes" if n_nodes > 1 else "a split of a node"
        with alone(ggml, plugin), Builder(ggml, _Idle.name) as build, interrupts_wait(plugin.failures):
            node, one = (build.tensor("f32", (4,)) for _ in range(2))
            for _ in range(n_nodes):
                node = build.op("add", node, one)
            run = Run(what, build, node, build.graph_of(node))
            times = in_turns({what: run}, rounds, unit="us", calls=calls)
        yield against(times, what, "us")
