"""LIGHTNING_INDEXER, DSV4_HC_COMB, DSV4_HC_PRE, DSV4_HC_POST, against ggml's CPU."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind
from kit.support import (
    Placement,
    Recipe,
    Scene,
    assert_as_promised,
    choose,
    outcome,
    placements,
    seeds,
    supported,
)
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.plugin.plugin import PROBED, Plugin

NMSE = 1e-12

pytestmark = pytest.mark.usefixtures("every_op")


def assert_close_to_cpu(backend: Plugin, recipe: Recipe) -> None:
    npu, cpu = (outcome(backend, device, recipe) for device in ("NPU", "CPU"))
    assert npu.status == 0, backend.statistics.error
    found, expected = (result.after[0].view(np.float32).astype(np.float64) for result in (npu, cpu))
    assert np.square(found - expected).sum() <= NMSE * np.square(expected).sum()


@dataclass
class Inputs:
    """Random tensors of a scene."""

    scene: Scene
    seed: int

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def put(self, place: Placement, *ne: int, type: str = "f32") -> int:
        dims = (*ne, 1, 1, 1, 1)[:4]
        return place.put(self.scene, type, dims, self.values(type))

    def values(self, type: str) -> Callable[[int], NDArray[np.uint8]]:
        return lambda n: quant.quantize(self.rng.standard_normal(n).astype(np.float32), type)


places = placements()
small = st.integers(1, 9)


@given(n=st.integers(1, 40), streams=small, tokens=small, gated=st.booleans(), at=st.tuples(places, places), seed=seeds)
def test_hc_pre(
    backend: Plugin, n: int, streams: int, tokens: int, gated: bool, at: tuple[Placement, Placement], seed: int
) -> None:
    def recipe(scene: Scene) -> int:
        make = Inputs(scene, seed)
        x = make.put(at[0], n, streams, tokens)
        if gated:
            return scene.op("dsv4_hc_pre_gated", x, make.put(at[1], n, streams, tokens), 0.7)
        return scene.op("dsv4_hc_pre", x, make.put(at[1], streams, tokens))

    assert_as_promised(backend, recipe, f"DSV4_HC_PRE with {'gates' if gated else 'weights'}")


@given(n=st.integers(1, 40), streams=small, tokens=small, mixed=st.booleans(), at=st.tuples(*[places] * 4), seed=seeds)
def test_hc_post(
    backend: Plugin, n: int, streams: int, tokens: int, mixed: bool, at: tuple[Placement, ...], seed: int
) -> None:
    def recipe(scene: Scene) -> int:
        make = Inputs(scene, seed)
        x, residual = make.put(at[0], n, tokens), make.put(at[1], n, streams, tokens)
        post = make.put(at[2], streams, tokens)
        comb = make.put(at[3], streams, streams, tokens) if mixed else None
        return scene.op("dsv4_hc_post", x, residual, post, comb)

    assert_as_promised(backend, recipe, "DSV4_HC_POST")


@pytest.mark.parametrize("ops", ["default", "all"])
@pytest.mark.parametrize("has_layers", [False, True])
def test_while_a_context_is_made_these_ops_are_where_the_layers_are(
    backend: Plugin, monkeypatch: pytest.MonkeyPatch, ops: str, has_layers: bool
) -> None:
    """llama.cpp computes them by other ops where they are not."""

    def recipe(scene: Scene) -> int:
        return scene.op("dsv4_hc_pre", *(Inputs(scene, 1).put(Placement(), *ne) for ne in ((8, 4, 2), (4, 2))))

    choose(monkeypatch, ops=ops)
    monkeypatch.setattr(backend, "claims", PROBED if has_layers else frozenset())
    assert supported(backend, recipe) == has_layers
    monkeypatch.setattr(backend, "claims", None)
    assert supported(backend, recipe) == (ops == "all")


@given(
    tokens=small, eps=st.sampled_from([0.0, 1e-6, 0.1]), n=st.integers(1, 20), at=st.tuples(*[places] * 3), seed=seeds
)
def test_hc_comb(backend: Plugin, tokens: int, eps: float, n: int, at: tuple[Placement, ...], seed: int) -> None:
    def recipe(scene: Scene) -> int:
        make = Inputs(scene, seed)
        return scene.op("dsv4_hc_comb", make.put(at[0], 24, tokens), make.put(at[1], 3), make.put(at[2], 24), eps, n)

    assert_close_to_cpu(backend, recipe)


@given(
    blocks=st.integers(1, 3),
    heads=small,
    tokens=small,
    cells=st.integers(1, 40),
    streams=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    type=st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_0", "q5_1"]),
    at=st.tuples(*[placements(rows=True)] * 3),
    seed=seeds,
)
def test_lightning_indexer(
    backend: Plugin,
    blocks: int,
    heads: int,
    tokens: int,
    cells: int,
    streams: tuple[int, int],
    type: str,
    at: tuple[Placement, ...],
    seed: int,
) -> None:
    def recipe(scene: Scene) -> int:
        make, n = Inputs(scene, seed), 32 * blocks
        q, k = make.put(at[0], n, heads, tokens, streams[0]), make.put(at[1], n, 1, cells, streams[0], type=type)
        weights = make.put(at[2], heads, tokens, 1, streams[0])
        mask = make.put(Placement(), cells, tokens, 1, streams[1], type="f16")
        return scene.op("lightning_indexer", q, k, weights, mask)

    assert supported(backend, recipe)
    assert_close_to_cpu(backend, recipe)


def test_the_indexer_leaves_masked_cells_out() -> None:
    q, k, weights = np.ones((1, 1, 1, 32), np.float32), np.ones((1, 2, 1, 32), np.float32), np.ones((1, 1), np.float32)
    mask, dst = np.array([[0, -np.inf]], np.float16), np.zeros((1, 2), np.float32)
    bind(Node("LIGHTNING_INDEXER", Tensor.of(dst), tuple(Tensor.of(array) for array in (q, k, weights, mask))))()
    assert dst.tolist() == [[32, -np.inf]]


def of(op: str, params: bytes, *shapes: tuple[int, ...]) -> Node:
    dst, *sources = (Tensor.of(np.zeros(shape, np.float32)) for shape in shapes)
    return Node(op, dst, tuple(sources), params)


COMB = struct.pack("fi", 1e-6, 2)
PLAIN, GATED = (struct.pack("fi", 1.0, gated) for gated in (0, 1))


@pytest.mark.parametrize(
    ("op", "params", "shapes", "reason"),
    [
        ("DSV4_HC_COMB", COMB, [(5, 4, 4), (5, 24), (3,), (24,)], None),
        ("DSV4_HC_COMB", struct.pack("fi", 1e-6, 0), [(5, 4, 4), (5, 24), (3,), (24,)], "0 iterations"),
        ("DSV4_HC_COMB", COMB, [(5, 4, 4), (5, 24), (2,), (24,)], "scale of ne"),
        ("DSV4_HC_COMB", COMB, [(5, 3, 3), (5, 15), (3,), (15,)], "mixes of ne"),
        ("DSV4_HC_PRE", PLAIN, [(5, 8), (5, 4, 8), (5, 4)], None),
        ("DSV4_HC_PRE", GATED, [(5, 8), (5, 4, 8), (5, 4)], "weights of ne"),
        ("DSV4_HC_PRE", PLAIN, [(4, 8), (5, 4, 8), (5, 4)], "dst of ne"),
        ("DSV4_HC_POST", b"", [(5, 4, 8), (5, 8), (5, 4, 8), (5, 4), (5, 4, 4)], None),
        ("DSV4_HC_POST", b"", [(5, 4, 8), (5, 8), (5, 4, 8), (5, 4), (5, 3, 4)], "comb of ne"),
        ("DSV4_HC_POST", b"", [(5, 4, 8), (5, 8), (5, 4, 8), (5, 3)], "post of ne"),
    ],
)
def test_what_does_not_fit_is_refused(op: str, params: bytes, shapes: list[Any], reason: str | None) -> None:
    refused = default_backend().refusal(of(op, params, *shapes))
    assert refused is None if reason is None else refused is not None and refused.startswith(reason)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"k": np.zeros((4, 6, 2, 32), np.float32)}, "k of ne"),
        ({"weights": np.zeros((4, 1, 5, 2), np.float32)}, "weights of ne"),
        ({"mask": np.zeros((3, 1, 5, 6), np.float16)}, "mask of ne"),
        ({"mask": np.zeros((4, 1, 5, 6), np.float32)}, "types"),
        ({"q": np.zeros((4, 5, 3, 64), np.float32)[..., ::2]}, "q rows of 32 elements, nb0 8"),
    ],
)
def test_what_does_not_fit_the_indexer_is_refused(changed: dict[str, Any], reason: str | None) -> None:
    arrays = {
        "dst": np.zeros((4, 1, 5, 6), np.float32),
        "q": np.zeros((4, 5, 3, 32), np.float32),
        "k": np.zeros((4, 6, 1, 32), np.float16),
        "weights": np.zeros((4, 1, 5, 3), np.float32),
        "mask": np.zeros((2, 1, 5, 6), np.float16),
        **changed,
    }
    dst, *sources = (Tensor.of(array) for array in arrays.values())
    refused = default_backend().refusal(Node("LIGHTNING_INDEXER", dst, tuple(sources)))
    assert refused is None if reason is None else refused is not None and refused.startswith(reason)
