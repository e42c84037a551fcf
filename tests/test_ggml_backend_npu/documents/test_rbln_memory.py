"""RBLN's operators that move data: load, store, insert, the sliding window, padding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.documented import BF16, F16, F32, FLOATS, Array
from kit.scores import LAYOUTS, any_layout, drawn, f32
from kit.support import examples, seeds

from ggml_backend_npu.documents.rbln import (
    dynamic_load,
    dynamic_store,
    insert,
    nn_pad,
    to_dynamic_index,
    window_insert,
    window_slice,
)


def test_to_dynamic_index() -> None:
    for buffer in (np.array([7], np.int32), np.array([[7]], np.int16), np.int32(7)):
        index = to_dynamic_index(buffer)
        assert (type(index), index) == (int, 7)
    assert to_dynamic_index(np.array([64], np.int32), 64) == 64  # of a full partition
    assert to_dynamic_index(np.array([0], np.int32), max=0) == 0


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_dynamic_load_fills_up_with_zeros(axis: int, dtype: Any) -> None:
    data = np.arange(1, 61).reshape(3, 4, 5).astype(dtype).swapaxes(0, 2)
    for length in range(8):
        loaded = dynamic_load(data, axis, length)
        moved, source = np.moveaxis(loaded, axis, 0), np.moveaxis(data, axis, 0)
        assert loaded.dtype == dtype
        np.testing.assert_array_equal(moved[:length], source[:length])
        assert not moved[length:].any()
        assert not np.shares_memory(loaded, data)


def test_dynamic_load_without_an_index_loads_all() -> None:
    data = f32([1, 2], [3, 4])
    for axis in (-1, 0, 99):
        np.testing.assert_array_equal(dynamic_load(data, axis), data)
    assert not np.shares_memory(dynamic_load(data), data)
    np.testing.assert_array_equal(dynamic_load(data, index=1), [[1, 0], [3, 0]])  # -1, the default, is the last axis


def test_zeros_keep_what_was_never_stored_out_of_the_output() -> None:
    values = np.full((4, 2), np.nan, np.float32)
    values[:2] = 1
    probabilities = f32([0.25, 0.75, 0, 0])
    assert np.isnan(probabilities @ values).all()
    np.testing.assert_array_equal(probabilities @ dynamic_load(values, 0, 2), [[1, 1]])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_dynamic_store_leaves_the_rest(axis: int) -> None:
    value = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    for length in range(7):
        root = np.zeros((6, 9), np.float32)
        ptr = root[1:4, 1:9:2]
        dynamic_store(ptr, value, axis, length)
        moved, source = np.moveaxis(ptr, axis, 0), np.moveaxis(value, axis, 0)
        np.testing.assert_array_equal(moved[:length], source[:length])
        assert not moved[length:].any()
        assert np.count_nonzero(root) == np.count_nonzero(ptr)


def test_dynamic_store_ignores_what_is_too_much_of_value() -> None:
    ptr = np.zeros((2, 3), np.float16)
    dynamic_store(ptr, f32([1, 2, 3, 4], [5, 6, 7, 8]), 1, 9)
    np.testing.assert_array_equal(ptr, [[1, 2, 3], [5, 6, 7]])
    dynamic_store(ptr, f32([0, 0, 0], [1, 1, 1]))
    np.testing.assert_array_equal(ptr, [[0, 0, 0], [1, 1, 1]])


@pytest.mark.parametrize(
    ("data", "updates", "index", "expected"),
    [
        ([0, 1, 2, 3, 4, 5], [9, 8], 2, [0, 1, 9, 8, 4, 5]),
        ([0, 1, 2, 3], [9, 8], 4, [0, 1, 2, 3]),
        ([0, 1, 2, 3], [9, 8], 3, [0, 1, 2, 9]),
        ([0, 1, 2, 3], [], 1, [0, 1, 2, 3]),
        ([0, 1], [8, 9], 0, [8, 9]),
    ],
)
def test_insert(data: list[int], updates: list[int], index: int, expected: list[int]) -> None:
    array = f32(*data)
    np.testing.assert_array_equal(insert(array, f32(*updates), 0, index, strict=False), expected)
    np.testing.assert_array_equal(array, f32(*data))
    if index < len(data) and index + len(updates) <= len(data):
        np.testing.assert_array_equal(insert(array, f32(*updates), 0, index), expected)
    else:
        with pytest.raises(ValueError, match=f"index {index}"):
            insert(array, f32(*updates), 0, index)


@pytest.mark.parametrize(
    ("data", "index", "expected"),
    [
        ([1, 2, 3, 0], 3, [1, 2, 3, 7, 8, 0]),
        ([1, 2, 3, 4], 4, [1, 2, 3, 4, 7, 8]),
        ([1, 2, 3, 4], 9, [1, 2, 3, 4, 7, 8]),
        ([1, 2, 3, 4], 0, [7, 8, 0, 0, 0, 0]),
    ],
)
def test_window_insert(data: list[int], index: int, expected: list[int]) -> None:
    np.testing.assert_array_equal(window_insert(f32(*data), f32(7, 8), 0, index), expected)


@pytest.mark.parametrize(
    ("index", "expected"), [(5, [2, 3, 7, 8]), (2, [1, 2, 0, 0]), (99, [3, 7, 8, 0]), (0, [0] * 4), (4, [1, 2, 3, 7])]
)
def test_window_slice(index: int, expected: list[int]) -> None:
    data = f32(1, 2, 3, 7, 8, 0)
    np.testing.assert_array_equal(window_slice(data, index, 0, 4, padded=True), expected)
    np.testing.assert_array_equal(window_slice(data, index, 0, 4), expected[:index])


@given(seed=seeds, layout=any_layout, axis=st.integers(-5, 4), dtype=st.sampled_from([*FLOATS, np.dtype(np.int8)]))
@examples(60)
def test_what_moves_along_an_axis(seed: int, layout: str, axis: int, dtype: Any) -> None:
    """By list operations on the elements of the axis."""
    anywhere, axis = axis, axis % 5
    rng = np.random.default_rng(seed)
    shape = [*rng.integers(1, 4, 5)]
    shape[axis] = size = int(rng.integers(1, 6))
    n_new, index, window = (int(rng.integers(least, size + 1)) for least in (0, 0, 1))
    data = LAYOUTS[layout](rng.integers(1, 99, shape).astype(dtype))
    updates = rng.integers(1, 99, [n_new if i == axis else n for i, n in enumerate(shape)]).astype(dtype)

    def joined(rows: list[Array]) -> Array:
        return np.stack(rows, axis) if rows else np.zeros_like(np.take(updates, [], axis))

    old, new = [*np.moveaxis(data, axis, 0)], [*np.moveaxis(updates, axis, 0)]
    zero = np.zeros_like(old[0])
    before, end = old[:index], min(index, size)
    for actual, rows in (
        (insert(data, updates, axis, index, strict=False), [*before, *new, *old[index + n_new :]][:size]),
        (window_insert(data, updates, axis, index), [*before, *new, *[zero] * (size - index)]),
        (
            window_slice(data, index, axis, window, padded=True),
            [*old[max(0, end - window) : end], *[zero] * max(0, window - end)],
        ),
        (window_slice(data, index, axis, window), old[max(0, end - window) : end]),
        (dynamic_load(data, anywhere, index), [*before, *[zero] * (size - index)]),
    ):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, joined(rows))


def test_an_index_for_each_entry_of_axis_0() -> None:
    rng = np.random.default_rng(0)
    data, updates, at = drawn((3, 2, 6, 4), rng), drawn((3, 2, 2, 4), rng), np.array([0, 5, 6], np.int32)
    ptr, expected = drawn((3, 2, 6, 4), rng), []
    for n, index in enumerate(at):
        each = ptr[n].copy()
        dynamic_store(each, data[n], 1, index)
        expected.append(each)
    dynamic_store(ptr, data, 2, at)
    np.testing.assert_array_equal(ptr, expected)
    operators: list[tuple[Callable[..., Any], tuple[Array, ...]]] = [
        (partial(insert, strict=False), (data, updates)),
        (window_insert, (data, updates)),
        (dynamic_load, (data,)),
    ]
    for operator, arguments in operators:
        actual = operator(*arguments, 2, at)
        for n, index in enumerate(at):
            np.testing.assert_array_equal(actual[n], operator(*(x[n] for x in arguments), 1, index))
    for n, sliced in enumerate(window_slice(data, at, 2, 3, padded=True)):
        np.testing.assert_array_equal(sliced, window_slice(data[n], at[n], 1, 3, padded=True))
    for n, sliced in enumerate(window_slice(data, at + 3, 2, 3)):
        np.testing.assert_array_equal(sliced, window_slice(data[n], at[n] + 3, 1, 3))


@pytest.mark.parametrize(
    ("mode", "pad_size", "expected"),
    [
        ("reflect", (2, 1), [3, 2, 1, 2, 3, 4, 3]),
        ("edge", (2, 1), [1, 1, 1, 2, 3, 4, 4]),
        ("replicate", (2, 1), [1, 1, 1, 2, 3, 4, 4]),
        ("constant", (0, 3), [1, 2, 3, 4, 0, 0, 0]),
        ("constant", 1, [0, 1, 2, 3, 4, 0]),
        ("reflect", np.int64(3), [4, 3, 2, 1, 2, 3, 4, 3, 2, 1]),
        ("edge", [0, 0], [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, np.dtype(np.int8)])
def test_nn_pad(mode: str, pad_size: Any, expected: list[int], dtype: Any) -> None:
    data = np.array([1, 2, 3, 4], dtype)
    padded = nn_pad(data, 0, 0, pad_size, mode)
    assert padded.dtype == dtype
    np.testing.assert_array_equal(padded, np.array(expected, dtype))
    assert not np.shares_memory(padded, data)
    deep = nn_pad(data.reshape(1, 4, 1), 0, -2, pad_size, mode)
    np.testing.assert_array_equal(deep.reshape(-1), np.array(expected, dtype))


def test_nn_pad_takes_any_number_that_the_type_has() -> None:
    np.testing.assert_array_equal(nn_pad(f32(1), 0.1, 0, (0, 1)), f32(1, 0.1))
    np.testing.assert_array_equal(nn_pad(f32(1), -np.inf, 0, (0, 1)), f32(1, -np.inf))
    assert np.isnan(nn_pad(np.array([1], np.float16), np.float32("nan"), 0, (1, 0))[0])
    np.testing.assert_array_equal(nn_pad(np.array([1], np.uint8), 255.0, 0, 1), np.array([255, 1, 255], np.uint8))
    np.testing.assert_array_equal(nn_pad(np.zeros((0,), np.float32), 3, 0, (1, 1)), [3, 3])
    np.testing.assert_array_equal(nn_pad(f32(1, 2), None, 0, 1, "edge"), [1, 1, 2, 2])
