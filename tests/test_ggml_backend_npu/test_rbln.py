"""The operators of RBLN's document: its numbers, definitions in float64, every refusal, whole attentions by ggml."""

from __future__ import annotations

import inspect
import runpy
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import ENGINES, examples, seeds

from ggml_backend_npu import default_backend
from ggml_backend_npu.abi.build import Builder
from ggml_backend_npu.abi.plugin import Plugin
from ggml_backend_npu.documents import rbln
from ggml_backend_npu.documents.rbln import (
    dynamic_flash_attn_tile,
    dynamic_load,
    dynamic_masked_softmax,
    dynamic_store,
    flash_attn_recompute,
    flash_attn_tile,
    insert,
    masked_softmax,
    nn_pad,
    softmax,
    to_dynamic_index,
    window_insert,
    window_slice,
    window_softmax,
)

Array = NDArray[Any]
F32, F16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
FLOATS = [F32, F16, BF16]
LOWEST = np.finfo(np.float32).min
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The softmax family by either engine."""
    monkeypatch.setenv("GGML_NPU_ENGINE", request.param)
    return request.param


either_engine = pytest.mark.usefixtures("engine")


def f32(*values: Any) -> Array:
    return np.array(values, np.float32)


def row(*values: float) -> Array:
    """One row of scores of 4 axes."""
    return f32(*values).reshape(1, 1, 1, -1)


def one(value: float) -> Array:
    """A sink, or a row's statistic, of 4 axes."""
    return row(value)


def close(actual: Array, expected: Any, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(actual.astype(np.float64), np.asarray(expected, np.float64), tolerance, tolerance)


# definitions, float64, row by row


def defined(scores: Array, kept: Array, sink: Array | None = None) -> Array:
    """Softmax of what is kept of each row."""
    output = np.zeros(scores.shape)
    for at in np.ndindex(scores.shape[:-1]):
        columns = np.flatnonzero(kept[at])
        logits = scores[at].astype(np.float64)[columns]
        extra = [] if sink is None else [float(np.broadcast_to(sink, (*scores.shape[:-1], 1))[at][0])]
        everything = np.array([*logits, *extra])
        with np.errstate(invalid="ignore"):
            if everything.size and not (extra and np.isneginf(everything).all()):
                e = np.exp(everything - everything.max())
                output[at][columns] = (e / e.sum())[: len(logits)]
    return output


def defined_tile(scores: Array, kept: Array, before: Array | None, sink: Array | None) -> tuple[Array, Array, Array]:
    """Maximum, e and sum of each row's part."""
    maxima, e, sums = np.zeros((*scores.shape[:-1], 1)), np.zeros(scores.shape), np.zeros((*scores.shape[:-1], 1))
    for at in np.ndindex(scores.shape[:-1]):
        columns = np.flatnonzero(kept[at])
        logits = scores[at].astype(np.float64)[columns]
        extra = [] if sink is None else [float(np.broadcast_to(sink, maxima.shape)[at][0])]
        known = [] if before is None else [float(before[at][0])]
        maxima[at] = max([LOWEST, *logits, *extra, *known])
        e[at][columns] = np.exp(logits - maxima[at])
        sums[at] = e[at].sum() + sum(np.exp(extra - maxima[at]))
    return maxima, e, sums


def causal(shape: tuple[int, ...], index: Array | int) -> Array:
    """Which columns each row has: those up to its own token."""
    kept = np.zeros(shape, np.bool_)
    for n, i, c in product(range(shape[0]), range(shape[-2]), range(shape[-1])):
        kept[n, ..., i, c] = c <= np.broadcast_to(index, shape[0])[n] + i
    return kept


def windowed(shape: tuple[int, ...], index: Array | int, window: int) -> Array:
    """Rows of the band matrix of a whole sequence, as vllm-rbln's reference has it."""
    n_rows, size = shape[-2], window + shape[-2]
    band = np.tri(size) - np.tri(size, k=-window)
    kept = np.zeros(shape, np.bool_)
    for n in range(shape[0]):
        first = int(np.broadcast_to(index, shape[0])[n])
        kept[n, ..., :size] = band[first : first + n_rows]
    return kept


# arguments to try

LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "plain": lambda x: x,
    "transposed": lambda x: x.swapaxes(-1, -2).copy().swapaxes(-1, -2),
    "heads apart": lambda x: x.swapaxes(1, 2).copy().swapaxes(1, 2),
    "reversed": lambda x: x[::-1, ..., ::-1].copy()[::-1, ..., ::-1],
    "a part": lambda x: np.pad(x, 1, mode="edge")[(slice(1, -1),) * x.ndim],
    "every second": lambda x: x.repeat(2, -1).repeat(2, 1)[:, ::2, ..., ::2],
    "read-only": lambda x: np.broadcast_to(x, x.shape),
}


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    heads = draw(st.sampled_from([(1,), (3,), (1, 1), (2, 3), (3, 1)]))
    return (draw(st.integers(1, 3)), *heads, draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 5, 8, 13, 300])))


def drawn(shape: tuple[int, ...], rng: np.random.Generator, dtype: Any = F32, spread: float = 3.0) -> Array:
    return (rng.standard_normal(shape) * spread).astype(dtype)


