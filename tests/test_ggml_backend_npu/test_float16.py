"""Attention and products where ggml's CPU computes with float16 itself: sums are rounded once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml import codecs, float16, lib
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.attention import FlashAttn, _flash_attn_ext, flash_attn_ext
from ggml_backend_npu.ops.kernels.cells_in_halves import _sum_in_halves
from ggml_backend_npu.ops.kernels.windows import Moves2d
from ggml_backend_npu.ops.transposed import Transpose1d
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry import probes
from quant.kernels.matrices import LANES

PARAMS = FlashAttn(0.25, 0.0, 0.0, prec=0, n_kv_max=0)


def node(rng: np.random.Generator, dv: int, cells: int, dk: int = 32) -> list[Tensor]:
    """q, k and v of one head; v has numbers of each size, subnormal ones too."""
    q = rng.standard_normal((1, 1, 2, dk)).astype(np.float32)
    k = rng.standard_normal((1, 1, cells, dk)).astype(np.float16)
    v = (rng.standard_normal((1, 1, cells, dv)) * 2.0 ** rng.integers(-25, 12, (1, 1, cells, dv))).astype(np.float16)
    return [Tensor.of(q), Tensor.of(k, "f16"), Tensor.of(v, "f16")]


def both(tensors: list[Tensor], step: int, dots: bool = False) -> list[np.ndarray]:
    """What the definition gives, and the kernel. dots: scores are added as float16."""
    q, _, v = tensors
    numerics = replace(codecs.bound(), matmul="exact", halves=step, dots_in_halves=dots)
    found = []
    for compiled in (False, True):
        dst = Tensor.of(np.zeros((1, q.ne[1], 1, v.ne[0]), np.float32))
        if compiled:
            call = _flash_attn_ext(dst, *tensors, None, None, PARAMS, numerics)
            assert call is not None
            call()
        else:
            flash_attn_ext.define(dst, *tensors, None, None, params=PARAMS, numerics=numerics)
        found.append(dst.view().copy())
    return found


def test_ggml_shows_how_many_it_takes_at_once() -> None:
    step = float16.step(lib.ggml())
    assert step in (0, *(n for feature, n in (("AVX512", 128), ("NEON", 32)) if feature in lib.ggml().features))
    assert codecs.bound().halves == step


@pytest.mark.parametrize("dv", [127, 128, 130, 256, 300])
@pytest.mark.parametrize("step", [0, 128])
def test_the_kernel_equals_the_definition(dv: int, step: int) -> None:
    for seed in range(20):
        tensors = node(np.random.default_rng(seed), dv, 9)
        expected, found = both(tensors, step)
        assert found.tobytes() == expected.tobytes(), seed


@pytest.mark.parametrize("dk", [31, 256, 330])
def test_scores_are_added_as_float16(dk: int) -> None:
    for seed in range(5):
        tensors = node(np.random.default_rng(seed), 130, 9, dk)
        expected, found = both(tensors, 32, dots=True)
        assert found.tobytes() == expected.tobytes(), seed
        assert np.array_equal(found, both(tensors, 32)[1]) == (dk == 31), "too few to be added as float16"


def test_float16_is_another_arithmetic() -> None:
    tensors = node(np.random.default_rng(0), 130, 9)
    (plain, _), (narrow, _) = both(tensors, 0), both(tensors, 128)
    assert (plain[..., :128] != narrow[..., :128]).any()
    assert (plain[..., 128:] == narrow[..., 128:]).all(), "the last elements are too few"


@given(st.integers(0, 2**32 - 1))
def test_a_sum_is_rounded_once(seed: int) -> None:
    """Against exact sums: a product of two float16 and a float16 have at most 64 bits, as integers of 2 ** -48."""
    rng = np.random.default_rng(seed)
    v = node(rng, 128, 2)[2].view()[0, 0].astype(np.float64)
    scores = np.array([[[[0.0, -rng.random() * 9]]]], np.float32)
    _, _, found = _sum_in_halves(scores, np.ones_like(scores, np.bool_), v.astype(np.float32)[None, None], 128)
    weight = np.float16(np.exp(scores[0, 0, 0, 1]))
    for i in range(128):
        exact = int(v[0, i] * 2.0**48) + int(v[1, i] * 2.0**24) * int(float(weight) * 2.0**24)
        nearest = min((abs(int(float(h) * 2.0**48) - exact), abs(int(h.view(np.uint16)) & 1), float(h))
                      for h in neighbours(exact))[2]  # fmt: skip
        assert found[0, 0, 0, i] == nearest


def neighbours(exact: int) -> list[np.float16]:
    """The float16 next to a number, in units of 2 ** -48, on both sides."""
    near = np.float16(exact * 2.0**-48)
    return [np.nextafter(near, np.float16(-np.inf)), near, np.nextafter(near, np.float16(np.inf))]


# products of float16


def plus(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float16, rounded once: float64 holds what decides."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float16)


def total(sums: np.ndarray) -> np.float32:
    """The sum of a vector: of ggml for NEON in float32, with AVX512-FP16 in float16."""
    if LANES == 4:
        sums = sums[:4].astype(np.float32) + sums[4:].astype(np.float32)
        return np.float32((sums[0] + sums[1]) + (sums[2] + sums[3]))
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return np.float32(sums[0])


def product(x: np.ndarray, y: np.ndarray, n_sums: int) -> np.float32:
    """The product of two rows of float16 by a loop: in n_sums vectors, and the rest as float64."""
    step = 2 * LANES * n_sums
    sums = np.zeros((n_sums, 2 * LANES), np.float16)
    for i in range(0, len(x) // step * step, step):
        sums = plus(x[i : i + step].reshape(sums.shape), y[i : i + step].reshape(sums.shape), sums)
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    found = np.float64(total(sums[0]))
    for a, b in zip(x[len(x) // step * step :], y[len(x) // step * step :], strict=True):
        found += np.float64(np.float32(a) * np.float32(b))
    return np.float32(found)


def multiplied(weights: np.ndarray, x: np.ndarray, dots: bool = False, blocks: bool = False) -> np.ndarray:
    """MUL_MAT by the kernel: a row of results for each row of x. dots, blocks: they are added as float16."""
    y = np.zeros((len(x), len(weights)), np.float32)
    of = Node("MUL_MAT", Tensor.of(y), (Tensor.of(weights, "f16"), Tensor.of(x.astype(np.float32))))
    OWN["MUL_MAT"].bind(of, Numerics(matmul="exact", dots_in_halves=dots, blocks_in_halves=blocks))()
    return y


@pytest.mark.parametrize("k", [1, 31, 32, 128, 192, 256, 320, 321, 577])
@pytest.mark.parametrize("columns", [1, 9])
@pytest.mark.parametrize("blocks", [False, True])
def test_products_are_added_as_float16_as_a_loop_adds_them(k: int, columns: int, blocks: bool) -> None:
    rng = np.random.default_rng(k)
    weights, x = (rng.standard_normal((n, k)) * 2.0 ** rng.integers(-14, 3, (n, k)) for n in (8, columns))
    weights, x = weights.astype(np.float16), x.astype(np.float16)
    y = multiplied(weights, x, dots=True, blocks=blocks)
    in_blocks = blocks and columns >= 8 and k % (2 * LANES) == 0
    if not blocks and columns > 1 and k % LANES == 0:  # float32 in blocks, as with AVX512-FP16
        assert y.tolist() == multiplied(weights, x).tolist()
    else:
        expected = [[product(row, column, 1 if in_blocks else 4) for row in weights] for column in x]
        assert y.tolist() == np.array(expected).tolist()


@pytest.mark.parametrize("columns", [1, 8])
def test_a_product_and_its_sum_are_rounded_once(columns: int) -> None:
    """1 + 2 ** -10 + 2 ** -11 - 2 ** -25 is nearer to 1 + 2 ** -10; a float32 between has not its last bit."""
    step = 2 * LANES * (4 if columns == 1 else 1)
    weights, x = np.zeros((4, 8 * LANES * 2), np.float16), np.zeros((columns, 8 * LANES * 2), np.float16)
    weights[:, [0, step]], x[:, [0, step]] = (1 + 2**-10, 2**-11 * (1 + 2**-7)), (1, 1 - 2**-7)
    assert (multiplied(weights, x, dots=True, blocks=True) == 1 + 2**-10).all()


@pytest.mark.parametrize("k", [31, 128, 320])
@pytest.mark.parametrize("places", [1, 9])
def test_a_convolution_of_single_pixels_is_a_product(k: int, places: int) -> None:
    rng = np.random.default_rng(k)
    weights, x = (rng.standard_normal((n, k)).astype(np.float16) for n in (8, places))
    numerics = Numerics(matmul="exact", dots_in_halves=True, blocks_in_halves=True)
    kernel, pixels = weights.reshape(8, k, 1, 1), x.T.astype(np.float32)
    image = probes.tensor("f32", pixels.reshape(1, k, 1, places))
    of = probes.node("CONV_2D", "f32", (8, 1, places), Tensor.of(kernel), image, params=Moves2d(1, 1, 0, 0, 1, 1))
    OWN["CONV_2D"].bind(of, numerics)()
    assert of.dst.view()[0, :, 0].T.tolist() == multiplied(weights, x, dots=True, blocks=True).tolist()
    sources = probes.tensor("f16", weights.T.reshape(1, k, 8, 1)), probes.tensor("f32", pixels.reshape(1, 1, k, places))
    turned = probes.node("CONV_TRANSPOSE_1D", "f32", (8, places), *sources, params=Transpose1d(1, 0, 1))
    OWN["CONV_TRANSPOSE_1D"].bind(turned, numerics)()
    one_by_one = [multiplied(weights, column, dots=True)[0].tolist() for column in np.split(x, places)]
    assert turned.dst.view()[0, 0].T.tolist() == one_by_one


def test_ggml_shows_which_products_it_adds_as_float16() -> None:
    """Kernels follow it, and have its bytes."""
    ggml, rng = lib.ggml(), np.random.default_rng(0)
    numerics = codecs.bound()
    assert (numerics.dots_in_halves, numerics.blocks_in_halves) == (float16.adds(ggml, 1), float16.adds(ggml, 8))
    with Replica(ggml, "CPU", threads=1) as cpu:
        for k, columns in itertools.product((32, 320, 577), (1, 3, 9)):
            weights, x = (
                Tensor.of(rng.standard_normal((n, k)).astype(kind)) for n, kind in ((8, "f2"), (columns, "f4"))
            )
            found = [Node("MUL_MAT", Tensor.of(np.zeros((columns, 8), np.float32)), (weights, x)) for _ in range(2)]
            cpu.compute(found[0])
            OWN["MUL_MAT"].bind(found[1], replace(numerics, matmul="exact"))()
            assert found[0].dst.view().tobytes() == found[1].dst.view().tobytes(), (k, columns)
