"""Graphs that a test runs several times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from kit.recipes import Cast, Copy, GetRows, Same, SetRows
from kit.support import TRANSPOSED, Placement, Recipe, Scene

from ggml_backend_npu.plugin.contexts import Context
from ggml_backend_npu.plugin.plugin import Plugin

RECIPES: dict[str, Recipe] = {
    "get_rows f32": GetRows("f32", (40, 7, 2, 1), 5),
    "get_rows q8_0": GetRows("q8_0", (64, 7, 1, 1), 5),
    "set_rows f16": SetRows(("f16", "f32", "i64"), (40, 7, 1, 1), 5),
    "set_rows q8_0": SetRows(("q8_0", "f32", "i32"), (64, 7, 1, 1), 5),
    "cpy f32->f16": Copy(("f32", "f16"), (33, 5, 3, 2)),
    "cpy q4_0->f32": Copy(("q4_0", "f32"), (64, 5, 3, 2)),
    "cast f32->q8_0": Cast(("f32", "q8_0"), (64, 5, 3, 2)),
    "cont f32 transposed": Same("cont", "f32", (37, 21, 2, 1), src=TRANSPOSED),
    "dup f16": Same("dup", "f16", (37, 21, 2, 1), src=Placement(axes=(0, 2, 1, 3))),
}


@contextmanager
def scene_of(backend: Plugin, *recipes: Recipe) -> Iterator[tuple[Scene, list[int]]]:
    """The nodes of recipes, on the NPU."""
    with Scene(backend.ggml, "NPU") as scene:
        yield scene, [recipe(scene) for recipe in recipes]


def context_of(backend: Plugin, scene: Scene) -> Context:
    return backend.contexts[scene._backend]


def chain(scene: Scene) -> tuple[list[int], int, int]:
    """GET_ROWS, CPY to f16, CONT of it transposed, SET_ROWS: the nodes, and the ids of the first and the last."""
    rng = np.random.default_rng(0)
    table = scene.root("f32", (24, 10), rng.standard_normal((10, 24)).astype(np.float32))
    ids = scene.root("i32", (6,), np.array([3, 9, 0, 4, 4, 1], np.int32))
    rows = scene.op("get_rows", table, ids)
    halves = scene.op("cpy", rows, scene.tensor("f16", (24, 6)))
    turned = scene.op("cont", scene.permute(halves, (1, 0, 2, 3)))
    cache = scene.root("f16", (6, 30), np.zeros((30, 6), np.float16))
    targets = scene.root("i64", (24,), rng.permutation(30)[:24])
    return [rows, halves, turned, scene.op("set_rows", cache, turned, targets)], ids, targets


def some_rows(scene: Scene) -> int:
    """CONT of some rows of a tensor, 40 elements from the 40th on."""
    root = scene.root("f32", (8, 20), np.arange(160, dtype=np.float32))
    return scene.op("cont", scene.view(root, (8, 5, 1, 1), (32, 160, 160), 160))
