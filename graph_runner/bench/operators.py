"""Patterns of nodes that the NPU runs as one operator, against the same nodes on ggml's CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import ggml_backend_npu
from ggml_backend_npu.plugin.build import Builder
from graph_runner.bench.measure import Measurement, against, in_turns
from graph_runner.bench.nodes import on_both_devices


@dataclass(frozen=True)
class Pattern:
    """A piece of a model's graph that the NPU runs as one operator.

    fusion  the operator's name
    build   makes inputs and nodes; returns the output
    """

    what: str
    fusion: str
    build: Callable[[Builder], int]


def token_shift(width: int = 4096, n_tokens: int = 512) -> Pattern:
    """Returns RWKV-7's time mix: SUB, REPEAT, MUL, ADD."""

    def make(build: Builder) -> int:
        previous, x = (build.tensor("f32", (width, n_tokens)) for _ in range(2))
        mu = build.tensor("f32", (width, 1, 1, 6))
        wide = build.tensor("f32", (width, n_tokens, 1, 6))
        difference = build.op("repeat", build.op("sub", previous, x), wide)
        return build.op("add", build.op("mul", difference, mu), x)

    return Pattern(f"token_shift, C {width}, T {n_tokens}", "token_shift", make)


def routing(n_expert: int = 128, k: int = 8, n_tokens: int = 4096) -> Pattern:
    """Returns the routing of a mixture of experts: SOFT_MAX, ARGSORT, GET_ROWS, SUM_ROWS, CLAMP, DIV."""

    def make(build: Builder) -> int:
        p = build.op("soft_max_ext", build.tensor("f32", (n_expert, n_tokens)), None, 1.0, 0.0)
        whole = 4 * n_expert
        ids = build.view(build.op("argsort", p, 1), (k, n_tokens, 1, 1), (whole, whole * n_tokens, whole * n_tokens))
        chosen = build.op("get_rows", build.op("reshape_4d", p, 1, n_expert, n_tokens, 1), ids)
        weights = build.op("reshape_4d", chosen, k, n_tokens, 1, 1)
        total = build.op("clamp", build.op("sum_rows", weights), 2.0**-14, math.inf)
        return build.op("div", weights, total)

    return Pattern(f"TopKSoftmax, {n_expert} experts, k {k}, N {n_tokens}", "TopKSoftmax", make)


PATTERNS = (token_shift(), routing())


def bench_operators(*, rounds: int, threads: int, patterns: tuple[Pattern, ...] = PATTERNS) -> Iterator[Measurement]:
    """Measures each pattern as the same graph on both devices, with shared memory as in llama.cpp.

    Raises RuntimeError if a node fails or the NPU did not run a pattern as one operator.
    """
    fused = ggml_backend_npu.register().statistics.fused
    for pattern in patterns:
        before = fused[pattern.fusion]
        with on_both_devices(pattern.what, pattern.build, threads=threads, graph=Builder.graph) as runs:
            times = in_turns(runs, rounds)
        if fused[pattern.fusion] - before != rounds + 1:
            raise RuntimeError(f"{pattern.what}: the NPU did not run it as {pattern.fusion}")
        yield against(times, pattern.what, "ms")