def marks(shape: tuple[int, ...], rng: np.random.Generator, dtype: Any) -> Array:
    """A mask with zeros of both signs, and what else is not zero; some rows without any."""
    if dtype == np.bool_:
        mask = rng.random(shape) < 0.6
    else:
        mask = rng.choice([0.0, -0.0, 1.0, -2.5, np.inf, np.nan, 6e-8], shape).astype(dtype)
    return np.where(rng.random((*shape[:-1], 1)) < 0.15, np.zeros((), dtype), mask)


def spoiled(x: Array, kept: Array, rng: np.random.Generator) -> Array:
    """x with NaN and infinity where it is masked."""
    return np.where(kept, x, rng.choice([0, np.nan, np.inf, -np.inf], x.shape).astype(x.dtype))


def sinks(shape: tuple[int, ...], rng: np.random.Generator, kind: str) -> Array | None:
    of = (1, *shape[1:-2], 1, 1)
    if kind == "none":
        return None
    values = drawn(of, rng, F16 if kind == "f16" else F32)
    return np.where(rng.random(of) < 0.3, -np.inf, values).astype(values.dtype)


def indices(shape: tuple[int, ...], most: int, rng: np.random.Generator, kind: str) -> Any:
    """An index as a number, in an array, or one for each entry of axis 0."""
    if kind == "each":
        return rng.integers(0, most + 1, shape[0]).astype(np.int32)
    value = int(rng.integers(0, most + 1))
    return value if kind == "int" else np.full((1,), value, np.int32)


