"""IM2COL: every byte as ggml's CPU leaves it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import Scene, assert_equals_cpu, examples, seeds, values

from ggml_backend_npu import Node, Tensor, default_backend
from ggml_backend_npu.abi.plugin import Plugin

pytestmark = pytest.mark.usefixtures("every_op")


two = st.tuples(st.integers(1, 3), st.integers(1, 3))


@pytest.mark.parametrize(("type", "to"), [("f32", "f32"), ("f32", "f16"), ("f16", "f16")])
@pytest.mark.parametrize("flat", [False, True])
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), depth=two, kernel=two, step=two,
    pad=st.tuples(st.integers(0, 3), st.integers(0, 3)), apart=two, seed=seeds,
)  # fmt: skip
@examples(30)
def test_im2col(
    backend: Plugin,
    type: str,
    to: str,
    flat: bool,
    size: tuple[int, int],
    depth: tuple[int, int],
    kernel: tuple[int, int],
    step: tuple[int, int],
    pad: tuple[int, int],
    apart: tuple[int, int],
    seed: int,
) -> None:
    """flat: of one dimension, where images are rows of channels."""
    assume(all(n + 2 * p > d * (k - 1) for n, k, p, d in zip(size, kernel, pad, apart, strict=True)))
    channels, n_images = depth
    ne = (size[0], channels, n_images) if flat else (*size, channels, n_images)
    kernels = (kernel[0], channels, 2) if flat else (*kernel, channels, 2)

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        a = scene.root("f16", kernels, np.zeros(int(np.prod(kernels)), np.float16))
        x = scene.root(type, ne, values(type, int(np.prod(ne)), rng))
        pads = (pad[0], 0) if flat else pad
        return scene.op("im2col", a, x, *step, *pads, *apart, not flat, scene.ggml.type_numbers[to])

    assert_equals_cpu(backend, recipe, to)


def zeros(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("arrays", "is_2d", "reason"),
    [
        ((zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 4)), 1, None),
        ((zeros(1, 3, 3, 5), zeros(1, 2, 2), zeros(1, 4, 4)), 1, "dst of ne (5, 3, 3, 1)"),
        ((zeros(1, 2, 3, 2), zeros(1, 1, 2), zeros(2, 1, 1, 4)), 0, "x of ne (4, 1, 1, 2)"),
        ((zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 8)[..., ::2]), 1, "x rows have gaps"),
        ((zeros(1, 3, 3, 8)[..., ::2], zeros(1, 2, 2), zeros(1, 4, 4)), 1, "dst is not contiguous"),
        ((zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 4, dtype=np.float16)), 1, "types f32 f16 -> f32"),
    ],
)
def test_what_is_not_taken(arrays: tuple[NDArray[Any], ...], is_2d: int, reason: str | None) -> None:
    dst, *src = (Tensor.of(array) for array in arrays)
    refusal = (
        default_backend()
        .ops["IM2COL"]
        .refusal(Node("IM2COL", dst, tuple(src), struct.pack("7i", 1, 1, 0, 0, 1, 1, is_2d)))
    )
    assert refusal is None if reason is None else reason in str(refusal)
