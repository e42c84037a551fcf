"""Small graphs whose nodes are fused: built as in llama.cpp, and run fused, node by node or on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kit.support import Scene, choose
from numpy.typing import NDArray

from ggml_backend_npu.ggml import structs
from ggml_backend_npu.plugin.plugin import Plugin

INF = float("inf")
Build = Callable[[Scene], Sequence[int]]  # makes roots and returns the outputs of a graph


@dataclass(frozen=True)
class Ran:
    """What a graph gave: its outputs, without what lies between their elements, and the spans."""

    outputs: list[NDArray[Any]]
    fused: Counter[str]


def ran(backend: Plugin, build: Build, device: str = "NPU", fusion: str = "on", *, shared: bool = True) -> Ran:
    """A graph on a device; shared: results share memory as llama.cpp's do."""
    backend.statistics.reset()
    with pytest.MonkeyPatch.context() as patch, Scene(backend.ggml, device) as scene:
        choose(patch, fusion=fusion)
        outputs = build(scene)
        if shared:
            graph = scene.graph(*outputs)
        else:
            for output in outputs:
                backend.ggml.ggml_set_output(output)
            graph = scene._expanded(tuple(outputs))
            scene._allocate()
        scene.load()
        assert scene.run(graph) == 0, backend.statistics.error
        return Ran([scene.as_tensor(t).view().copy() for t in outputs], Counter(backend.statistics.fused))


def assert_close(actual: NDArray[Any], expected: NDArray[Any], ulp: int) -> None:
    """Equal, float32 up to some units in the last place; NaN where NaN is."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype != np.float32 or not ulp:
        np.testing.assert_array_equal(actual, expected)
        return
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        apart = np.abs(actual.astype(np.float64) - expected) / np.spacing(np.abs(expected))
    assert np.where(same, 0, apart).max(initial=0) <= ulp


def assert_fuses(backend: Plugin, build: Build, *spans: str, ulp: int = 0, cpu_nmse: float = 0.0) -> None:
    """The graph has exactly these spans, and its outputs are those of its nodes one by one, and of ggml's CPU."""
    for shared in (False, True):
        fused = ran(backend, build, shared=shared)
        alone = ran(backend, build, fusion="off", shared=shared)
        cpu = ran(backend, build, "CPU", shared=shared)
        assert fused.fused == Counter(spans)
        assert not alone.fused
        for one, other in zip(fused.outputs, alone.outputs, strict=True):
            assert_close(one, other, ulp)
        for one, other in zip(fused.outputs, cpu.outputs, strict=True):
            if cpu_nmse and one.dtype == np.float32 and np.isfinite(other).all():
                assert nmse(one, other) <= cpu_nmse
            else:
                np.testing.assert_array_equal(one, other)