def assert_rounded(actual: Array, expected: Array, dtype: Any) -> None:
    """As exact as float32 arithmetic of scores of some tens is, rounded once more."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    rounding = {F32: 4e-6, F16: 6e-4, BF16: 5e-3}[dtype]
    np.testing.assert_allclose(actual.astype(np.float64), expected, rounding, 6e-8 if dtype == F16 else 1e-9)


any_layout = st.sampled_from([*LAYOUTS])
any_float = st.sampled_from(FLOATS)
any_mask = st.sampled_from([np.dtype(np.bool_), F32, F16, BF16])
any_sink = st.sampled_from(["none", "f32", "f16"])
any_index = st.sampled_from(["int", "array", "each"])


# what is public


def test_the_operators_have_the_names_arguments_and_defaults_of_the_document() -> None:
    documented = {
        "to_dynamic_index": "(data, max=-1)",
        "dynamic_load": "(ptr, axis=-1, index=None)",
        "dynamic_store": "(ptr, value, axis=-1, index=None)",
        "insert": "(data, updates, axis, index)",
        "softmax": "(input, axis=-1)",
        "masked_softmax": "(input, mask, sink=None, axis=-1)",
        "dynamic_masked_softmax": "(input, index, mask=None, sink=None, axis=-1)",
        "flash_attn_tile": "(input, mask, row_max_i=None)",
        "dynamic_flash_attn_tile": "(input, index, row_max_i=None, mask=None, sink=None)",
        "flash_attn_recompute": "(row_max_prev, row_max_global, row_sum_prev, row_sum_cur, "
        "attn_out_prev, attn_out_cur)",
        "window_insert": "(data, updates, axis, index)",
        "window_slice": "(data, index, axis, window_size)",
        "window_softmax": "(input, index, sink=None, window_size=None, axis=-1, pad_c=-1)",
        "nn_pad": "(input, value, axis, pad_size, mode='constant')",
    }
    assert sorted(documented) == rbln.__all__
    for name, expected in documented.items():
        function = getattr(rbln, name)
        parameters = inspect.signature(function).parameters.values()
        positional = [p.replace(annotation=p.empty) for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert str(inspect.Signature(positional)) == expected, name


@pytest.mark.slow
def test_importing_compiles_nothing() -> None:
    script = (
        "import ggml_backend_npu; from ggml_backend_npu.ops.softmax import softmax; assert not softmax.is_compiled;"
        "import numpy; from ggml_backend_npu.documents import rbln; rbln.softmax(numpy.ones(3, numpy.float32));"
        "assert softmax.is_compiled"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# memory


def test_to_dynamic_index() -> None:
    for buffer in (np.int32([7]), np.int16([[7]]), np.int32(7)):
        index = to_dynamic_index(buffer)
        assert (type(index), index) == (int, 7)
    assert to_dynamic_index(np.int32([64]), 64) == 64  # of a full partition
    assert to_dynamic_index(np.int32([0]), max=0) == 0


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
        assert dynamic_store(ptr, value, axis, length) is None
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
    data, updates, at = drawn((3, 2, 6, 4), rng), drawn((3, 2, 2, 4), rng), np.int32([0, 5, 6])
    ptr, expected = drawn((3, 2, 6, 4), rng), []
    for n, index in enumerate(at):
        each = ptr[n].copy()
        dynamic_store(each, data[n], 1, index)
        expected.append(each)
    dynamic_store(ptr, data, 2, at)
    np.testing.assert_array_equal(ptr, expected)
    for operator, arguments, rest in (
        (partial(insert, strict=False), (data, updates), (at,)),
        (window_insert, (data, updates), (at,)),
        (dynamic_load, (data,), (at,)),
    ):
        actual = operator(*arguments, 2, *rest)
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
    assert np.isnan(nn_pad(np.float16([1]), np.float32("nan"), 0, (1, 0))[0])
    np.testing.assert_array_equal(nn_pad(np.uint8([1]), 255.0, 0, 1), np.uint8([255, 1, 255]))
    np.testing.assert_array_equal(nn_pad(np.zeros((0,), np.float32), 3, 0, (1, 1)), [3, 3])
    np.testing.assert_array_equal(nn_pad(f32(1, 2), None, 0, 1, "edge"), [1, 1, 2, 2])


# softmax: numbers


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
        dynamic_masked_softmax(x, np.int32([3]), sink=np.zeros((1, 2, 1, 1), np.float32)),
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
    close(dynamic_masked_softmax(x, to_dynamic_index(np.int32([2])), np.ones((1, 5), np.float16)), expected)
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
    outputs += flash_attn_recompute(*[np.zeros((*shape[:-1], 1), np.float32)] * 4, x, x)
    assert not any(output.size for output in outputs)


# softmax: properties


@either_engine
@given(seed=seeds, dtype=any_float, n_axes=st.integers(1, 6), axis=st.integers(-6, 5), layout=st.booleans())
def test_softmax_along_any_axis(seed: int, dtype: Any, n_axes: int, axis: int, layout: bool) -> None:
    rng = np.random.default_rng(seed)
    axis = axis % n_axes - n_axes * (axis < 0)
    x = drawn(tuple(rng.integers(1, 4, n_axes)), rng, dtype)
    x = x.T if layout else x
    expected = np.moveaxis(defined(np.moveaxis(x, axis, -1), np.ones(np.moveaxis(x, axis, -1).shape)), -1, axis)
    assert_rounded(softmax(x, axis), expected, dtype)


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
    assert_rounded(masked_softmax(laid_out, mask, logits), defined(x, kept, logits), dtype)

    before = None if sink == "none" else drawn((*shape[:-1], 1), rng)
    maxima, e, sums = flash_attn_tile(laid_out, mask, before)
    expected = defined_tile(x, kept, before, None)
    assert_rounded(maxima, expected[0], F32)
    assert_rounded(e, expected[1], dtype)
    assert_rounded(sums, expected[2], F32)


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
    assert_rounded(dynamic_masked_softmax(laid_out, index, mask, logits), defined(x, kept, logits), dtype)

    before = drawn((*shape[:-1], 1), rng) if rng.random() < 0.5 else None
    maxima, e, sums = dynamic_flash_attn_tile(laid_out, index, before, mask, logits)
    expected = defined_tile(x, kept, before, logits)
    assert_rounded(maxima, expected[0], F32)
    assert_rounded(e, expected[1], dtype)
    assert_rounded(sums, expected[2], F32)


@either_engine
@given(seed=seeds, shape=shapes(), dtype=any_float, layout=any_layout, sink=any_sink, at=any_index)
@examples(60)
def test_window_softmax_is_the_band_of_the_whole_sequence(
    seed: int, shape: tuple[int, ...], dtype: Any, layout: str, sink: str, at: str
) -> None:
    rng = np.random.default_rng(seed)
    window = shape[-1]
    shape = (*shape[:-1], window + shape[-2] + int(rng.integers(0, 9)))
    index = indices(shape, window, rng, at)
    kept = windowed(shape, index, window)
    x = spoiled(drawn(shape, rng, dtype), kept, rng)
    logits = sinks(shape, rng, sink)
    actual = window_softmax(LAYOUTS[layout](x), index, sink=logits, window_size=window, strict=False)
    assert_rounded(actual, defined(x, kept, logits), dtype)


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
    close(out, expected[1], {F32: 4e-6, F16: 6e-4, BF16: 5e-3}[dtype])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_scores_in_several_threads(layout: str, team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = LAYOUTS[layout](drawn((2, 3, 2, 65, 513), rng))
    sink, index = drawn((1, 3, 2, 1, 1), rng), np.int32([448, 17])
    results = []
    for n_threads in (1, 3):
        monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
        results.append([window_softmax(x, index, sink, 448), *dynamic_flash_attn_tile(x, index, None, None, sink)])
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(alone, together)
    monkeypatch.setenv("GGML_NPU_ENGINE", "reference")
    close(results[0][0], window_softmax(x, index, sink, 448))


# memory that is taken


def taken(call: Callable[[], Any]) -> tuple[int, int]:
    """(bytes of what a call gives, bytes that it takes beside them)"""
    call()  # what is compiled or imported at a first call
    tracemalloc.start()
    try:
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    outputs = result if isinstance(result, tuple) else (result,)
    n_bytes = sum(output.nbytes for output in outputs)
    return n_bytes, peak - n_bytes


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_mask_and_no_score_is_copied(layout: str, dtype: Any) -> None:
    """A view of which an axis runs backwards is copied once; nothing else is."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 4, 32, 160)
    x, sink = LAYOUTS[layout](drawn(shape, rng, dtype)), drawn((1, 3, 4, 1, 1), rng)
    mask = LAYOUTS[layout](marks((2, 1, 1, 32, 160), rng, F32))
    size = prod(shape) * dtype.itemsize
    before = drawn((*shape[:-1], 1), rng)
    out = LAYOUTS[layout](drawn(shape, rng, dtype))
    index = np.int32([7, 128])
    calls: dict[str, Callable[[], Any]] = {
        "softmax": lambda: softmax(x),
        "softmax along axis 1": lambda: softmax(x, 1),
        "masked_softmax": lambda: masked_softmax(x, mask, sink),
        "dynamic_masked_softmax": lambda: dynamic_masked_softmax(x, index, np.ones((1, 160), np.bool_), sink),
        "window_softmax": lambda: window_softmax(x, index, sink, 128),
        "flash_attn_tile": lambda: flash_attn_tile(x, mask, before),
        "dynamic_flash_attn_tile": lambda: dynamic_flash_attn_tile(x, index, before, None, sink),
        "flash_attn_recompute": lambda: flash_attn_recompute(before, before, before, before, out, out),
    }
    for name, call in calls.items():
        n_bytes, beside = taken(call)
        assert n_bytes >= size, name
        recompute = name == "flash_attn_recompute"
        few = 160_000 if recompute else 16_384  # factors of rows, and NumPy's buffers
        assert beside <= few + (size if layout == "reversed" and not recompute else 0), name


