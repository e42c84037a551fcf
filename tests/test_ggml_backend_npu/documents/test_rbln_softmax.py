"""RBLN's softmax family and its tiles: their numbers, and definitions in float64 over random arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.documented import F32, FLOATS, LOWEST, ROUNDING, assert_near, either_engine
from kit.scores import (
    LAYOUTS,
    any_float,
    any_index,
    any_layout,
    any_mask,
    any_sink,
    causal,
    close,
    defined,
    defined_tile,
    drawn,
    f32,
    indices,
    marks,
    one,
    row,
    shapes,
    sinks,
    spoiled,
    windowed,
)
from kit.support import examples, seeds

from ggml_backend_npu import default_backend
from ggml_backend_npu.documents.rbln import (
    dynamic_flash_attn_tile,
    dynamic_masked_softmax,
    flash_attn_recompute,
    flash_attn_tile,
    masked_softmax,
    softmax,
    to_dynamic_index,
    window_softmax,
)

# numbers


@either_engine
def test_softmax() -> None:
    close(softmax(f32(1, 2, 3)), [0.09003057, 0.24472847, 0.66524096])
    close(softmax(f32([1, 2], [3, 4]), 0), [[0.11920292] * 2, [0.88079708] * 2])
    close(softmax(f32(1000, 1000)), [0.5, 0.5])
    for value in (np.nan, np.inf):
        assert np.isnan(softmax(f32(1, value, 2))).all()
    assert np.isnan(softmax(f32(-np.inf, -np.inf))).all()
    np.testing.assert_array_equal(softmax(f32(-np.inf, 1)), [0, 1])
    assert softmax(np.zeros((0, 3), np.float32)).shape == (0, 3)


@either_engine
def test_masked_softmax() -> None:
    x, mask = row(1, 2, 3, 4), row(1, 0, 1, 0)
    close(masked_softmax(x, mask), row(0.1192029, 0, 0.8807971, 0))
    with_sink = masked_softmax(x, mask, one(2))
    close(with_sink, row(0.0900306, 0, 0.6652410, 0))
    close(with_sink.sum(), 0.7552715)
    np.testing.assert_array_equal(masked_softmax(x, 0 * mask, one(2)), 0 * x)
    np.testing.assert_array_equal(masked_softmax(x, 0 * mask), 0 * x)
    np.testing.assert_array_equal(masked_softmax(x, 0 * mask, one(-np.inf)), 0 * x)
    np.testing.assert_array_equal(masked_softmax(x, mask, one(-np.inf)), masked_softmax(x, mask))
    np.testing.assert_array_equal(masked_softmax(row(-2e4, 5), row(1, 0)), row(1, 0))  # below any small MASK_VALUE


@either_engine
def test_nan_counts_where_it_is_not_masked() -> None:
    mask = row(1, 0, 1)
    x = np.concatenate([row(1, np.nan, 2), row(1, 0, np.nan), row(1, np.inf, 2)], 2)
    p = masked_softmax(x, np.broadcast_to(mask, x.shape))
    close(p[0, 0, [0, 2]], [[0.26894142, 0, 0.73105858]] * 2)
    assert np.isnan(p[0, 0, 1]).all()
    assert np.isnan(masked_softmax(x, np.broadcast_to(mask, x.shape), one(np.nan))).all()
    assert np.isnan(masked_softmax(row(-np.inf, 1), row(1, 0))).all()
    np.testing.assert_array_equal(masked_softmax(row(-np.inf, 1), row(1, 0), one(0)), row(0, 0))


@either_engine
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_makes_its_whole_row_nan_and_no_other(dtype: Any) -> None:
    x = np.zeros((1, 2, 3, 9), dtype)
    x[0, 1, 1, 4] = np.nan
    poisoned = np.zeros(x.shape, np.bool_)
    poisoned[0, 1, 1] = True
    for p in (
        softmax(x),
        masked_softmax(x, np.arange(9)[None, None, None].repeat(3, 2) % 4 == np.float16(0)),
        dynamic_masked_softmax(x, 3),
        dynamic_masked_softmax(x, np.array([3], np.int32), sink=np.zeros((1, 2, 1, 1), np.float32)),
        window_softmax(x, 3, window_size=4, strict=False),
    ):
        np.testing.assert_array_equal(np.isnan(p), poisoned)


@either_engine
def test_the_causal_rule_is_the_documents_mask_with_new_tokens_in_it() -> None:
    """Every index and size: ones up to the index, then a triangle set into the columns of the new tokens."""
    for n_rows, columns in product(range(1, 5), range(1, 7)):
        for index in range(columns + 1):
            expected = np.tile(np.arange(columns) < index, (n_rows, 1))
            new = expected[:, index : index + n_rows]
            new[:] = np.tri(n_rows)[:, : new.shape[1]]
            p = dynamic_masked_softmax(np.zeros((1, 1, n_rows, columns), np.float32), index)
            np.testing.assert_array_equal(p[0, 0] > 0, expected)


@either_engine
def test_dynamic_masked_softmax() -> None:
    x = f32([[[1, 2, 3, 4, 5], [1, 1, 1, 1, 1]]])
    expected = [[[[0.0900306, 0.2447285, 0.6652409, 0, 0], [0.25, 0.25, 0.25, 0.25, 0]]]]
    close(dynamic_masked_softmax(x, 2), expected)
    close(dynamic_masked_softmax(x, to_dynamic_index(np.array([2], np.int32)), np.ones((1, 5), np.float16)), expected)
    close(dynamic_masked_softmax(x, 5), softmax(x))  # a full partition
    padded = dynamic_masked_softmax(x, 2, np.array([[False, False, True, False, True]]))
    np.testing.assert_array_equal(padded[0, 0], [[0, 0, 1, 0, 0]] * 2)  # in the chunk as well, never the future


@either_engine
def test_window_softmax() -> None:
    x = f32([[[0, 1, 2, 9], [9, 0, 0, np.log(3)]]])
    close(window_softmax(x, 2, window_size=2, strict=False), [[[[0, 0.2689414, 0.7310586, 0], [0, 0, 0.25, 0.75]]]])
    wide = np.zeros((1, 1, 1, 129), np.float32)
    close(window_softmax(wide, 128, window_size=128)[0, 0, 0], [0, *[1 / 128] * 128])


@either_engine
def test_flash_attention_of_two_tiles() -> None:
    scores, values = row(1, 2, 3, 0), f32([10], [20], [30], [40])
    everything = np.ones((1, 1, 1, 2), np.bool_)
    max1, e1, sum1 = flash_attn_tile(scores[..., :2], everything)
    out1 = e1 @ values[:2]
    close(np.concatenate([max1, e1, sum1, out1], -1), row(2, 0.367879, 1, 1.367879, 23.678794))
    max2, e2, sum2 = flash_attn_tile(scores[..., 2:], everything, max1)
    out2 = e2 @ values[2:]
    close(np.concatenate([max2, e2, sum2, out2], -1), row(3, 1, 0.049787, 1.049787, 31.991483))
    total, out = flash_attn_recompute(max1, max2, sum1, sum2, out1, out2)
    close(np.concatenate([total, out, out / total], -1), row(1.553002, 40.702424, 26.208871))
    close(out / total, softmax(scores) @ values)


@either_engine
def test_a_masked_tile_adds_nothing() -> None:
    nothing = np.zeros((1, 1, 1, 2), np.float32)
    maximum, e, total = flash_attn_tile(row(np.nan, 5), nothing)
    np.testing.assert_array_equal(maximum, one(LOWEST))
    np.testing.assert_array_equal(np.concatenate([e, total], -1), row(0, 0, 0))
    again, e, total = flash_attn_tile(row(7, 5), nothing, maximum)
    np.testing.assert_array_equal(again, one(LOWEST))
    out = flash_attn_recompute(maximum, again, total, total, row(0, 0, 0), row(0, 0, 0))
    np.testing.assert_array_equal(np.concatenate(out, -1), row(0, 0, 0, 0))
    real, e, total = flash_attn_tile(row(-1e30, 5), row(1, 0), again)
    np.testing.assert_array_equal(np.concatenate([real, e, total], -1), row(-1e30, 1, 0, 1))
    close(np.concatenate(flash_attn_recompute(again, real, one(0), total, one(0), one(3)), -1), row(1, 3))
    kept, e, total = flash_attn_tile(row(7, 5), nothing, one(-3))
    np.testing.assert_array_equal(np.concatenate([kept, e, total], -1), row(-3, 0, 0, 0))


@either_engine
def test_scores_of_minus_infinity_count_for_nothing_in_a_tile() -> None:
    everything = np.ones((1, 1, 1, 2), np.bool_)
    maximum, e, total = flash_attn_tile(row(-np.inf, -np.inf), everything)
    np.testing.assert_array_equal(np.concatenate([maximum, e, total], -1), row(LOWEST, 0, 0, 0))
    maximum, e, total = flash_attn_tile(row(-np.inf, 2), everything, maximum)
    np.testing.assert_array_equal(np.concatenate([maximum, e, total], -1), row(2, 0, 1, 1))
    _, e, total = flash_attn_tile(row(np.nan, 2), everything)
    assert np.isnan(total).all()
    assert np.isnan(e @ f32([0], [1])).all()


def test_recompute_of_equal_maxima_changes_no_sum() -> None:
    for maximum in (-np.inf, np.inf, LOWEST):
        out = flash_attn_recompute(one(maximum), one(maximum), one(2), one(3), row(1, 2), row(3, 4))
        np.testing.assert_array_equal(np.concatenate(out, -1), row(5, 4, 6))
    out = flash_attn_recompute(one(-np.inf), one(0), one(2), one(3), row(1, 2), row(3, 4))
    np.testing.assert_array_equal(np.concatenate(out, -1), row(3, 3, 4))


@either_engine
@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 0, 3, 5), (2, 2, 0, 5), (0, 2, 2, 3, 5), (2, 2, 0, 3, 5)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_scores_of_no_rows(shape: tuple[int, ...], dtype: Any) -> None:
    x, mask = np.zeros(shape, dtype), np.ones((shape[0], *[1] * (len(shape) - 3), *shape[-2:]), np.bool_)
    at = np.ones(shape[0], np.int32)
    outputs = [softmax(x), softmax(x[None, None]), masked_softmax(x, mask), dynamic_masked_softmax(x, 5)]
    outputs += [*flash_attn_tile(x, mask), *dynamic_flash_attn_tile(x, at), window_softmax(x, 0, None, 1, strict=False)]
    ones = np.zeros((*shape[:-1], 1), np.float32)
    outputs += flash_attn_recompute(ones, ones, ones, ones, x, x)
    assert not any(output.size for output in outputs)


# properties


@either_engine
@given(seed=seeds, dtype=any_float, n_axes=st.integers(1, 6), axis=st.integers(-6, 5), layout=st.booleans())
def test_softmax_along_any_axis(seed: int, dtype: Any, n_axes: int, axis: int, layout: bool) -> None:
    rng = np.random.default_rng(seed)
    axis = axis % n_axes - n_axes * (axis < 0)
    x = drawn(tuple(rng.integers(1, 4, n_axes)), rng, dtype)
    x = x.T if layout else x
    expected = np.moveaxis(defined(np.moveaxis(x, axis, -1), np.ones(np.moveaxis(x, axis, -1).shape)), -1, axis)
    assert_near(softmax(x, axis), expected, dtype)


@either_engine
@given(seed=seeds, shape=shapes(), dtype=any_float, layout=any_layout, of=any_mask, sink=any_sink, single=st.booleans())
@examples(60)
def test_masked_softmax_and_tile(
    seed: int, shape: tuple[int, ...], dtype: Any, layout: str, of: Any, sink: str, single: bool
) -> None:
    rng = np.random.default_rng(seed)
    mask = marks((1 if single else shape[0], *[1] * (len(shape) - 3), *shape[-2:]), rng, of)
    kept = np.broadcast_to(mask != 0, shape)
    x = spoiled(drawn(shape, rng, dtype), kept, rng)
    logits = sinks(shape, rng, sink)
    laid_out, mask = LAYOUTS[layout](x), LAYOUTS[layout](mask)
    assert_near(masked_softmax(laid_out, mask, logits), defined(x, kept, logits), dtype)

    before = None if sink == "none" else drawn((*shape[:-1], 1), rng)
    maxima, e, sums = flash_attn_tile(laid_out, mask, before)
    expected = defined_tile(x, kept, before, None)
    assert_near(maxima, expected[0], F32)
    assert_near(e, expected[1], dtype)
    assert_near(sums, expected[2], F32)


@either_engine
@given(seed=seeds, shape=shapes(), dtype=any_float, layout=any_layout, of=any_mask, sink=any_sink, at=any_index)
@examples(60)
def test_dynamic_masked_softmax_and_tile(
    seed: int, shape: tuple[int, ...], dtype: Any, layout: str, of: Any, sink: str, at: str
) -> None:
    rng = np.random.default_rng(seed)
    index = indices(shape, shape[-1], rng, at)
    mask = marks((shape[0] if at == "each" else 1, shape[-1]), rng, of) if rng.random() < 0.6 else None
    kept = causal(shape, index)
    if mask is not None:
        kept = kept & (mask != 0).reshape(len(mask), *[1] * (len(shape) - 2), -1)
    x = spoiled(drawn(shape, rng, dtype), kept, rng)
    logits = sinks(shape, rng, sink)
    laid_out = LAYOUTS[layout](x)
    assert_near(dynamic_masked_softmax(laid_out, index, mask, logits), defined(x, kept, logits), dtype)

    before = drawn((*shape[:-1], 1), rng) if rng.random() < 0.5 else None
    maxima, e, sums = dynamic_flash_attn_tile(laid_out, index, before, mask, logits)
    expected = defined_tile(x, kept, before, logits)
    assert_near(maxima, expected[0], F32)
    assert_near(e, expected[1], dtype)
    assert_near(sums, expected[2], F32)


@either_engine
@given(seed=seeds, shape=shapes(), dtype=any_float, layout=any_layout, sink=any_sink, at=any_index)
@examples(60)
def test_window_softmax_is_the_band_of_the_whole_sequence(
    seed: int, shape: tuple[int, ...], dtype: Any, layout: str, sink: str, at: str
) -> None:
    rng = np.random.default_rng(seed)
    window = shape[-1]
    shape = (*shape[:-1], window + shape[-2])
    index = indices(shape, window, rng, at)
    shape = (*shape[:-1], int(np.max(index)) + shape[-2] + int(rng.integers(0, 9)))
    kept = windowed(shape, index, window)
    x = spoiled(drawn(shape, rng, dtype), kept, rng)
    logits = sinks(shape, rng, sink)
    actual = window_softmax(LAYOUTS[layout](x), index, sink=logits, window_size=window, strict=False)
    assert_near(actual, defined(x, kept, logits), dtype)


@given(seed=seeds, shape=shapes(), dtype=any_float, layout=any_layout)
def test_flash_attn_recompute(seed: int, shape: tuple[int, ...], dtype: Any, layout: str) -> None:
    rng = np.random.default_rng(seed)
    of_rows = (*shape[:-1], 1)
    before, now = (drawn(of_rows, rng) for _ in range(2))
    now = np.maximum(before, now)
    sums = [np.abs(drawn(of_rows, rng)) for _ in range(2)]
    outs = [LAYOUTS[layout](drawn(shape, rng, dtype)) for _ in range(2)]
    total, out = flash_attn_recompute(before, now, *sums, *outs)
    factor = np.exp(before.astype(np.float64) - now)
    expected = [factor * a + b.astype(np.float64) for a, b in (sums, outs)]
    close(total, expected[0], 4e-6)
    assert (out.dtype, out.shape) == (dtype, shape)
    close(out, expected[1], ROUNDING[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_scores_in_several_threads(layout: str, team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = LAYOUTS[layout](drawn((2, 3, 2, 65, 513), rng))
    sink, index = drawn((1, 3, 2, 1, 1), rng), np.array([448, 17], np.int32)
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
        results.append([window_softmax(x, index, sink, 448), *dynamic_flash_attn_tile(x, index, None, None, sink)])
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, together)
    monkeypatch.setenv("GGML_NPU_ENGINE", "reference")
    close(results[0][0], window_softmax(x, index, sink, 448))
