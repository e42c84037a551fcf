"""TopKSoftmax: the document's numbers, a float64 definition, and a status for everything that may be wrong."""

from __future__ import annotations

import math
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.support import assert_same_bytes, computed, examples, seeds, zeros
from numpy.typing import NDArray

from ggml_backend_npu import default_backend
from ggml_backend_npu.documents.infiniop import TensorDescriptor, TopKSoftmax
from quant.kernels import threads

Array = NDArray[Any]
F32, F16, BF16 = np.float32, np.float16, ml_dtypes.bfloat16
SUCCESS, BAD_PARAM, NULL_POINTER, BAD_DTYPE, BAD_SHAPE, BAD_STRIDES = 0, 3, 4, 10, 11, 12
NAMES = {
    SUCCESS: "INFINI_STATUS_SUCCESS",
    BAD_PARAM: "INFINI_STATUS_BAD_PARAM",
    NULL_POINTER: "INFINI_STATUS_NULL_POINTER",
    BAD_DTYPE: "INFINI_STATUS_BAD_TENSOR_DTYPE",
    BAD_SHAPE: "INFINI_STATUS_BAD_TENSOR_SHAPE",
    BAD_STRIDES: "INFINI_STATUS_BAD_TENSOR_STRIDES",
}
INF, NAN = math.inf, math.nan


def created(x: Array) -> TopKSoftmax:
    status, descriptor = TopKSoftmax.create("handle", TensorDescriptor.of(x))
    assert status == SUCCESS, status
    assert descriptor is not None
    return descriptor


def top(x: Any, topk: int, norm: bool = False) -> tuple[Array, Array]:
    """Values and indices of the rows of x."""
    x = np.asarray(x)
    x = x.astype(F32) if x.dtype in (np.float64, np.int64) else x
    values, indices = np.full((len(x), topk), -7, F32), np.full((len(x), topk), -7, np.int32)
    before = x.copy()
    status = created(x).calculate(None, 0, values, indices, x, topk, norm)
    assert (int(status), status.name, status.message) == (0, NAMES[SUCCESS], "")
    assert_same_bytes(x, before, "x")
    return values, indices


# the document's numbers


def test_the_documents_sample_with_the_numbers_that_are_right() -> None:
    """The document says {0.705, 0.259}, in which the score of 2 is left out; the sum of that is not 1.

    Its second token is the first one less 0.5, so that both give the same.
    """
    x = np.array([[1, 3, 2, 4], [0.5, 2.5, 1.5, 3.5]], np.float32)
    for norm, expected in ((True, [0.7310586, 0.2689414]), (False, [0.6439143, 0.2368828])):
        values, indices = top(x, 2, norm)
        assert values == pytest.approx(np.array([expected] * 2), abs=2e-7)
        assert indices.tolist() == [[3, 1]] * 2
    assert top(x, 4)[0][0] == pytest.approx([0.6439143, 0.2368828, 0.0871443, 0.0320586], abs=2e-7)


@pytest.mark.parametrize(
    ("shape", "topk", "norm", "expected", "first"),
    [
        ((1, 10), 7, True, [0.4057211, 0.2460823, 0.1492564, 0.0905286, 0.0549084, 0.0333036, 0.0201997], 9),
        ((8, 20), 4, True, [0.4550543, 0.2760044, 0.1674051, 0.1015363], 19),
        ((2, 64), 6, True, [0.4140854, 0.2511555, 0.1523335, 0.0923949, 0.0560404, 0.0339902], 63),
        ((4, 16), 3, False, [0.3936014, 0.2387313, 0.1447978], 15),
    ],
)
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_the_numbers_of_its_own_tests(
    shape: tuple[int, int], topk: int, norm: bool, expected: list[float], first: int, dtype: Any
) -> None:
    x = (0.5 * np.arange(math.prod(shape))).reshape(shape).astype(dtype)
    values, indices = top(x, topk, norm)
    assert values == pytest.approx(np.array([expected] * shape[0]), abs=2e-7)
    assert indices.tolist() == [list(range(first, first - topk, -1))] * shape[0]


# against the definition


LEAST = 2 * float(
    np.finfo(np.float32).smallest_subnormal
)  # a float32 that small is rounded twice: exponential, quotient


def softmax(x: Array) -> Array:
    """In float64, of what the document takes the exponential of: the float32 difference from the maximum. Far from it,
    that is rounded by more than 1e-6."""
    scores = x.astype(np.float32)
    e = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64))
    p: Array = e / e.sum(axis=1, keepdims=True)
    return p


