"""IM2COL, CONV_2D, CONV_3D, CONV_2D_DW, CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D and their like beside ggml's CPU, by
either engine: every byte, or as far as bytes are promised."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.support import (
    ENGINES,
    PLAIN,
    Placement,
    Scene,
    assert_as_promised,
    assert_equals_cpu,
    choose,
    computed,
    examples,
    placements,
    refusal,
    seeds,
    supported,
    values,
    zeros,
)
from numpy.typing import NDArray

from ggml_backend_npu.plugin.plugin import Plugin

pytestmark = pytest.mark.usefixtures("every_op")

Put = Callable[[Scene], int]

two = st.tuples(st.integers(1, 3), st.integers(1, 3))
three = st.tuples(*[st.integers(1, 3)] * 3)
KERNELS = ("f32", "f16")
BY_PIXELS = Placement(axes=(2, 0, 1, 3))  # channels first in memory


@pytest.fixture(autouse=True)
def exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are multiplied in ggml's own steps."""
    choose(monkeypatch, matmul="exact")


def floats(type: str, ne: tuple[int, ...], seed: int, place: Placement = PLAIN) -> Put:
    """A tensor of plain numbers, as large as each other."""
    dims = (*ne, 1, 1, 1)[:4]

    def put(scene: Scene) -> int:
        x = np.random.default_rng(seed).standard_normal
        return place.put(scene, type, dims, lambda n: x(n).astype(np.float16 if type == "f16" else np.float32))

    return put


def promise(op: str, kernel: str, n: int) -> str:
    """Of dot products of n elements."""
    return f"{op} of f16" if kernel == "f16" else f"{op} of f32, {'other rows' if n % 64 else 'rows of whole 64s'}"


def fits(size: tuple[int, ...], kernel: tuple[int, ...], pad: tuple[int, ...], apart: tuple[int, ...]) -> bool:
    return all(n + 2 * p > d * (k - 1) for n, k, p, d in zip(size, kernel, pad, apart, strict=True))


# IM2COL, IM2COL_3D, IM2COL_BACK

in_any_plane = given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)), depth=two, kernel=two, step=two,
    pad=st.tuples(st.integers(0, 3), st.integers(0, 3)), apart=two, seed=seeds,
)  # fmt: skip


@pytest.mark.parametrize(("type", "to"), [("f32", "f32"), ("f32", "f16"), ("f16", "f16")])
@pytest.mark.parametrize("flat", [False, True])
@in_any_plane
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
    assume(fits(size, kernel, pad, apart))
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


@pytest.mark.parametrize("to", ["f32", "f16"])
@given(
    size=three, channels=st.integers(1, 3), n_images=st.integers(1, 3), kernel=three, step=three,
    pad=st.tuples(*[st.integers(0, 3)] * 3), apart=three, place=placements(rows=True), seed=seeds,
)  # fmt: skip
@examples(40)
def test_im2col_3d(
    backend: Plugin,
    to: str,
    size: tuple[int, int, int],
    channels: int,
    n_images: int,
    kernel: tuple[int, int, int],
    step: tuple[int, int, int],
    pad: tuple[int, int, int],
    apart: tuple[int, int, int],
    place: Placement,
    seed: int,
) -> None:
    assume(fits(size, kernel, pad, apart))

    def recipe(scene: Scene) -> int:
        rng = np.random.default_rng(seed)
        x = place.put(scene, "f32", (*size, channels * n_images), lambda n: values("f32", n, rng))
        a = floats("f16", (*kernel, 2 * channels), 0)(scene)
        return scene.op("im2col_3d", a, x, channels, *step, *pad, *apart, scene.ggml.type_numbers[to])

    assert_equals_cpu(backend, recipe, to)


@pytest.mark.parametrize("type", KERNELS)
@pytest.mark.parametrize("flat", [False, True])
@in_any_plane
@examples(30)
def test_im2col_back(
    backend: Plugin,
    type: str,
    flat: bool,
    size: tuple[int, int],
    depth: tuple[int, int],
    kernel: tuple[int, int],
    step: tuple[int, int],
    pad: tuple[int, int],
    apart: tuple[int, int],
    seed: int,
) -> None:
    assume(fits(size, kernel, pad, apart))
    channels, n_images = depth
    moves = list(zip(size, kernel, step, pad, apart, strict=True))[: 1 if flat else 2]
    places = tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in moves)
    ne = (size[0], channels, n_images, 1) if flat else (*size, channels, n_images)
    kernels = (kernel[0], channels, 2) if flat else (*kernel, channels, 2)

    def recipe(scene: Scene) -> int:
        seen = prod(kernel[:1] if flat else kernel) * channels
        gradient = floats("f32", (seen, *places, n_images), seed)(scene)
        dims = (ctypes.c_int64 * 4)(*ne)
        return scene.op("im2col_back", gradient, floats(type, kernels, 0)(scene), dims, *step, *pad, *apart, not flat)

    assert_equals_cpu(backend, recipe)