def test_what_moves_takes_no_more_than_its_output() -> None:
    data = np.ones((2, 4, 256, 96), np.float32).swapaxes(1, 2).swapaxes(1, 2)
    new = data[:, :, :64]
    for call in (
        lambda: insert(data, new, 2, 40),
        lambda: window_insert(data, new, 2, 40),
        lambda: window_slice(data, 200, 2, 192),
        lambda: dynamic_load(data, 2, 100),
        lambda: nn_pad(data, 0.0, 2, (0, 63)),
        lambda: nn_pad(data, 0.0, 2, (3, 63), "reflect"),
    ):
        n_bytes, beside = taken(call)
        assert beside <= n_bytes / 2


# refusals

X4, X5 = np.zeros((2, 6, 3, 8), np.float32), np.zeros((2, 2, 3, 3, 8), np.float32)
M4, M5 = np.ones((2, 1, 3, 8), np.float32), np.ones((2, 1, 1, 3, 8), np.float32)
S4, S5 = np.zeros((1, 6, 1, 1), np.float32), np.zeros((1, 2, 3, 1, 1), np.float32)
R4 = np.zeros((2, 6, 3, 1), np.float32)
D, U = np.zeros((4, 5), np.float32), np.zeros((4, 2), np.float32)
OUT = np.zeros((2, 6, 3, 4), np.float32)