def defined(x: Array, topk: int, norm: bool) -> tuple[Array, Array]:
    """Of scores that are equal, or lie apart so far that their probabilities differ in float32."""
    p = softmax(x)
    indices = np.argsort(-p, axis=1, kind="stable")[:, :topk]
    values = np.take_along_axis(p, indices, axis=1)
    return values / values.sum(axis=1, keepdims=True) if norm else values, indices


@st.composite
def calls(draw: st.DrawFn) -> tuple[Array, int, bool]:
    """Scores in eighths, exact in every dtype, ties and -inf among them; rows padded, or all the same one."""
    width = draw(st.integers(1, 40) | st.integers(1, 600) | st.sampled_from([255, 256, 257, 512, 513]))
    rng = np.random.default_rng(draw(seeds))
    n_rows, padding = draw(st.integers(1, 5)), draw(st.sampled_from([0, 0, 1, 7]))
    spread = draw(st.sampled_from([2, 20, 64]))
    dtype = draw(st.sampled_from([F32, F16, BF16]))
    memory = (rng.integers(-spread, spread + 1, (n_rows, width + padding)) / 8).astype(dtype)
    if draw(st.booleans()):
        memory[rng.random(memory.shape) < draw(st.sampled_from([0.1, 0.9]))] = -np.inf
    memory[:, width:] = 99  # larger than all
    x = memory[:, :width]
    x[np.arange(n_rows), rng.integers(0, width, n_rows)] = 1
    if width > 1 and draw(st.integers(0, 9)) == 0:
        x = np.broadcast_to(x[:1], x.shape)
    topk = draw(st.integers(1, min(32, width)) | st.integers(1, width) | st.just(width))
    return x, topk, draw(st.booleans())


@given(call=calls())
@examples(300)
def test_it_equals_the_definition(call: tuple[Array, int, bool]) -> None:
    x, topk, norm = call
    values, indices = top(x, topk, norm)
    expected, places = defined(x, topk, norm)
    assert (indices == places).all()
    assert values == pytest.approx(expected, rel=1e-6, abs=0)
    assert values.dtype == F32
    assert indices.dtype == np.int32


@given(call=calls())
def test_normalised_it_is_the_softmax_of_the_selected_scores(call: tuple[Array, int, bool]) -> None:
    x, topk, _ = call
    values, indices = top(x, topk, norm=True)
    selected = np.take_along_axis(x.astype(np.float64), indices, axis=1)
    e = np.exp(selected - selected[:, :1])
    assert values == pytest.approx(e / e.sum(axis=1, keepdims=True), rel=1e-6, abs=0)


@given(
    n_rows=st.integers(1, 4),
    width=st.integers(1, 600),
    seed=seeds,
    scale=st.sampled_from([1e-3, 1.0, 30.0, 1e37]),
    dtype=st.sampled_from([F32, F16, BF16]),
)
@examples(60)
def test_of_any_numbers_the_values_are_those_of_the_indices(
    n_rows: int, width: int, seed: int, scale: float, dtype: Any
) -> None:
    """Scores as close as they come: which of two is first may be a matter of rounding, what they are worth is not."""
    x = np.random.default_rng(seed).standard_normal((n_rows, width))
    x = (x * min(scale, 1e4 if dtype == F16 else 1e37)).astype(dtype)
    topk = min(width, 20 + seed % 40)
    values, indices = top(x, topk)
    probabilities, _ = defined(x, width, False)
    p = softmax(x)
    for row in range(n_rows):
        assert len({*indices[row].tolist()}) == topk
        assert values[row] == pytest.approx(p[row, indices[row]], rel=1e-6, abs=LEAST)
        assert values[row] == pytest.approx(probabilities[row, :topk], rel=1e-6, abs=LEAST)
        assert (np.diff(values[row]) <= 0).all()
        ties, scores = np.diff(values[row]) == 0, x[row, indices[row]].astype(np.float64)
        larger, equal = (np.diff(scores) < 0)[ties], (np.diff(scores) == 0)[ties]
        assert (larger | (equal & (np.diff(indices[row])[ties] > 0))).all()


@pytest.mark.parametrize("width", [1, 17, 40, 600])
def test_of_equal_scores_the_first_come_first(width: int) -> None:
    """More than 16 of them too, where std::sort in the document's source mixes them."""
    topk = min(width, 32)
    values, indices = top(np.full((2, width), 3.25, F16), topk)
    assert indices.tolist() == [[*range(topk)]] * 2
    assert values == pytest.approx(np.full((2, topk), 1 / width), rel=1e-6)