def nmse(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The normalised mean squared error."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    return float(np.square(a - b).sum() / np.square(b).sum())


def floats(scene: Scene, *ne: int, seed: int = 0) -> int:
    rng = np.random.default_rng((seed, *ne))
    return scene.root("f32", ne, rng.standard_normal(ne[::-1]).astype(np.float32))


def reshaped(scene: Scene, tensor: int, *ne: int) -> int:
    return scene.op("reshape_4d", tensor, *ne, *[1] * (4 - len(ne)))


def scaled(scene: Scene, tensor: int, factor: float = 3.0) -> int:
    """A node that reads a tensor: CLAMP, which needs no other one."""
    return scene.op("clamp", tensor, -INF, factor)


def without_its_last_node(graph: int) -> structs.GgmlCGraph:
    """The part of a graph that a scheduler hands over where another device has the last node."""
    part = structs.GgmlCGraph.from_buffer_copy(structs.GgmlCGraph.from_address(graph))
    part.n_nodes -= 1
    return part


# token_shift


@dataclass(frozen=True)
class Shift:
    """The nodes of a token shift: before - x, repeated, times mu, plus x."""

    x: int
    before: int
    mu: int
    sub: int
    repeat: int
    mul: int
    add: int


def shift(
    scene: Scene,
    width: int = 8,
    rows: int = 3,
    sequences: int = 1,
    n: int = 6,
    *,
    x: int | None = None,
    mu: int | None = None,
    repeated: Callable[[int], int] = lambda sub: sub,
    multiplied: Callable[[int], int] = lambda repeat: repeat,
    summed: Callable[[int], int] = lambda mul: mul,
    added: int | None = None,
) -> Shift:
    """x, and before it what llama.cpp puts there; `repeated` and so on stand between two nodes."""
    x = scaled(scene, floats(scene, width, rows, sequences), 1e3) if x is None else x
    state = floats(scene, width, 1, sequences, seed=1)
    before = state
    if rows > 1:
        held = scene.as_tensor(x)
        shifted = scene.view(x, (width, rows - 1, sequences, 1), held.nb[1:])
        before = scene.op("concat", state, shifted, 1)
    elif sequences == 1:
        before = scaled(scene, state, 1e3)
    mu = floats(scene, width, 1, 1, n, seed=2) if mu is None else mu
    sub = scene.op("sub", before, x)
    repeat = scene.op("repeat", repeated(sub), scene.tensor("f32", (width, rows, sequences, n)))
    mul = scene.op("mul", multiplied(repeat), mu)
    add = scene.op("add", summed(mul), x if added is None else added)
    return Shift(x, before, mu, sub, repeat, mul, add)


# routing


@dataclass(frozen=True)
class Route:
    """The nodes of a routing; of those that a kind has not, the one before."""

    logits: int
    probs: int
    order: int
    ids: int
    rows: int
    total: int
    least: int
    weights: int


KINDS = ("softmax", "normalised", "softmax of selected")


def route(
    scene: Scene,
    kind: str = "normalised",
    n_expert: int = 8,
    n_tokens: int = 5,
    k: int = 3,
    *,
    logits: int | None = None,
    softmax: tuple[int | None, float, float] = (None, 1.0, 0.0),
    descending: int = 1,
    first: int = 0,
    table: int | None = None,
    most: float = INF,
    least: float = 2.0**-14,
) -> Route:
    """The nodes as llama.cpp builds them: of all 3 kinds that are fused."""
    e, n = n_expert, n_tokens
    logits = floats(scene, e, n) if logits is None else logits
    probs = scene.op("soft_max_ext", logits, *softmax) if kind != "softmax of selected" else logits
    values = reshaped(scene, probs if table is None else table, 1, e, n)
    order = scene.op("argsort", probs, descending)
    ids = scene.view(order, (k, n, 1, 1), (4 * e, 4 * e * n, 4 * e * n), 4 * first)
    rows = total = clamped = weights = scene.op("get_rows", values, ids)
    if kind == "normalised":
        flat = reshaped(scene, rows, k, n)
        total = scene.op("sum_rows", flat)
        clamped = scene.op("clamp", total, least, most)
        weights = scene.op("div", flat, clamped)
    elif kind == "softmax of selected":
        weights = scene.op("soft_max_ext", reshaped(scene, rows, k, n), *softmax)
    return Route(logits, probs, order, ids, rows, total, clamped, weights)


def routed_outputs(scene: Scene, nodes: Route) -> list[int]:
    """The weights, and what a later node reads with the ids: themselves, from 1 on."""
    n_expert, n_tokens = scene.as_tensor(nodes.order).ne[:2]
    numbers = np.tile(np.arange(1, n_expert + 1, dtype=np.float32), (n_tokens, 1))
    return [nodes.weights, scene.op("get_rows", scene.root("f32", (1, n_expert, n_tokens), numbers), nodes.ids)]


def routed_right(backend: Plugin, build: Callable[[Scene], Sequence[int]], *spans: str) -> None:
    assert_fuses(backend, build, *spans, ulp=2, cpu_nmse=1e-11)
