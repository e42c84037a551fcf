"""ROPE and ROPE_BACK in every mode, against ggml's CPU, by the kernel and by the definition."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.nodes import bind, dims
from kit.support import (
    PLAIN,
    Dims,
    Placement,
    Scene,
    assert_as_promised,
    by_engines,
    examples,
    is_allowed,
    outcome,
    placements,
    seeds,
)
from numpy.typing import NDArray

import quant
from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.ops.rope import Rope as RopeParams
from ggml_backend_npu.plugin.plugin import Plugin

NORMAL, NEOX, MROPE, VISION, IMROPE = 0, 2, 8, 24, 40
NMSE = {"f32": 1e-12, "f16": 1e-9}  # the last bit of cos and sin is the C library's
NMSE_YARN = 1e-7  # its angles are sums, of which a compiler may fuse one product with the addition

pytestmark = pytest.mark.usefixtures("every_op")


@dataclass(frozen=True)
class Rope:
    """Of ne; n_dims elements from n_offs on. how: "", "_inplace" or "_back"."""

    ne: Dims = (64, 3, 5, 2)
    n_dims: int = 64
    n_offs: int = 0
    mode: int = NORMAL
    type: str = "f32"
    how: str = ""
    yarn: float = 0.0
    factors: bool = False
    sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    place: Placement = PLAIN
    seed: int = 0

    def __call__(self, scene: Scene) -> int:
        rng = np.random.default_rng(self.seed)
        x = self.place.put(scene, self.type, self.ne, lambda n: quant.quantize(rng.standard_normal(n), self.type))
        several = self.mode >= MROPE
        at = rng.choice([0, 1, 7, -40, 3000], (4 if several else 1) * self.ne[2]).astype(np.int32)
        positions = scene.root("i32", at.shape, at)
        factors = None
        if self.factors:
            factors = scene.root("f32", (self.n_dims,), rng.uniform(1, 8, self.n_dims).astype(np.float32))
        kind = ((ctypes.c_int * 4)(*self.sections), self.mode) if several else (self.mode,)
        numbers: tuple[Any, ...] = (512, 10000.0, 0.25 if self.yarn else 1.0, self.yarn, 1.0, 32.0, 1.0)
        name = f"rope_{'multi' if several else 'ext'}{self.how}"
        node = scene.op(name, x, positions, factors, self.n_dims, *kind, *numbers)
        if self.n_offs:
            scene.function("rope_set_offset")(node, self.n_offs)
        return node


def assert_close_to_cpu(backend: Plugin, recipe: Rope) -> None:
    cpu = outcome(backend, "CPU", recipe)
    expected = quant.dequantize(cpu.after[0], recipe.type).astype(np.float64)
    for name, npu in by_engines(backend, recipe, in_place=recipe.how == "_inplace").items():
        found = quant.dequantize(npu.after[0], recipe.type).astype(np.float64)
        bound = NMSE_YARN if recipe.yarn else NMSE[recipe.type]
        near = np.square(found - expected).sum() <= bound * np.square(expected).sum()
        # a half float may be the next
        assert near or is_allowed(backend.ggml, recipe, npu.after[0], cpu.after[0]), name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="which products are fused is the compiler's choice")
@pytest.mark.parametrize("mode", [NORMAL, NEOX])
@pytest.mark.parametrize("type", ["f32", "f16"])
@pytest.mark.parametrize("n_dims", [32, 64, 128])
def test_the_kernel_rotates_byte_for_byte_as_the_cpu(backend: Plugin, mode: int, type: str, n_dims: int) -> None:
    """Where n_dims is whole vectors: behind them a compiler fuses other products."""
    recipe = Rope((n_dims, 5, 70, 2), n_dims, mode=mode, type=type)
    assert_as_promised(backend, recipe, "ROPE")


@st.composite
def ropes(draw: st.DrawFn) -> Rope:
    mode = draw(st.sampled_from([NORMAL, NEOX, MROPE, VISION, IMROPE]))
    n_dims = 2 * draw(st.integers(1, 33))
    n_offs, behind = (2 * draw(st.integers(0, 2)) for _ in range(2))
    if mode == VISION:
        n_offs, behind = 0, n_dims
    sections = (0, 0, 0, 0)
    if mode >= MROPE:
        most = (n_dims + n_offs + behind) // 4
        sections = dims((draw(st.integers(1, max(1, most))), *(draw(st.integers(0, most)) for _ in range(3))))
        if sum(sections) > n_dims:
            sections = (1, 0, 0, 0)
    ne = (n_offs + n_dims + behind, *(draw(st.integers(1, 3)) for _ in range(3)))
    return Rope(
        dims(ne),
        n_dims,
        n_offs,
        mode,
        type=draw(st.sampled_from(["f32", "f16"])),
        how=draw(st.sampled_from(["", "", "_inplace", "_back"])),
        yarn=draw(st.sampled_from([0.0, 0.0, 1.0, 0.5])),
        factors=draw(st.booleans()),
        sections=sections,
        place=draw(placements(rows=True)),
        seed=draw(seeds),
    )


@given(recipe=ropes())
@examples(80)
def test_rope(backend: Plugin, recipe: Rope) -> None:
    assert_close_to_cpu(backend, recipe)


CASES = {
    "a prompt": Rope((64, 9, 100, 1)),
    "dimensions that are no power of 2": Rope((80, 2, 9, 1), 80, mode=NEOX),
    "sections of a model": Rope((128, 2, 9, 1), 128, mode=MROPE, sections=(16, 24, 24, 0)),
    "interleaved": Rope((128, 2, 9, 1), 128, mode=IMROPE, sections=(24, 20, 20, 0)),
    "vision": Rope((80, 2, 9, 1), 40, mode=VISION, sections=(20, 20, 0, 0)),
    "vision, four sections": Rope((64, 2, 9, 1), 32, mode=VISION, sections=(8, 4, 4, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_rope_of(backend: Plugin, name: str) -> None:
    assert_close_to_cpu(backend, CASES[name])


def test_elements_that_stay_keep_their_bits() -> None:
    """NaNs too."""
    x = np.full((1, 2, 8), 0x7C01, np.uint16).view(np.float16)
    x[..., 2:6] = 1
    dst = np.zeros_like(x)
    params = RopeParams(0, 4, NEOX, 0, 512, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, 0, 0, 0, 0, 2)
    for call in (
        bind,
        lambda node: lambda: default_backend().ops["ROPE"].define(node.dst, *node.src, None, params=params),
    ):
        dst[:] = 0
        call(Node("ROPE", Tensor.of(dst), (Tensor.of(x), Tensor.of(np.array([3], np.int32))), params.packed))()
        assert (np.delete(dst.view(np.uint16), slice(2, 6), -1) == 0x7C01).all()
        assert np.isfinite(dst[..., 2:6]).all()


def node(
    *, mode: int = NORMAL, n_dims: int = 8, n_offs: int = 0, sections: Dims = (1, 1, 1, 0), **changed: Any
) -> Node:
    arrays: dict[str, NDArray[Any]] = {"dst": np.zeros((5, 3, 16), np.float32), "x": np.zeros((5, 3, 16), np.float32)}
    arrays["positions"] = np.zeros(20 if mode >= MROPE else 5, np.int32)
    dst, *sources = (Tensor.of(array) for array in {**arrays, **changed}.values())
    params = RopeParams(0, n_dims, mode, 0, 512, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, *sections, n_offs).packed
    return Node("ROPE", dst, tuple(sources), params)


@pytest.mark.parametrize("mode", [NORMAL, NEOX, MROPE, VISION, IMROPE])
def test_what_fits_is_taken(mode: int) -> None:
    assert default_backend().refusal(node(mode=mode)) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mode": 1}, "mode 1"),
        ({"mode": MROPE, "positions": np.zeros(5, np.int32)}, r"positions of ne \(5, 1, 1, 1\)"),
        ({"dst": np.zeros((5, 3, 18), np.float32)}, "do not fit dst"),
        ({"x": np.zeros((5, 3, 32), np.float32)[..., ::2]}, "x rows have gaps"),
        ({"n_dims": 0}, "0 dimensions from 0 on, of 16"),
        ({"n_dims": 7}, "7 dimensions from 0 on, of 16"),
        ({"n_offs": 10}, "8 dimensions from 10 on, of 16"),
        ({"n_offs": 1}, "8 dimensions from 1 on, of 16"),
        ({"mode": VISION, "n_dims": 4}, "for vision"),
        ({"mode": MROPE, "sections": (0, 0, 0, 2)}, r"sections \(0, 0, 0, 2\)"),
        ({"mode": IMROPE, "sections": (9, 9, 0, 0)}, r"sections \(9, 9, 0, 0\)"),
        ({"factors": np.zeros(3, np.float32)}, "factors of type f32"),
        ({"factors": np.zeros(4, np.float16)}, "factors of type f16"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        default_backend().check(node(**changed))