@pytest.mark.parametrize("scores", np.linspace(-40, -1, 20))
def test_where_in_a_row_a_score_stands_does_not_matter(scores: float) -> None:
    """Not the vectors of a row either, whose last elements have another exponential in a graph's SOFT_MAX."""
    x = np.full((1, 39), scores, np.float32)
    x[0, 20] = 0
    values, indices = top(x, 32)
    assert indices.tolist() == [[20, *range(20), *range(21, 32)]]
    assert len(set(values[0, 1:].tolist())) == 1


def test_probabilities_that_float32_cannot_tell_apart_are_in_the_order_of_the_exact_ones() -> None:
    """Of 0, or of equal ones: the larger score first."""
    assert top([[-300, 0, -200, -INF]], 4)[1].tolist() == [[1, 2, 0, 3]]
    assert top([[0, 1e-9, -1e-9]], 3)[1].tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("topk", [32, 64])
def test_values_never_rise_where_an_exponential_does(topk: int) -> None:
    """Of float32 next to each other the smaller one's probability may be larger, by rounding: by the exponential of
    AVX-512 here, by that of AVX2 not."""
    bits = np.float32(2**-12).view(np.uint32) + np.arange(64 * 500, dtype=np.uint32)
    x = -bits.view(np.float32).reshape(500, 64)
    x[:, 0] = 0
    values, indices = top(x, topk)
    exponentials = computed("SOFT_MAX", np.zeros_like(x), x, params=struct.pack("2f", 1, 0))
    assert (np.diff(values) <= 0).all()
    assert (indices != np.arange(topk)).any() == (np.diff(exponentials[:, :topk]) > 0).any()


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [33, 64, 257, 600])
def test_any_topk_is_the_beginning_of_all_of_them(width: int, dtype: Any) -> None:
    """Be few selected or all sorted."""
    x = (np.random.default_rng(width).standard_normal((7, width)) * 60).astype(dtype)
    x[3], x[4, 5], x[5, ::2] = x[3, 0], NAN, -INF
    values, places = top(x, width)
    for topk in (1, 31, 32, 33, width - 1):
        some, indices = top(x, topk)
        assert_same_bytes(some, np.ascontiguousarray(values[:, :topk]))
        assert_same_bytes(indices, np.ascontiguousarray(places[:, :topk]))


def test_scores_of_minus_infinity_are_selected_last_and_worth_0() -> None:
    x = [[-INF, 2, -INF, 2, -INF]]
    for norm in (False, True):
        values, indices = top(x, 4, norm)
        assert values.tolist() == [[0.5, 0.5, 0, 0]]
        assert indices.tolist() == [[1, 3, 0, 2]]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("width", [4, 257, 600])