loose_window = partial(window_softmax, window_size=5, strict=False)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "index in int64": (lambda: to_dynamic_index(np.int64([1])), "data of int64"),
    "index in float32": (lambda: to_dynamic_index(f32(1)), "data of float32"),
    "index of two": (lambda: to_dynamic_index(np.int32([1, 2])), r"data of shape \(2,\)"),
    "index of none": (lambda: to_dynamic_index(np.int32([])), r"data of shape \(0,\)"),
    "index below 0": (lambda: to_dynamic_index(np.int32([-1])), "data holds -1"),
    "index above max": (lambda: to_dynamic_index(np.int32([65]), 64), "data holds 65: max is 64"),
    "max that is no number": (lambda: to_dynamic_index(np.int32([65]), 1.5), "max 1.5"),
    "load, index below 0": (lambda: dynamic_load(D, 0, -1), "index -1"),
    "load, index a float": (lambda: dynamic_load(D, 0, 1.0), "index 1.0"),
    "load, index True": (lambda: dynamic_load(D, 0, True), "index True"),
    "load, index of many floats": (lambda: dynamic_load(D, 0, np.ones((9, 99))), r"index array.*\.\.\."),
    "load, axis": (lambda: dynamic_load(D, 2, 1), "axis 2: must be from -2 to 1"),
    "load, axis below": (lambda: dynamic_load(D, -3, 1), "axis -3"),
    "load, axis a float": (lambda: dynamic_load(D, 1.0, 1), "axis 1.0"),
    "load, index of another length": (lambda: dynamic_load(D, 1, [1, 2]), r"index of shape \(2,\)"),
    "load, index for each along axis 0": (lambda: dynamic_load(D, 0, [1, 2, 3, 4]), "along axis 0"),
    "insert, rank": (lambda: insert(D, U[0], 1, 0), r"updates of shape \(2,\)"),
    "insert, type": (lambda: insert(D, U.astype(np.float16), 1, 0), "updates of float16"),
    "insert, other axis": (lambda: insert(D, U[:3], 1, 0), r"updates of shape \(3, 2\)"),
    "insert, axis": (lambda: insert(D, U, 2, 0), "axis 2: must be from 0 to 1"),
    "insert, axis from the end": (lambda: insert(D, U, -1, 0), "axis -1: must be from 0 to 1"),
    "insert, index below 0": (lambda: insert(D, U, 1, -1), "index -1"),
    "insert, index above": (lambda: insert(D, U, 1, 6), "index 6"),
    "insert, one index above": (lambda: insert(X4, X4[:, :, :1], 2, [0, 4]), "index 4"),
    "insert, longer": (lambda: insert(U, D, 1, 0), r"updates of shape \(4, 5\)"),
    "insert, beyond the end": (lambda: insert(D, U, 1, 4), "index 4: 2 updates from there do not fit into 5"),
    "insert, at the end": (lambda: insert(D, U, 1, 5), "index 5: must be below 5"),
    "insert, above the end": (lambda: insert(D, U, 1, 6, strict=False), "index 6: must be at most 5"),
    "window_insert, rank": (lambda: window_insert(D, U[0], 1, 0), r"updates of shape \(2,\)"),
    "window_insert, type": (lambda: window_insert(D, U.astype(np.int32), 1, 0), "updates of int32"),
    "window_insert, other axis": (lambda: window_insert(D, U[:3], 1, 0), r"updates of shape \(3, 2\)"),
    "window_insert, index": (lambda: window_insert(D, U, 1, -1), "index -1"),
    "window_insert, axis": (lambda: window_insert(D, U, -1, 1), "axis -1"),
    "window_slice, shorter": (lambda: window_slice(D, 2, 1, 6), "window_size 6"),
    "window_slice, no window": (lambda: window_slice(D, 2, 1, 0), "window_size 0"),
    "window_slice, lengths": (lambda: window_slice(X4, [1, 2], 2, 3), r"index \[1, 2\]: slices of \[1, 2\] elements"),
    "window_slice, index": (lambda: window_slice(D, -2, 1, 2), "index -2"),
    "window_slice, axis": (lambda: window_slice(D, 2, 2, 2), "axis 2"),
    "window_slice, axis from the end": (lambda: window_slice(D, 2, -1, 2), "axis -1"),
    "window_slice, arguments of old": (lambda: window_slice(D, 2, 4, np.int32([1])), "axis 4"),
    "pad, below 0": (lambda: nn_pad(D, 0, 1, (0, -1)), "pad_size -1"),
    "pad, three": (lambda: nn_pad(D, 0, 1, (0, 1, 2)), r"pad_size \(0, 1, 2\)"),
    "pad, a float": (lambda: nn_pad(D, 0, 1, 1.5), "pad_size 1.5"),
    "pad, mode": (lambda: nn_pad(D, 0, 1, 1, "wrap"), "mode 'wrap'"),
    "pad, modes": (lambda: nn_pad(D, 0, 1, 1, ["edge"]), r"mode \['edge'\]"),  # type: ignore[arg-type]
    "pad, axis": (lambda: nn_pad(D, 0, 2, 1), "axis 2"),
    "pad, reflect too far": (lambda: nn_pad(D, 0, 1, (5, 0), "reflect"), "pad_size 5"),
    "pad, reflect too far right": (lambda: nn_pad(D, 0, 1, (0, 6), "reflect"), "pad_size 6"),
    "pad, edge of nothing": (lambda: nn_pad(D[:, :0], 0, 1, 0, "edge"), "mode edge"),
    "pad, reflect of nothing": (lambda: nn_pad(D[:, :0], 0, 1, 0, "reflect"), "mode reflect"),
    **{
        f"pad, {dtype.__name__} of {value!r}": (
            lambda value=value, dtype=dtype: nn_pad(np.zeros(3, dtype), value, 0, 1),
            "value .*: must be a number",
        )
        for dtype, value in [
            *((np.float32, value) for value in (1e39, "1", None, 1j, [1, 2])),
            *((np.float16, value) for value in (65520.0, 10**400)),
            *((np.int8, value) for value in (128, 0.5, np.nan, np.inf)),
            *((np.uint8, value) for value in (-1, -1.0)),
            (np.bool_, 2),
        ]
    },
    "softmax, axis": (lambda: softmax(D, 2), "axis 2"),
    "softmax, axis below": (lambda: softmax(D, -3), "axis -3"),
    "softmax, no axis": (lambda: softmax(np.float32(1)), "axis -1"),
    "softmax, of nothing": (lambda: softmax(D[:, :0]), r"input of shape \(4, 0\)"),
    "softmax, float64": (lambda: softmax([1.0, 2.0]), "input of float64"),
    "softmax, other byte order": (lambda: softmax(D.astype(">f4")), "input of >f4"),
    "masked, axes": (lambda: masked_softmax(X4[0], M4), r"input of shape \(6, 3, 8\)"),
    "masked, int": (lambda: masked_softmax(X4.astype(np.int32), M4), "input of int32"),
    "masked, of nothing": (lambda: masked_softmax(X4[..., :0], M4[..., :0]), r"input of shape \(2, 6, 3, 0\)"),
    "masked, rank of mask": (lambda: masked_softmax(X5, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "masked, rank of mask 5": (lambda: masked_softmax(X4, M5), r"mask of shape \(2, 1, 1, 3, 8\)"),
    "masked, heads of mask": (lambda: masked_softmax(X4, X4), r"mask of shape \(2, 6, 3, 8\)"),
    "masked, group of mask": (lambda: masked_softmax(X5, X5[:, :1]), r"mask of shape \(2, 1, 3, 3, 8\)"),
    "masked, Seq of mask": (lambda: masked_softmax(X4, M4[:, :, :1]), r"mask of shape \(2, 1, 1, 8\)"),
    "masked, Channel of mask": (lambda: masked_softmax(X4, M4[..., :7]), r"mask of shape \(2, 1, 3, 7\)"),
    "masked, Nmb of mask": (lambda: masked_softmax(X4, M4[[0, 1, 1]]), r"mask of shape \(3, 1, 3, 8\)"),
    "masked, type of mask": (lambda: masked_softmax(X4, M4.astype(object)), "mask array"),
    "masked, rank of sink": (lambda: masked_softmax(X5, M5, S4), r"sink of shape \(1, 6, 1, 1\)"),
    "masked, heads of sink": (lambda: masked_softmax(X4, M4, S4[:, :1]), r"sink of shape \(1, 1, 1, 1\)"),
    "masked, group of sink": (lambda: masked_softmax(X5, M5, S5[:, :, :1]), r"sink of shape \(1, 2, 1, 1, 1\)"),
    "masked, Nmb of sink": (lambda: masked_softmax(X4, M4, S4[[0, 0]]), r"sink of shape \(2, 6, 1, 1\)"),
    "masked, type of sink": (lambda: masked_softmax(X4, M4, S4.astype(np.float64)), "sink of float64"),
    "masked, axis that is not": (lambda: masked_softmax(X4, M4, axis=4), "axis 4"),
    "dynamic, index below 0": (lambda: dynamic_masked_softmax(X4, -1), "index -1"),
    "dynamic, index above": (lambda: dynamic_masked_softmax(X4, 9), "index 9"),
    "dynamic, one index above": (lambda: dynamic_masked_softmax(X4, [8, 9]), "index 9"),
    "dynamic, index of three": (lambda: dynamic_masked_softmax(X4, [1, 2, 3]), r"index of shape \(3,\)"),
    "dynamic, index float": (lambda: dynamic_masked_softmax(X4, 2.0), "index 2.0"),
    "dynamic, mask of 4 axes": (lambda: dynamic_masked_softmax(X4, 1, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "dynamic, Channel of mask": (lambda: dynamic_masked_softmax(X4, 1, M4[:, 0, 0, 1:]), r"mask of shape \(2, 7\)"),
    "dynamic, sink": (lambda: dynamic_masked_softmax(X5, 1, None, S4), r"sink of shape \(1, 6, 1, 1\)"),
    "dynamic, axis": (lambda: dynamic_masked_softmax(X5, 1, axis=-6), "axis -6"),
    "window, none": (lambda: window_softmax(X4, 1), "window_size None"),
    "window, 0": (lambda: window_softmax(X4, 1, window_size=0), "window_size 0"),
    "window, a float": (lambda: window_softmax(X4, 1, window_size=4.0), "window_size 4.0"),
    "window, arguments of old": (lambda: window_softmax(X4, np.int32([1]), 4), "sink of int64"),
    "window, few": (lambda: window_softmax(X4, 1, window_size=4), "window_size 4"),
    "window, 64s": (lambda: window_softmax(X4, 1, window_size=129), "window_size 129"),
    "window, 128": (lambda: window_softmax(X4, 1, window_size=64), "window_size 64"),
    "window, index above": (lambda: loose_window(X4, 6), "index 6"),
    "window, index below 0": (lambda: loose_window(X4, -1), "index -1"),
    "window, too few columns": (lambda: loose_window(X4, 1, window_size=6), r"input of shape \(2, 6, 3, 8\)"),
    "window, pad_c": (lambda: loose_window(X4, 1, pad_c=0.5), "pad_c 0.5"),
    "window, pad_c none": (lambda: loose_window(X4, 1, pad_c=None), "pad_c None"),
    "window, axis": (lambda: loose_window(X4, 1, axis=4), "axis 4"),
    "window, sink": (lambda: loose_window(X4, 1, S5), r"sink of shape \(1, 2, 3, 1, 1\)"),
    "tile, mask": (lambda: flash_attn_tile(X4, M4[..., :7]), r"mask of shape \(2, 1, 3, 7\)"),
    "tile, row_max_i": (lambda: flash_attn_tile(X4, M4, R4[..., 0]), r"row_max_i of shape \(2, 6, 3\)"),
    "tile, row_max_i of 5 axes": (lambda: flash_attn_tile(X5, M5, R4), r"row_max_i of shape \(2, 6, 3, 1\)"),
    "tile, type of row_max_i": (lambda: flash_attn_tile(X4, M4, R4.astype(np.int32)), "row_max_i of int32"),
    "dynamic tile, index": (lambda: dynamic_flash_attn_tile(X4, 9), "index 9"),
    "dynamic tile, row_max_i": (lambda: dynamic_flash_attn_tile(X4, 1, X4), r"row_max_i of shape \(2, 6, 3, 8\)"),
    "dynamic tile, mask": (lambda: dynamic_flash_attn_tile(X4, 1, None, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "dynamic tile, sink": (lambda: dynamic_flash_attn_tile(X4, 1, None, None, S5), r"sink of shape \(1, 2, 3, 1, 1\)"),
    "recompute, rows": (lambda: flash_attn_recompute(R4, R4[:1], R4, R4, OUT, OUT), "row_max_global of shape"),
    "recompute, sums": (lambda: flash_attn_recompute(R4, R4, OUT, R4, OUT, OUT), "row_sum_prev of shape"),
    "recompute, sums now": (lambda: flash_attn_recompute(R4, R4, R4, R4[..., 0], OUT, OUT), "row_sum_cur of shape"),
    "recompute, outs": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT, OUT[..., :3]), "attn_out_cur of shape"),
    "recompute, type": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT, OUT.astype(np.float16)), "attn_out_cur of"),
    "recompute, int": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT.astype(int), OUT), "attn_out_prev of int"),
    "recompute, one axis": (lambda: flash_attn_recompute(R4, R4, R4, R4, f32(1), f32(1)), "attn_out_prev of shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "axis", "index", "message"),
    [
        (np.ones((4, 4)), 1, 2, r"value of shape \(4, 4\)"),
        (np.ones((5, 5)), 1, 2, r"value of shape \(5, 5\)"),
        (np.ones((4, 6)), 1, None, r"value of shape \(4, 6\)"),
        (np.ones(5), 1, 2, r"value of shape \(5,\)"),
        (np.ones((4, 5), complex), 1, 2, "value of complex128"),
        (np.ones((4, 5)), 2, 2, "axis 2"),
        (np.ones((4, 5)), 1, -1, "index -1"),
        (np.ones((4, 5)), 1, [1, 2], r"index of shape \(2,\)"),
        (np.ones((4, 5)), 1, [1, 2, 3, -4], "index -4"),
        (np.ones((4, 5)), 0, [1, 2, 3, 4], "along axis 0"),
    ],
)
def test_dynamic_store_refuses_before_it_writes(value: Array, axis: int, index: Any, message: str) -> None:
    ptr = D.copy()
    with pytest.raises(ValueError, match=message):
        dynamic_store(ptr, value, axis, index)
    np.testing.assert_array_equal(ptr, D)


