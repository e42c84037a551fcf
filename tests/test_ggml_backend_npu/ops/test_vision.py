"""UPSCALE, WIN_PART, WIN_UNPART, GET_REL_POS, ADD_REL_POS, TIMESTEP_EMBEDDING beside ggml's CPU, by either engine."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import (
    Dims,
    Placement,
    Scene,
    assert_as_promised,
    assert_equals_cpu,
    examples,
    placements,
    refusal,
    seeds,
    sizes,
    values,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("every_op")

NEAREST, BILINEAR, BICUBIC = range(3)
CORNERS, ANTIALIAS = 256, 512
PROMISES = {BILINEAR: "bilinear", BICUBIC: "bicubic", BILINEAR | ANTIALIAS: "antialiased"}


def numbers(n: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# UPSCALE


@pytest.mark.parametrize("corners", [0, CORNERS])
@pytest.mark.parametrize("mode", [NEAREST, *PROMISES])
@given(ne=sizes(), to=st.tuples(*[st.integers(1, 50)] * 2, *[st.integers(1, 5)] * 2), place=placements(), seed=seeds)
@examples(40)
def test_upscale(backend: Plugin, mode: int, corners: int, ne: Dims, to: Dims, place: Placement, seed: int) -> None:
    """Larger or smaller, in any dimension."""

    def recipe(scene: Scene) -> int:
        return scene.op("interpolate", place.put(scene, "f32", ne, lambda n: numbers(n, seed)), *to, mode | corners)

    if mode == NEAREST:
        assert_equals_cpu(backend, recipe)
    else:
        assert_as_promised(backend, recipe, f"UPSCALE {PROMISES[mode]}")


# WIN_PART, WIN_UNPART


@given(ne=sizes(), w=st.integers(1, 5), seed=seeds)
@examples(40)
def test_win_part(backend: Plugin, ne: Dims, w: int, seed: int) -> None:
    n, width, height = ne[0], ne[1] + ne[2], ne[2] * ne[3]

    def recipe(scene: Scene) -> int:
        x = scene.root("f32", (n, width, height), values("f32", n * width * height, np.random.default_rng(seed)))
        return scene.op("win_part", x, w)

    assert_equals_cpu(backend, recipe)


@given(n=st.integers(1, 20), width=st.integers(1, 9), height=st.integers(1, 9), w=st.integers(1, 5), seed=seeds)
@examples(40)
def test_win_unpart(backend: Plugin, n: int, width: int, height: int, w: int, seed: int) -> None:
    n_windows = -(-width // w) * -(-height // w)

    def recipe(scene: Scene) -> int:
        data = values("f32", n * w * w * n_windows, np.random.default_rng(seed))
        return scene.op("win_unpart", scene.root("f32", (n, w, w, n_windows), data), width, height, w)

    assert_equals_cpu(backend, recipe)


# GET_REL_POS, ADD_REL_POS


@pytest.mark.parametrize("type", ["f16", "bf16"])
@given(n=st.integers(1, 20), n_embd=st.integers(1, 20), seed=seeds)
def test_get_rel_pos(backend: Plugin, type: str, n: int, n_embd: int, seed: int) -> None:
    def recipe(scene: Scene) -> int:
        data = values(type, n_embd * (2 * n - 1), np.random.default_rng(seed))
        return scene.op("get_rel_pos", scene.root(type, (n_embd, 2 * n - 1), data), n, n)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("in_place", [False, True])
@given(n=st.integers(1, 20), depth=st.tuples(*[st.integers(1, 4)] * 3), seed=seeds)
@examples(40)
def test_add_rel_pos(backend: Plugin, in_place: bool, n: int, depth: tuple[int, int, int], seed: int) -> None:
    width, height, n_images = depth
    rows = width * height * n_images

    def recipe(scene: Scene) -> int:
        x = scene.root("f32", (n * n, width * height, n_images), numbers(n * n * rows, seed))
        added = [scene.root("f32", (n, *depth), numbers(n * rows, seed + i)) for i in (1, 2)]
        return scene.op("add_rel_pos_inplace" if in_place else "add_rel_pos", x, *added)

    assert_equals_cpu(backend, recipe)


# TIMESTEP_EMBEDDING


@given(n=st.integers(1, 9), dim=st.integers(1, 90), max_period=st.sampled_from((1, 7, 1000, 10000)), seed=seeds)
@examples(40)
def test_timestep_embedding(backend: Plugin, n: int, dim: int, max_period: int, seed: int) -> None:
    def recipe(scene: Scene) -> int:
        timesteps = np.random.default_rng(seed).uniform(0, 1000, n).astype(np.float32)
        return scene.op("timestep_embedding", scene.root("f32", (n,), timesteps), dim, max_period)

    assert_as_promised(backend, recipe, "TIMESTEP_EMBEDDING")


# refusals


def halves(*shape: int) -> NDArray[Any]:
    return zeros(*shape, dtype=np.float16)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("UPSCALE", (zeros(4, 6), zeros(2, 3)), (BICUBIC,), None),
        ("UPSCALE", (zeros(4, 6), zeros(2, 3)), (3,), "mode 3"),
        ("UPSCALE", (zeros(4, 6), zeros(0, 3)), (BICUBIC,), "x of ne (3, 0, 1, 1)"),
        ("UPSCALE", (zeros(4, 12)[:, ::2], zeros(2, 3)), (BICUBIC,), "dst is not contiguous"),
        ("UPSCALE", (zeros(4, 6), halves(2, 3)), (BICUBIC,), "types f16 -> f32"),
        ("WIN_PART", (zeros(4, 2, 2, 5), zeros(3, 4, 5)), (2, 2, 2), None),
        ("WIN_PART", (zeros(4, 2, 2, 5), zeros(3, 4, 5)), (2, 2, 0), "windows of 0"),
        ("WIN_PART", (zeros(2, 2, 2, 5), zeros(3, 4, 5)), (2, 1, 2), "in 2 x 1 windows of 2"),
        ("WIN_PART", (zeros(4, 2, 2, 5), zeros(3, 4, 10)[..., ::2]), (2, 2, 2), "x is not contiguous"),
        ("WIN_UNPART", (zeros(3, 4, 5), zeros(4, 2, 2, 5)), (2,), None),
        ("WIN_UNPART", (zeros(3, 4, 5), zeros(3, 2, 2, 5)), (2,), "x of ne (5, 2, 2, 3) in windows of 2"),
        ("WIN_UNPART", (zeros(3, 4, 5), zeros(4, 2, 2, 5)), (0,), "in windows of 0"),
        ("GET_REL_POS", (halves(4, 4, 5), halves(7, 5)), (), None),
        ("GET_REL_POS", (halves(4, 4, 5), halves(8, 5)), (), "x of ne (5, 8, 1, 1)"),
        ("GET_REL_POS", (zeros(4, 4, 5), zeros(7, 5)), (), "types f32 -> f32"),
        ("ADD_REL_POS", (zeros(6, 9), zeros(6, 9), zeros(2, 3, 3), zeros(2, 3, 3)), (0,), None),
        ("ADD_REL_POS", (zeros(6, 9), zeros(6, 9), zeros(2, 3, 3), zeros(2, 3, 3)), (1,), "in place of another tensor"),
        ("ADD_REL_POS", (zeros(6, 9), zeros(6, 9), zeros(2, 3, 3), zeros(3, 2, 3)), (0,), "ph of ne (3, 2, 3, 1)"),
        ("ADD_REL_POS", (zeros(6, 8), zeros(6, 8), zeros(2, 3, 3), zeros(2, 3, 3)), (0,), "x of ne (8, 6, 1, 1)"),
        ("TIMESTEP_EMBEDDING", (zeros(3, 8), zeros(3)), (8, 100), None),
        ("TIMESTEP_EMBEDDING", (zeros(3, 8), zeros(3)), (8, 0), "3 timesteps in 8 of 0"),
        ("TIMESTEP_EMBEDDING", (zeros(3, 9), zeros(3)), (8, 100), "dst of ne (9, 3, 1, 1)"),
        ("TIMESTEP_EMBEDDING", (zeros(3, 8), zeros(6)[::2]), (8, 100), "timesteps rows have gaps"),
    ],
)  # fmt: skip
def test_what_is_not_taken(
    op: str, arrays: tuple[NDArray[Any], ...], params: tuple[int, ...], reason: str | None
) -> None:
    why = refusal(op, *arrays, params=struct.pack(f"{len(params)}i", *params))
    assert why is None if reason is None else reason in str(why)