@pytest.mark.parametrize("kind", ["nan first", "nan last", "inf", "two infs", "inf and nan", "nothing finite"])
def test_a_row_without_a_softmax_is_nan_with_indices_that_exist(kind: str, width: int, dtype: Any, norm: bool) -> None:
    """Other rows are what they are without it."""
    x = (np.random.default_rng(0).integers(-9, 9, (3, width)) / 4).astype(dtype)
    clean = top(x, 4, norm)
    changes = {"nan first": {0: NAN}, "nan last": {-1: NAN}, "inf": {2: INF}, "two infs": {1: INF, -1: INF}}
    for place, value in {**changes, "inf and nan": {1: INF, 2: NAN}}.get(kind, {}).items():
        x[1, place] = value
    if kind == "nothing finite":
        x[1] = -INF
    values, indices = top(x, 4, norm)
    assert np.isnan(values[1]).all()
    assert indices[1].tolist() == [0, 1, 2, 3]
    for array, expected in ((values, clean[0]), (indices, clean[1])):
        assert_same_bytes(array[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("n_threads", [1, 7])
def test_threads_part_the_rows(n_threads: int, team: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_backend(), "team", replace(default_backend().team, size=n_threads))
    monkeypatch.setattr(threads, "GRAIN", 100)
    x = np.random.default_rng(1).integers(-40, 40, (101, 60)).astype(F32) / 8
    values, indices = top(x, 8, norm=True)
    expected, places = defined(x, 8, True)
    assert (indices == places).all()
    assert values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [F32, F16])
def test_no_temporary_is_larger_than_the_output(dtype: Any) -> None:
    x = np.random.default_rng(0).standard_normal((4096, 128)).astype(dtype)
    top(x[:1], 8)
    values, indices, descriptor = np.empty((4096, 8), F32), np.empty((4096, 8), np.int32), created(x)
    tracemalloc.start()
    try:
        assert descriptor.calculate(None, 0, values, indices, x, 8, True) == SUCCESS
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes


# what a caller may do


def test_a_descriptor_serves_any_number_of_calls() -> None:
    x = np.array([[1, 3, 2, 4], [4, 3, 2, 1]], np.float32)
    descriptor = created(x)
    assert (descriptor.N, descriptor.width, descriptor.workspace_size) == (2, 4, 0)
    for topk in (1, 4, 2):
        values, indices = np.empty((2, topk), F32), np.empty((2, topk), np.int32)
        assert descriptor.calculate(None, 0, values, indices, x, topk, False, None) == SUCCESS
        assert indices.tolist() == [[3, 1, 2, 0][:topk], [0, 1, 2, 3][:topk]]


def test_what_shape_and_strides_are_said_with_does_not_matter() -> None:
    for shape, strides, dtype in (([2, 4], [9, 1], "float32"), (np.array([2, 4]), np.array([9, 1]), F32)):
        status, descriptor = TopKSoftmax.create(0, TensorDescriptor(shape, strides, dtype))  # type: ignore[arg-type]
        assert status == SUCCESS
        assert descriptor is not None
        x = np.zeros((2, 9), F32)[:, :4]
        values, indices = np.empty((2, 2), F32), np.empty((2, 2), np.int32)
        assert descriptor.calculate(None, 0, values, indices, x, 2, 1) == SUCCESS  # type: ignore[arg-type]
        assert values.tolist() == [[0.5] * 2] * 2


@pytest.mark.parametrize("topk", [2, np.int64(2), np.uint8(2)])
@pytest.mark.parametrize("norm", [1, -5, True, np.True_, np.int32(2)])
def test_any_integer_does(topk: Any, norm: Any) -> None:
    assert top([[1, 3, 2, 4]], topk, norm)[0].sum() == pytest.approx(1)


def test_the_strides_of_a_single_row_say_nothing() -> None:
    """numpy calls an array contiguous whatever the stride of a dimension of one element is."""
    x = np.array([[1, 3, 2, 4]], np.float32)
    values, indices = np.zeros((1, 2), F32)[::-1], np.zeros((1, 2), np.int32)[::-1]
    assert values.strides[0] < 0
    assert created(x).calculate(None, 0, values, indices, x[::-1], 2, True) == SUCCESS
    assert indices.tolist() == [[3, 1]]
    assert values == pytest.approx(np.array([[0.7310586, 0.2689414]]))
    column = np.zeros((5, 1), F32)
    values, indices = np.zeros((5, 1), F32)[:, ::-1], np.full((5, 1), 9, np.int32)[:, ::-1]
    assert created(column).calculate(None, 0, values, indices, column, 1, True) == SUCCESS
    assert values.tolist() == [[1]] * 5
    assert indices.tolist() == [[0]] * 5


def test_of_no_rows_nothing_is_written() -> None:
    for dtype in (F32, F16, BF16):
        values, indices = top(np.zeros((0, 8), dtype), 3)
        assert values.shape == indices.shape == (0, 3)
        assert TensorDescriptor.contiguous((0, 8), dtype) == TensorDescriptor((0, 8), (8, 1), np.dtype(dtype))
    assert TensorDescriptor.contiguous((5, 3), F32) == TensorDescriptor.of(np.zeros((5, 3), F32))


# statuses


def assert_status(status: Any, code: int, *words: str) -> None:
    assert (int(status), status.name) == (code, NAMES[code]), status
    assert "\n" not in status.message
    assert all(word in status.message for word in words), status


def desc(shape: Any = (2, 4), strides: Any = (4, 1), dtype: Any = F32) -> TensorDescriptor:
    return TensorDescriptor(shape, strides, dtype)


CREATE: dict[str, tuple[Any, int, str]] = {
    "None": (None, NULL_POINTER, "x_desc is None"),
    "an array": (np.zeros((2, 4), F32), BAD_PARAM, "x_desc is ndarray"),
    "a list": ([2, 4], BAD_PARAM, "x_desc is list"),
    "a number": (7, BAD_PARAM, "x_desc is int"),
    **{
        f"dtype {dtype}": (desc(dtype=dtype), BAD_DTYPE, f"dtype {dtype}")
        for dtype in ("float64", "int8", "int32", ">f4", "nonsense", None, 3, "U4", "bool")
    },
    **{
        f"shape {shape}": (desc(shape=shape), BAD_SHAPE, f"shape {shape}")
        for shape in ((), (4,), (2, 4, 1), (-1, 4), (2, -4), (2.5, 4), None, 8, "ab", (None, 4))
    },
    **{
        f"strides {strides}": (desc(strides=strides), BAD_STRIDES, f"strides {strides}")
        for strides in ((4, 2), (4, 0), (4, -1), (-4, 1), (1, 4), (4,), (), (4, 1, 1), None, 4, "ab", (4.5, 1))
    },
    "dtype before shape": (desc((2,), (2,), "int8"), BAD_DTYPE, "int8"),
    "shape before strides": (desc((2, 4, 1), (4, 2, 7)), BAD_SHAPE, "(2, 4, 1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CREATE)
def test_create_refuses(name: str) -> None:
    x_desc, code, words = CREATE[name]
    status, descriptor = TopKSoftmax.create("handle", x_desc)
    assert_status(status, code, words)
    assert descriptor is None


def test_create_refuses_no_handle() -> None:
    for x_desc in (desc(), None, desc(dtype="int8")):
        status, descriptor = TopKSoftmax.create(None, x_desc)
        assert_status(status, NULL_POINTER, "handle is None")
        assert descriptor is None


def test_a_width_of_0_is_refused_at_the_call() -> None:
    for n_rows in (0, 2):
        x = np.zeros((n_rows, 0), F32)
        status = created(x).calculate(None, 0, np.zeros((n_rows, 1), F32), np.zeros((n_rows, 1), np.int32), x, 1, False)
        assert_status(status, BAD_PARAM, "width 0")


def read_only(dtype: Any) -> Array:
    array = zeros(3, 2, dtype=dtype)
    array.flags.writeable = False
    return array


FOOLISH: tuple[Any, ...] = (None, "2", 2.0, 1.5, NAN, 1j, [2], (), {}, object, np.float32(2), np.array([1, 2]), b"2")
CALCULATE: dict[str, tuple[dict[str, Any], int, str]] = {
    **{f"no {name}": ({name: None}, NULL_POINTER, f"{name} is None") for name in ("values", "indices", "x")},
    **{f"topk {topk}": ({"topk": topk}, BAD_PARAM, f"topk={topk}") for topk in (0, -1, 41, True, 1 << 80)},
    **{f"topk {topk!r}": ({"topk": topk}, BAD_PARAM, f"topk={topk!r}") for topk in FOOLISH},
    **{f"norm {norm!r}": ({"norm": norm}, BAD_PARAM, f"norm={norm!r}") for norm in FOOLISH},
    **{
        f"{name} is {type(value).__name__}": ({name: value}, BAD_PARAM, f"{name} is {type(value).__name__}")
        for name in ("values", "indices", "x")
        for value in ([[0.0, 0.0]] * 3, "abc", 3, np.float32(1), memoryview(b"abc"), object())
    },
    "values float64": ({"values": zeros(3, 2, dtype=np.float64)}, BAD_DTYPE, "values of dtype float64"),
    "values >f4": ({"values": zeros(3, 2, dtype=">f4")}, BAD_DTYPE, "values of dtype >f4"),
    "indices int64": ({"indices": zeros(3, 2, dtype=np.int64)}, BAD_DTYPE, "indices of dtype int64"),
    "indices uint32": ({"indices": zeros(3, 2, dtype=np.uint32)}, BAD_DTYPE, "indices of dtype uint32"),
    "x float16": ({"x": zeros(3, 40, dtype=F16)}, BAD_DTYPE, "x of dtype float16"),
    "x >f4": ({"x": zeros(3, 40, dtype=">f4")}, BAD_DTYPE, "x of dtype >f4"),
    "values (3, 3)": ({"values": zeros(3, 3)}, BAD_SHAPE, "values of shape (3, 3)"),
    "values (2, 2)": ({"values": zeros(2, 2)}, BAD_SHAPE, "values of shape (2, 2)"),
    "values (6,)": ({"values": zeros(6)}, BAD_SHAPE, "values of shape (6,)"),
    "indices (2, 3)": ({"indices": zeros(2, 3, dtype=np.int32)}, BAD_SHAPE, "indices of shape (2, 3)"),
    "x (3, 41)": ({"x": zeros(3, 41)}, BAD_SHAPE, "x of shape (3, 41)"),
    "x ()": ({"x": zeros()}, BAD_SHAPE, "x of shape ()"),
    "values apart": ({"values": zeros(3, 5)[:, :2]}, BAD_STRIDES, "values of strides (20, 4)"),
    "values transposed": ({"values": zeros(2, 3).T}, BAD_STRIDES, "values of strides (4, 12)"),
    "indices upside down": ({"indices": zeros(3, 2, dtype=np.int32)[::-1]}, BAD_STRIDES, "indices of strides (-8, 4)"),
    "values read-only": ({"values": read_only(F32)}, BAD_STRIDES, "values"),
    "indices read-only": ({"indices": read_only(np.int32)}, BAD_STRIDES, "indices"),
    "x of other row stride": ({"x": zeros(3, 48)[:, :40]}, BAD_STRIDES, "x of strides (48, 1)"),
    "x with gaps": ({"x": zeros(3, 80)[:, ::2]}, BAD_STRIDES, "x of strides (80, 2)"),
    "x backwards": ({"x": zeros(3, 40)[:, ::-1]}, BAD_STRIDES, "x of strides (40, -1)"),
    "x upside down": ({"x": zeros(3, 40)[::-1]}, BAD_STRIDES, "x of strides (-40, 1)"),
    "None before topk": ({"x": None, "topk": 0}, NULL_POINTER, "x is None"),
    "topk before arrays": ({"values": [], "topk": 0}, BAD_PARAM, "topk=0"),
    "dtype before shape": ({"values": zeros(9, dtype=np.int8)}, BAD_DTYPE, "int8"),
    "shape before strides": ({"values": zeros(4, 6)[:, ::2]}, BAD_SHAPE, "values of shape (4, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALCULATE)
def test_calculate_refuses_and_writes_nothing(name: str) -> None:
    changes, code, words = CALCULATE[name]
    descriptor = created(zeros(3, 40))
    given = {
        "values": np.full((3, 2), 5, F32), "indices": np.full((3, 2), 5, np.int32), "x": zeros(3, 40),
        "topk": 2, "norm": True, **changes,
    }  # fmt: skip
    arrays = [array for array in given.values() if isinstance(array, np.ndarray)]
    before = [array.copy() for array in arrays]
    assert_status(descriptor.calculate(None, 0, **given), code, words)
    for array, copy in zip(arrays, before, strict=True):
        assert_same_bytes(array, copy)


@pytest.mark.parametrize("backwards", [slice(None, None, -1), slice(None, None, 2)])
def test_calculate_refuses_a_single_row_with_gaps(backwards: slice) -> None:
    x = zeros(1, 8)[:, backwards]
    values, indices = np.full((1, 2), 5, F32), np.full((1, 2), 5, np.int32)
    descriptor = created(zeros(*x.shape))
    assert_status(descriptor.calculate(None, 0, values, indices, x, 2, True), BAD_STRIDES, "x of strides")
    assert values.tolist() == indices.tolist() == [[5, 5]]


@pytest.mark.parametrize("what", ["values on x", "indices on x", "values on indices"])
def test_calculate_refuses_memory_that_is_shared(what: str) -> None:
    x, indices = np.full((3, 40), 5, F32), np.full((3, 2), 5, np.int32)
    values: Array = np.full((3, 2), 5, F32)
    if what == "values on x":
        values = x.reshape(-1)[7:13].reshape(3, 2)
    elif what == "indices on x":
        indices = x.reshape(-1)[:6].view(np.int32).reshape(3, 2)
    else:
        values = indices.view(F32)
    before = [array.copy() for array in (values, indices, x)]
    assert_status(created(x).calculate(None, 0, values, indices, x, 2, True), BAD_PARAM, "share memory")
    for array, copy in zip((values, indices, x), before, strict=True):
        assert_same_bytes(array, copy)


def test_the_status_says_what_it_is() -> None:
    status, _ = TopKSoftmax.create("handle", desc(strides=(4, 2)))
    assert str(status) == "12 INFINI_STATUS_BAD_TENSOR_STRIDES: x of strides (4, 2): must be (0 or more, 1)"
    assert str(TopKSoftmax.create("handle", desc())[0]) == "0 INFINI_STATUS_SUCCESS"