@pytest.mark.parametrize("n", [1, 5])
def test_an_image_that_is_not_whole_is_left_out(backend: Plugin, n: int) -> None:
    """Of three channels, of which there are fewer, or two more."""

    def recipe(scene: Scene) -> int:
        a, x = floats("f16", (1, 1, 1, 3), 0)(scene), floats("f32", (3, 2, 2, n), 1)(scene)
        return scene.op("im2col_3d", a, x, 3, *[1] * 3, *[0] * 3, *[1] * 3, scene.ggml.type_numbers["f32"])

    assert_equals_cpu(backend, recipe)


# CONV_2D, CONV_3D


@pytest.mark.parametrize("type", KERNELS)
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 9)), depth=st.tuples(st.sampled_from((1, 3, 8, 16)), two),
    kernel=two, n_kernels=st.sampled_from((1, 3, 4, 8, 70)), step=two, pad=st.tuples(*[st.integers(0, 3)] * 2),
    apart=two, place=placements(), seed=seeds,
)  # fmt: skip
@examples(60)
def test_conv_2d(
    backend: Plugin,
    type: str,
    size: tuple[int, int],
    depth: tuple[int, tuple[int, int]],
    kernel: tuple[int, int],
    n_kernels: int,
    step: tuple[int, int],
    pad: tuple[int, int],
    apart: tuple[int, int],
    place: Placement,
    seed: int,
) -> None:
    assume(fits(size, kernel, pad, apart))
    channels, (n_images, _) = depth

    def recipe(scene: Scene) -> int:
        a = floats(type, (*kernel, channels, n_kernels), seed)(scene)
        x = floats("f32", (*size, channels, n_images), seed + 1, place)(scene)
        return scene.op("conv_2d_direct", a, x, *step, *pad, *apart)

    assert_as_promised(backend, recipe, promise("CONV_2D", type, channels * prod(kernel)))


@pytest.mark.parametrize("type", KERNELS)
@pytest.mark.parametrize(
    ("ne", "kernels"),
    [((40, 37, 32, 2), (3, 3, 32, 20)), ((7, 7, 256, 1), (3, 3, 256, 600)), ((33, 30, 3, 1), (7, 5, 3, 6))],
)
def test_conv_2d_of_many_places(backend: Plugin, type: str, ne: tuple[int, ...], kernels: tuple[int, ...]) -> None:
    """More than a tile, and kernels in parts."""

    def recipe(scene: Scene) -> int:
        return scene.op(
            "conv_2d_direct", floats(type, kernels, 0)(scene), floats("f32", ne, 1)(scene), 1, 1, 1, 1, 1, 1
        )

    assert_as_promised(backend, recipe, promise("CONV_2D", type, prod(kernels[:3])))


@pytest.mark.parametrize("type", KERNELS)
@given(
    size=st.tuples(*[st.integers(1, 6)] * 3), depth=st.tuples(st.sampled_from((1, 3, 8, 16)), st.integers(1, 3)),
    kernel=three, n_kernels=st.sampled_from((1, 3, 4, 8)), step=three, pad=st.tuples(*[st.integers(0, 2)] * 3),
    apart=three, place=placements(), seed=seeds,
)  # fmt: skip
@examples(60)
def test_conv_3d(
    backend: Plugin,
    type: str,
    size: tuple[int, int, int],
    depth: tuple[int, int],
    kernel: tuple[int, int, int],
    n_kernels: int,
    step: tuple[int, int, int],
    pad: tuple[int, int, int],
    apart: tuple[int, int, int],
    place: Placement,
    seed: int,
) -> None:
    assume(fits(size, kernel, pad, apart))
    channels, n_images = depth

    def recipe(scene: Scene) -> int:
        a = floats(type, (*kernel, channels * n_kernels), seed)(scene)
        x = floats("f32", (*size, channels * n_images), seed + 1, place)(scene)
        return scene.op("conv_3d_direct", a, x, *step, *pad, *apart, channels, n_images, n_kernels)

    assert_as_promised(backend, recipe, promise("CONV_3D", type, channels * prod(kernel)))