def test_dynamic_store_refuses_what_cannot_be_written_to() -> None:
    for ptr in ([0.0, 0.0], np.broadcast_to(f32(0, 0), (2,))):
        with pytest.raises(ValueError, match="ptr"):
            dynamic_store(ptr, f32(1, 2))  # type: ignore[arg-type]


# whole attentions


def test_local_offsets_are_the_causal_mask_where_later_partitions_are_left_out() -> None:
    """All sizes up to 4: the columns that the tiles of a step have, with and without the partitions behind its end."""
    cases = 0
    for size, n_new in product(range(1, 5), range(1, 5)):
        for cached in range(3 * size + 1):
            if cached % size + n_new > size:
                continue
            last = (cached + n_new - 1) // size + 1
            expected = causal((1, 1, n_new, (last + 1) * size), cached)
            tiles = []
            for partition in range(last + 1):
                index = min(max(cached - partition * size, 0), size)
                _, e, _ = dynamic_flash_attn_tile(np.zeros((1, 1, n_new, size), np.float32), index)
                left_out = partition * size >= cached + n_new
                assert left_out == (partition == last)
                tiles.append(0 * e if left_out else e)
                assert not left_out or e.any()  # it would show what was never stored
            np.testing.assert_array_equal(np.concatenate(tiles, -1) > 0, expected)
            cases += 1
    assert cases == 70


