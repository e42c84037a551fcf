"""KL divergence, perplexity and same-top share, beside their formulas in float64 and beside perplexity.cpp's steps."""

from __future__ import annotations

import numpy as np
import pytest

from graph_runner.quantdiff.scores import Base, Mean, Scores, mean

RANDOM = np.random.default_rng(0)
BIG = RANDOM.normal(0, 3, (40, 300)).astype(np.float32)
SMALL = BIG + RANDOM.normal(0, 0.3, BIG.shape).astype(np.float32)
TARGETS = RANDOM.integers(0, 300, 40)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    found: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return found


def scores(big: np.ndarray = BIG, small: np.ndarray = SMALL) -> Scores:
    return Base.of(big, [*TARGETS]).scores(small)


def test_kl_and_perplexity_are_those_of_the_formulas() -> None:
    p, q = log_softmax(BIG), log_softmax(SMALL)
    kls = (np.exp(p) * (p - q)).sum(axis=1)
    found = scores()
    np.testing.assert_allclose(found.kls, kls, atol=2e-4)  # the base model's are kept in 16 bits
    rows = np.arange(40)
    assert found.perplexity.value == pytest.approx(np.exp(-q[rows, TARGETS].mean()), rel=1e-6)
    assert found.perplexity_base.value == pytest.approx(np.exp(-p[rows, TARGETS].mean()), rel=1e-3)
    assert found.ratio.value == pytest.approx(found.perplexity.value / found.perplexity_base.value)
    assert found.same_top.value == (BIG.argmax(axis=1) == SMALL.argmax(axis=1)).mean()


def test_errors_are_those_of_the_mean() -> None:
    found = scores()
    assert found.kl.error == pytest.approx(found.kls.std() / 39**0.5)
    nll = found.nll.astype(np.float64)
    assert found.perplexity.error == pytest.approx(found.perplexity.value * nll.std() / 39**0.5, rel=1e-4)
    difference = (found.nll - found.nll_base).astype(np.float64)
    assert found.ratio.error == pytest.approx(found.ratio.value * difference.std() / 39**0.5, rel=1e-3)
    share = found.same_top.value
    assert found.same_top.error == pytest.approx((share * (1 - share) / 39) ** 0.5)
    assert mean(np.arange(10.0)) == Mean(4.5, 0.0)  # perplexity.cpp gives none for so few


def test_log_probabilities_are_kept_in_16_bits_over_a_range_of_16() -> None:
    row = np.array([[0.0, -1.0, -15.0, -40.0]], np.float32)
    base = Base.of(row, [0])
    assert base.scale[0] == np.float32(16) / np.float32(65535)
    assert [*base.steps[0]] == [65535, 61439, 4096, 0]
    assert base.lowest[0] + base.scale[0] * 65535 == pytest.approx(log_softmax(row)[0, 0], abs=1e-5)


def test_equal_logits_have_one_step() -> None:
    base = Base.of(np.zeros((1, 4), np.float32), [1])
    assert not base.scale.any()
    assert not base.steps.any()
    assert base.scores(np.zeros((1, 4), np.float32)).kls[0] == pytest.approx(0, abs=1e-6)


def test_a_model_beside_itself() -> None:
    found = scores(BIG, BIG)
    assert abs(found.kl.value) < 1e-4
    assert found.same_top == Mean(1.0, 0.0)
    assert found.ratio.value == pytest.approx(1, abs=1e-4)


def test_texts_are_joined() -> None:
    halves = [Base.of(BIG[part], [*TARGETS[part]]).scores(SMALL[part]) for part in (slice(15), slice(15, 40))]
    assert Scores.joined(halves).kl == scores().kl