@pytest.mark.parametrize("type", KERNELS)
def test_blas_is_as_near(backend: Plugin, type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where matrices are multiplied fast, rows are not rounded: what the definition gives then."""
    rng = np.random.default_rng(0)
    x, kernel = (rng.standard_normal(shape) for shape in ((2, 16, 30, 17), (20, 16, 3, 3)))
    sources = kernel.astype(np.float16 if type == "f16" else np.float32), x.astype(np.float32)
    params, found = struct.pack("6i", 1, 1, 1, 1, 1, 1), []
    choose(monkeypatch, matmul="fast")
    for name in ENGINES:
        monkeypatch.setenv("GGML_NPU_ENGINE", name)
        found.append(computed("CONV_2D", np.zeros((2, 20, 30, 17), np.float32), *sources, params=params))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-4)
    wide = np.pad(sources[1].astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), axis=(2, 3))
    right = np.einsum("nchwij,ocij->nohw", windows, sources[0].astype(np.float64))
    np.testing.assert_allclose(found[0], right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("kernel", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_kernels_of_no_size(
    backend: Plugin, kernel: tuple[int, int, int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recipe(scene: Scene) -> int:
        a, x = floats("f32", (*kernel, 2), 0)(scene), floats("f32", (3, 2, 2, 1), 1)(scene)
        return scene.op("conv_3d_direct", a, x, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 2)

    choose(monkeypatch, matmul=mode)
    assert_equals_cpu(backend, recipe)


# CONV_2D_DW


@pytest.mark.parametrize("type", KERNELS)
@pytest.mark.parametrize("together", [False, True])
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 9)), channels=st.integers(1, 40), n_images=st.integers(1, 3),
    kernel=two, step=two, pad=st.tuples(*[st.integers(0, 3)] * 2), apart=two, seed=seeds,
)  # fmt: skip
@examples(60)
def test_conv_2d_dw(
    backend: Plugin,
    type: str,
    together: bool,
    size: tuple[int, int],
    channels: int,
    n_images: int,
    kernel: tuple[int, int],
    step: tuple[int, int],
    pad: tuple[int, int],
    apart: tuple[int, int],
    seed: int,
) -> None:
    """together: the channels of a pixel."""
    assume(fits(size, kernel, pad, apart))
    assume(not together or (channels > 1 and size[0] > 1 and kernel[0] > 1))

    def recipe(scene: Scene) -> int:
        kernels, x = floats(type, (*kernel, 1, channels), seed), (*size, channels, n_images)
        if together:
            turned = floats(type, (channels, 1, *kernel), seed)(scene)
            a = scene.permute(turned, (3, 2, 0, 1))
            return scene.op("conv_2d_dw_direct", a, floats("f32", x, 1, BY_PIXELS)(scene), *step, *pad, *apart)
        return scene.op("conv_2d_dw_direct", kernels(scene), floats("f32", x, 1)(scene), *step, *pad, *apart)

    assert_as_promised(backend, recipe, f"CONV_2D_DW of {type}, up to 5 wide")


# CONV_TRANSPOSE_1D, CONV_TRANSPOSE_2D, COL2IM_1D


@pytest.mark.parametrize("type", KERNELS)
@given(
    n=st.integers(1, 70), channels=st.sampled_from((1, 3, 8, 64, 70)), to=st.integers(1, 5), k=st.integers(1, 9),
    step=st.integers(1, 10), apart=st.booleans(), seed=seeds,
)  # fmt: skip
@examples(60)
def test_conv_transpose_1d(
    backend: Plugin, type: str, n: int, channels: int, to: int, k: int, step: int, apart: bool, seed: int
) -> None:
    place = Placement(steps=(1, 2, 1, 1), before=(1, 1, 0, 0)) if apart else PLAIN

    def recipe(scene: Scene) -> int:
        a, x = floats(type, (k, to, channels), seed, place)(scene), floats("f32", (n, channels), seed + 1, place)(scene)
        return scene.op("conv_transpose_1d", a, x, step, 0, 1)

    assert_as_promised(backend, recipe, promise("CONV_TRANSPOSE_1D", type, channels))


@pytest.mark.parametrize("type", KERNELS)
@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 9)), channels=st.sampled_from((1, 3, 8, 64, 70)),
    to=st.integers(1, 5), n_images=st.integers(1, 3), kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    step=st.integers(1, 5), place=placements(rows=True), seed=seeds,
)  # fmt: skip
@examples(60)
def test_conv_transpose_2d(
    backend: Plugin,
    type: str,
    size: tuple[int, int],
    channels: int,
    to: int,
    n_images: int,
    kernel: tuple[int, int],
    step: int,
    place: Placement,
    seed: int,
) -> None:
    def recipe(scene: Scene) -> int:
        a = floats(type, (*kernel, to, channels), seed)(scene)
        return scene.op(
            "conv_transpose_2d_p0", a, floats("f32", (*size, channels, n_images), seed + 1, place)(scene), step
        )

    assert_as_promised(backend, recipe, promise("CONV_TRANSPOSE_2D", type, channels))


@pytest.mark.parametrize("type", ["f32", "f16", "bf16"])
@given(
    n=st.integers(1, 60), channels=st.integers(1, 4), k=st.integers(1, 9), step=st.integers(1, 10),
    pad=st.integers(0, 4), seed=seeds,
)  # fmt: skip
@examples(60)
def test_col2im_1d(backend: Plugin, type: str, n: int, channels: int, k: int, step: int, pad: int, seed: int) -> None:
    assume((n - 1) * step + k > 2 * pad)

    def recipe(scene: Scene) -> int:
        ne = (k * channels, n)
        x = scene.root(type, ne, values(type, prod(ne), np.random.default_rng(seed), "plain"))
        return scene.op("col2im_1d", x, step, channels, pad)

    assert_equals_cpu(backend, recipe, type)


def test_a_long_signal(backend: Plugin) -> None:
    """Of more than one span."""

    def recipe(scene: Scene) -> int:
        return scene.op("col2im_1d", floats("f32", (2 * 20, 1200), 0)(scene), 8, 2, 5)

    assert_equals_cpu(backend, recipe)


# refusals


def by_pixels(*shape: int) -> NDArray[Any]:
    """(images, channels, height, width) of which the channels of a pixel lie together."""
    return np.moveaxis(zeros(shape[0], *shape[2:], shape[1]), -1, 1)


ONCE = (1, 1, 0, 0, 1, 1)
IN_SPACE = (1, 1, 1, 0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("IM2COL", (zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 4)), (*ONCE, 1), None),
        ("IM2COL", (zeros(1, 3, 3, 5), zeros(1, 2, 2), zeros(1, 4, 4)), (*ONCE, 1), "dst of ne (5, 3, 3, 1)"),
        ("IM2COL", (zeros(1, 2, 3, 2), zeros(1, 1, 2), zeros(2, 1, 1, 4)), (*ONCE, 0), "x of ne (4, 1, 1, 2)"),
        ("IM2COL", (zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 8)[..., ::2]), (*ONCE, 1), "x rows have gaps"),
        ("IM2COL", (zeros(1, 3, 3, 8)[..., ::2], zeros(1, 2, 2), zeros(1, 4, 4)), (*ONCE, 1), "dst is not contiguous"),
        (
            "IM2COL",
            (zeros(1, 3, 3, 4), zeros(1, 2, 2), zeros(1, 4, 4, dtype=np.float16)),
            (*ONCE, 1),
            "types f32 f16 -> f32",
        ),
        ("IM2COL_3D", (zeros(3, 3, 3, 8), zeros(1, 2, 2, 2), zeros(1, 4, 4, 4)), (*IN_SPACE, 1), None),
        ("IM2COL_3D", (zeros(3, 3, 3, 8), zeros(1, 2, 2, 2), zeros(1, 4, 4, 4)), (*IN_SPACE, 0), "0 channels"),
        ("IM2COL_3D", (zeros(3, 3, 3, 7), zeros(1, 2, 2, 2), zeros(1, 4, 4, 4)), (*IN_SPACE, 1), "dst of ne (7, 3"),
        ("IM2COL_BACK", (zeros(1, 4, 4), zeros(1, 3, 3, 4), zeros(1, 2, 2)), (*ONCE, 1), None),
        ("IM2COL_BACK", (zeros(1, 4, 4), zeros(1, 3, 3, 4), zeros(1, 2, 2)), (0, 1, 0, 0, 1, 1, 1), "strides 0, 1"),
        ("IM2COL_BACK", (zeros(1, 4, 4), zeros(1, 3, 3, 5), zeros(1, 2, 2)), (*ONCE, 1), "gradient of ne (5, 3, 3, 1)"),
        ("CONV_2D", (zeros(1, 5, 3, 3), zeros(5, 2, 2, 2), zeros(1, 2, 4, 4)), ONCE, None),
        ("CONV_2D", (zeros(1, 5, 3, 3), zeros(5, 3, 2, 2), zeros(1, 2, 4, 4)), ONCE, "kernel of ne (2, 2, 3, 5)"),
        ("CONV_2D", (zeros(1, 5, 3, 3), zeros(5, 2, 2, 4)[..., ::2], zeros(1, 2, 4, 4)), ONCE, "kernel is not"),
        ("CONV_2D", (zeros(1, 1, 1, 1), zeros(1, 1, 1, 1 << 22), zeros(1, 1, 1, 4)), ONCE, "16777220 bytes"),
        (
            "CONV_2D",
            (zeros(1, 5, 3, 3), zeros(5, 2, 2, 2), zeros(1, 2, 4, 4, dtype=np.float16)),
            ONCE,
            "types f32 f16 -> f32",
        ),
        ("CONV_3D", (zeros(5, 1, 3, 3), zeros(10, 1, 2, 2), zeros(2, 1, 4, 4)), (*IN_SPACE, 2, 1, 5), None),
        ("CONV_3D", (zeros(5, 1, 3, 3), zeros(10, 1, 2, 2), zeros(2, 1, 4, 4)), (*IN_SPACE, 2, 1, 4), "kernel of ne"),
        ("CONV_2D_DW", (zeros(1, 5, 3, 3), zeros(5, 1, 2, 2), zeros(1, 5, 4, 4)), ONCE, None),
        ("CONV_2D_DW", (zeros(1, 5, 3, 3), zeros(4, 1, 2, 2), zeros(1, 5, 4, 4)), ONCE, "kernel of ne (2, 2, 1, 4)"),
        ("CONV_2D_DW", (zeros(1, 5, 3, 3), zeros(5, 1, 2, 2), zeros(1, 5, 4, 8)[..., ::2]), ONCE, "x is neither"),
        ("CONV_2D_DW", (by_pixels(1, 5, 3, 3), zeros(5, 1, 2, 2), by_pixels(1, 5, 4, 4)), ONCE, "x has its channels"),
        ("CONV_TRANSPOSE_1D", (zeros(3, 9), zeros(2, 3, 3), zeros(2, 4)), (2, 0, 1), None),
        ("CONV_TRANSPOSE_1D", (zeros(3, 9), zeros(2, 3, 3), zeros(2, 4)), (2, 1, 1), "padding 1, dilation 1"),
        ("CONV_TRANSPOSE_1D", (zeros(3, 9), zeros(2, 3, 3), zeros(2, 4)), (0, 0, 1), "stride 0"),
        ("CONV_TRANSPOSE_1D", (zeros(3, 8), zeros(2, 3, 3), zeros(2, 4)), (2, 0, 1), "dst of ne (8, 1, 3, 1)"),
        ("CONV_TRANSPOSE_1D", (zeros(3, 9), zeros(2, 3, 3), zeros(2, 2, 4)), (2, 0, 1), "x of ne (4, 2, 2, 1)"),
        ("CONV_TRANSPOSE_2D", (zeros(1, 3, 9, 9), zeros(2, 3, 3, 3), zeros(1, 2, 4, 4)), (2,), None),
        (
            "CONV_TRANSPOSE_2D",
            (zeros(1, 3, 9, 9), zeros(2, 3, 6, 3)[:, :, ::2], zeros(1, 2, 4, 4)),
            (2,),
            "kernel rows are not adjacent",
        ),
        ("CONV_TRANSPOSE_2D", (zeros(1, 3, 9, 9), zeros(2, 3, 3, 3), zeros(1, 2, 4, 8)[..., ::2]), (2,), "x rows have"),
        ("COL2IM_1D", (zeros(3, 9), zeros(4, 9)), (2, 3, 0), None),
        ("COL2IM_1D", (zeros(3, 9), zeros(4, 9)), (0, 3, 0), "stride 0, 3 channels, padding 0"),
        ("COL2IM_1D", (zeros(2, 9), zeros(4, 9)), (2, 2, 0), "x of ne (9, 4, 1, 1)"),
        ("COL2IM_1D", (zeros(3, 9), zeros(4, 18)[:, ::2]), (2, 3, 0), "x is not contiguous"),
    ],
)  # fmt: skip
def test_what_is_not_taken(
    op: str, arrays: tuple[NDArray[Any], ...], params: tuple[int, ...], reason: str | None
) -> None:
    why = refusal(op, *arrays, params=struct.pack(f"{len(params)}i", *params))
    assert why is None if reason is None else reason in str(why)


def test_kernels_of_other_types_are_refused(backend: Plugin) -> None:
    def recipe(scene: Scene) -> int:
        a = scene.root("bf16", (2, 2, 3, 4), np.zeros(48, np.uint16))
        return scene.op("conv_2d_direct", a, floats("f32", (5, 5, 3), 0)(scene), 1, 1, 0, 0, 1, 1)

    assert not supported(backend, recipe)