@either_engine
def test_a_sink_counts_in_each_tile_that_is_given_it() -> None:
    _, _, without = dynamic_flash_attn_tile(row(1, 2), 2)
    maximum, e, total = dynamic_flash_attn_tile(row(1, 2), 2, sink=one(3))
    np.testing.assert_array_equal(maximum, one(3))
    close(total, np.exp(f32(1 - 3, 2 - 3)).sum() + 1)
    close(e, np.exp(row(1 - 3, 2 - 3)))
    assert total != without
    again, _, second = dynamic_flash_attn_tile(row(1, 2), 2, maximum, sink=one(3))
    close(flash_attn_recompute(maximum, again, total, second, e, e)[0], 2 * total)


class Scenario:
    """A sequence and its attentions: by the definition, and by ggml's ops on its CPU."""

    def __init__(self, backend: Plugin, n_tokens: int, head: int, group: int, d: int, window: int | None) -> None:
        rng = np.random.default_rng(n_tokens)
        self.ggml, self.window = backend.ggml, window
        self.q = drawn((1, head, group, n_tokens, d), rng, spread=1)
        self.k, self.v = (drawn((1, head, 1, n_tokens, d), rng, spread=1) for _ in range(2))
        self.sink = drawn((1, head, group, 1, 1), rng, spread=1)
        self.scale = d**-0.5
        self.kept = np.tri(n_tokens, dtype=np.bool_)
        if window is not None:
            self.kept &= ~np.tri(n_tokens, k=-window, dtype=np.bool_)
        self.added = np.where(self.kept, 0, -np.inf)

    def defined(self, sink: Array | None) -> Array:
        scores = self.q.astype(np.float64) @ self.k.swapaxes(-1, -2) * self.scale
        return defined(scores, np.broadcast_to(self.kept, scores.shape), sink) @ self.v

    def by_soft_max(self, sink: Array | None, mask_type: str) -> Array:
        """The probabilities are ggml's."""
        scores = (self.q @ self.k.swapaxes(-1, -2)).astype(np.float32)
        _, head, group, n, _ = scores.shape
        with Builder(self.ggml, "CPU") as build:
            x, mask = build.tensor("f32", (n, n, head * group)), build.tensor(mask_type, (n, n))
            node = build.op("soft_max_ext", x, mask, self.scale, 0.0)
            logits = build.tensor("f32", (head * group,))
            if sink is not None:
                build.ggml.ggml_soft_max_add_sinks(node, logits)
                build.set(logits, sink)
            build.set(x, scores)
            build.set(mask, self.added.astype({"f16": np.float16, "f32": np.float32}[mask_type]))
            assert build.compute(node) == 0
            p = build.get(node).view(np.float32).reshape(scores.shape)
        return p @ self.v

    def by_flash_attention(self, sink: Array | None) -> Array:
        _, head, group, n, d = self.q.shape
        with Builder(self.ggml, "CPU") as build:
            q = build.tensor("f32", (d, n, head * group))
            k, v = (build.tensor("f32", (d, n, head)) for _ in range(2))
            mask, logits = build.tensor("f16", (n, n)), build.tensor("f32", (head * group,))
            node = build.op("flash_attn_ext", q, k, v, mask, self.scale, 0.0, 0.0)
            if sink is not None:
                build.ggml.ggml_flash_attn_ext_add_sinks(node, logits)
                build.set(logits, sink)
            for tensor, data in ((q, self.q), (k, self.k), (v, self.v), (mask, self.added.astype(np.float16))):
                build.set(tensor, data)
            assert build.compute(node) == 0
            out = build.get(node).view(np.float32).reshape(1, n, head, group, d)
        return np.moveaxis(out, 1, 3)

    def check(self, attention: Callable[[Array | None], Array]) -> None:
        """An attention of this sequence equals all others, without and with the sink."""
        for sink in (None, self.sink):
            actual = attention(sink)
            assert actual.dtype == F32
            for expected in (
                self.defined(sink),
                self.by_soft_max(sink, "f16"),
                self.by_soft_max(sink, "f32"),
                self.by_flash_attention(sink),
            ):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@either_engine
