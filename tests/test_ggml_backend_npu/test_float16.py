"""Attention where ggml's CPU computes with float16 itself: sums are rounded once, and kernel and definition agree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggml_backend_npu import Tensor
from ggml_backend_npu.ggml import codecs, float16, lib
from ggml_backend_npu.ops.attention import FlashAttn, _flash_attn_ext, _sum_in_halves, flash_attn_ext

PARAMS = FlashAttn(0.25, 0.0, 0.0, prec=0, n_kv_max=0)


def node(rng: np.random.Generator, dv: int, cells: int) -> list[Tensor]:
    """q, k and v of one head; v has numbers of each size, subnormal ones too."""
    q = rng.standard_normal((1, 1, 2, 32)).astype(np.float32)
    k = rng.standard_normal((1, 1, cells, 32)).astype(np.float16)
    v = (rng.standard_normal((1, 1, cells, dv)) * 2.0 ** rng.integers(-25, 12, (1, 1, cells, dv))).astype(np.float16)
    return [Tensor.of(q), Tensor.of(k, "f16"), Tensor.of(v, "f16")]


def both(tensors: list[Tensor], step: int) -> list[np.ndarray]:
    """What the definition gives, and the kernel."""
    q, _, v = tensors
    numerics = replace(codecs.bound(), halves=step)
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
    assert step in ((0, 128) if "AVX512" in lib.ggml().features else (0,))
    assert codecs.bound().halves == step


@pytest.mark.parametrize("dv", [127, 128, 130, 256, 300])
@pytest.mark.parametrize("step", [0, 128])
def test_the_kernel_equals_the_definition(dv: int, step: int) -> None:
    for seed in range(20):
        tensors = node(np.random.default_rng(seed), dv, 9)
        expected, found = both(tensors, step)
        assert found.tobytes() == expected.tobytes(), seed


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
