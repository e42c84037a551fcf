"""Nodes over random bytes, for a Scene to build: type, sizes, placements and a seed say all."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st
from kit.support import (
    PLAIN,
    Dims,
    Kind,
    N,
    Placement,
    Recipe,
    Scene,
    Sketch,
    T,
    kind_for,
    placements,
    reshapes,
    seeds,
    sizes,
    values,
)

from ggml_backend_npu import default_backend
from quant import codec

ROW_SOURCES = sorted({types[1] for types in default_backend().ops["GET_ROWS"].types or ()})
ROW_TARGETS = sorted({types[0] for types in default_backend().ops["SET_ROWS"].types or ()})
COPIES = sorted((src, dst) for dst, src in default_backend().ops["CPY"].types or ())
SAME = sorted(src for src, dst in COPIES if src == dst)
DTYPES = {"i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class GetRows:
    """GET_ROWS of a source of type and ne, n_ids of each matrix."""

    type: str
    ne: Dims
    n_ids: int
    seed: int = 0
    src: Placement = PLAIN
    ids: Placement = PLAIN

    def __call__(self, scene: Sketch[T, N]) -> N:
        rng = np.random.default_rng(self.seed)
        table = self.src.put(scene, self.type, self.ne, lambda n: values(self.type, n, rng))
        rows = rng.integers(0, max(1, self.ne[1]), (1, self.ne[3], self.ne[2], self.n_ids), dtype=np.int32)
        return scene.op("get_rows", table, self.ids.hold(scene, "i32", rows, rest=-1))


@dataclass(frozen=True)
class SetRows:
    """SET_ROWS of n_ids rows in each matrix of a destination of size ne.

    types      of destination, source and ids
    broadcast  over how many matrices, in dimensions 2 and 3, the same ids serve
    """

    types: tuple[str, str, str]
    ne: Dims
    n_ids: int
    seed: int = 0
    broadcast: tuple[int, int] = (1, 1)
    dst: Placement = PLAIN
    src: Placement = PLAIN
    ids: Placement = PLAIN

    def __call__(self, scene: Sketch[T, N]) -> N:
        target, source, ids = self.types
        rng = np.random.default_rng(self.seed)
        dst = self.dst.put(scene, target, self.ne, lambda n: values(target, n, rng))
        src_ne = (self.ne[0], self.n_ids, *self.ne[2:])
        src = self.src.put(scene, source, src_ne, lambda n: values(source, n, rng, kind_for(source, target)))
        shape = (1, self.ne[3] // self.broadcast[1], self.ne[2] // self.broadcast[0], self.n_ids)
        # different ids in a matrix: where one comes twice, ggml's threads race
        order = rng.permuted(np.tile(np.arange(self.ne[1]), (prod(shape[:3]), 1)), axis=1)
        rows = order[:, : self.n_ids].reshape(shape).astype(DTYPES[ids])
        return scene.op("set_rows", dst, src, self.ids.hold(scene, ids, rows, rest=-1))


@dataclass(frozen=True)
class Copy:
    """CPY of a source of size ne into a destination of size dst_ne, by default the same."""

    types: tuple[str, str]
    ne: Dims
    dst_ne: Dims | None = None
    seed: int = 0
    src: Placement = PLAIN
    dst: Placement = PLAIN

    def __call__(self, scene: Sketch[T, N]) -> N:
        source, target = self.types
        rng = np.random.default_rng(self.seed)
        src = self.src.put(scene, source, self.ne, lambda n: values(source, n, rng, kind_for(source, target)))
        dst = self.dst.put(scene, target, self.dst_ne or self.ne, lambda n: values(target, n, rng))
        return scene.op("cpy", src, dst)


@dataclass(frozen=True)
class Same:
    """DUP or CONT of a source of a type and size."""

    function: str
    type: str
    ne: Dims
    seed: int = 0
    src: Placement = PLAIN

    def __call__(self, scene: Sketch[T, N]) -> N:
        rng = np.random.default_rng(self.seed)
        return scene.op(self.function, self.src.put(scene, self.type, self.ne, lambda n: values(self.type, n, rng)))


@dataclass(frozen=True)
class Cast:
    """ggml_cast of a source of a size: CPY whose second source is its own result."""

    types: tuple[str, str]
    ne: Dims
    seed: int = 0
    src: Placement = PLAIN

    def __call__(self, scene: Scene) -> int:
        source, target = self.types
        rng = np.random.default_rng(self.seed)
        src = self.src.put(scene, source, self.ne, lambda n: values(source, n, rng, kind_for(source, target)))
        return scene.op("cast", src, scene.ggml.type_numbers[target])


def of_one(
    function: str, type: str, ne: Dims, *numbers: Any, seed: int = 0, src: Placement = PLAIN, kind: Kind = "any"
) -> Recipe:
    """The node that a function of ggml makes of one tensor and numbers."""

    def recipe(scene: Scene) -> int:
        x = src.put(scene, type, ne, lambda n: values(type, n, np.random.default_rng(seed), kind))
        return scene.op(function, x, *numbers)

    return recipe


def contiguous(placement: Placement) -> Placement:
    """A contiguous tensor at an offset in a larger root."""
    return Placement(before=(0, 0, 0, placement.before[3]), after=(0, 0, 0, placement.after[3]))


@st.composite
def copies(draw: st.DrawFn, source: str, target: str) -> Copy:
    """A copy between two types that ggml's CPU computes without an error of its own."""
    block = max(codec(source).block_size, codec(target).block_size)
    ne = draw(sizes(block))
    dst_ne = draw(st.just(ne) | reshapes(ne, block))
    src, dst = draw(placements(rows=block > 1)), draw(placements(rows=block > 1))
    if codec(target).is_quantized and source != target:
        dst = contiguous(dst)
        if ne[0] > dst_ne[0]:  # ggml's work buffer is made for rows of dst
            ne, dst_ne = dst_ne, ne
    elif codec(target).is_quantized and dst_ne != ne:
        src = contiguous(src)  # else ggml copies more than there is
    return Copy((source, target), ne, dst_ne, draw(seeds), src, dst)