@pytest.mark.parametrize(
    ("n_tokens", "n_prompt", "longest", "size"),
    [(1, 1, 1, 1), (23, 13, 3, 4), (24, 24, 8, 8), (70, 50, 64, 32), (5, 3, 9, 64)],
)
def test_partitioned_flash_attention(backend: Plugin, n_tokens: int, n_prompt: int, longest: int, size: int) -> None:
    example = runpy.run_path(str(EXAMPLES / "partitioned_flash_attention.py"))
    scenario = Scenario(backend, n_tokens, 2, 3, 16, None)
    scenario.check(
        lambda sink: example["attention"](
            scenario.q, scenario.k, scenario.v, n_prompt=n_prompt, longest=longest, size=size, sink=sink
        )
    )


def test_partitioned_flash_attention_refuses_a_step_over_the_end_of_a_partition() -> None:
    example = runpy.run_path(str(EXAMPLES / "partitioned_flash_attention.py"))
    new, cache = np.zeros((1, 1, 1, 2, 4), np.float32), np.zeros((2, 1, 1, 1, 4, 4), np.float32)
    with pytest.raises(ValueError, match="2 tokens behind 3"):
        example["step"](new, new, new, cache, cache, 3)


@either_engine
@pytest.mark.parametrize(
    ("window", "chunks"), [(4, [3, 1, 1, 4, 1, 1]), (4, [11]), (1, [1, 2, 3]), (8, [1] * 20), (64, [40, 40, 1, 1])]
)
def test_sliding_window_attention(backend: Plugin, window: int, chunks: list[int]) -> None:
    example = runpy.run_path(str(EXAMPLES / "sliding_window_attention.py"))
    scenario = Scenario(backend, sum(chunks), 2, 3, 16, window)
    scenario.check(
        lambda sink: example["attention"](scenario.q, scenario.k, scenario.v, window=window, chunks=chunks, sink=sink)
    )


@pytest.mark.parametrize("name", ["partitioned_flash_attention", "sliding_window_attention"])
def test_the_examples_say_what_they_checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("max |difference| to full attention" in line for line in lines)


@either_engine
@given(seed=seeds, mask_type=st.sampled_from([F16, F32]), with_sink=st.booleans())
def test_masked_softmax_gives_what_ggmls_soft_max_gives(
    backend: Plugin, seed: int, mask_type: Any, with_sink: bool
) -> None:
    rng = np.random.default_rng(seed)
    n, hg, s, c = (int(value) for value in rng.integers(1, [3, 5, 5, 40]))
    x, kept = drawn((n, hg, s, c), rng), rng.random((n, 1, s, c)) < 0.6
    kept[..., 0] = True  # ggml gives NaN for a row without any
    sink = drawn((1, hg, 1, 1), rng) if with_sink else None
    with Builder(backend.ggml, "CPU") as build:
        tensor = build.tensor("f32", (c, s, hg, n))
        mask = build.tensor("f16" if mask_type == F16 else "f32", (c, s, 1, n))
        logits = build.tensor("f32", (hg,))
        node = build.op("soft_max_ext", tensor, mask, 1.0, 0.0)
        if sink is not None:
            build.ggml.ggml_soft_max_add_sinks(node, logits)
            build.set(logits, sink)
        build.set(tensor, x)
        build.set(mask, np.where(kept, 0, -np.inf).astype(mask_type))
        assert build.compute(node) == 0
        expected = build.get(node).view(np.float32).reshape(x.shape)
    close(masked_softmax(x, kept.astype(mask_type), sink), expected)
