"""The four documents line by line: what they say of the operators, against float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kit.acl_tensors import packed, run
from kit.documented import (
    BF16,
    F16,
    F32,
    F64,
    FLOATS,
    I8,
    I16,
    I32,
    INF,
    LAYOUTS,
    NAN,
    NUMBERS,
    WRITTEN,
    Array,
    assert_equal,
    assert_near,
    assert_shifted,
    assert_top,
    causal,
    either_engine,
    lattice,
    softmax_of,
    tile_of,
    top,
)
from kit.nodes import dims

from ggml_backend_npu.documents import aclnn
from ggml_backend_npu.documents.aclnn import AclTensor, aclnnCpy, aclnnCpyGetWorkspaceSize
from ggml_backend_npu.documents.infiniop import TensorDescriptor
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

# line 1: CPY takes the strides that GET_ROWS takes


@either_engine
def test_line_1_a_self_of_every_second_element() -> None:
    codes, scales = lattice(np.random.default_rng(0), 4, 64, 8)
    src, scale = codes.astype(np.int8).reshape(1, 1, 4, 64), scales.astype(np.float32).reshape(1, 1, 4, 1)
    target = np.zeros((1, 1, 4, 128), np.float32)[..., ::2]
    status, _, _ = aclnnCpyGetWorkspaceSize(target, src, scale, 64)
    assert status == 0
    run("aclnnCpy", target, src, scale, 64)
    np.testing.assert_array_equal(target.reshape(4, 64), codes * scales)
    assert not target.base[..., 1::2].any()  # type: ignore[index]


@either_engine
@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize("source_layout", LAYOUTS)
def test_line_1_int8_and_int4_lie_anywhere_both_ways(layout: str, source_layout: str) -> None:
    for bits, (size, n) in product((8, 4), ((64, 1), (32, 2), (3, 4), (1, 2))):
        codes, scales = lattice(np.random.default_rng(bits * size), 6 * n, size, bits)
        codes, scales = codes.reshape(2, 1, 3, n * size), scales.reshape(2, 1, 3, n)
        real = LAYOUTS[source_layout]((codes.reshape(2, 1, 3, n, size) * scales[..., None]).reshape(codes.shape))
        if source_layout == "repeated":
            codes, scales = codes[[0, 0]], scales[[0, 0]]
        stored = codes.astype(np.int8) if bits == 8 else packed(codes)
        quants, scale = WRITTEN[layout](np.zeros_like(stored)), WRITTEN[layout](np.zeros(scales.shape, np.float32))
        tensor = quants if bits == 8 else AclTensor(quants, codes.shape)
        run("aclnnCpy", tensor, LAYOUTS[source_layout](real.astype(np.float32)), scale, size)
        np.testing.assert_array_equal(quants, stored)
        np.testing.assert_array_equal(scale, scales)
        back = WRITTEN[layout](np.zeros(codes.shape, np.float32))
        run("aclnnCpy", back, tensor, scale, size)
        np.testing.assert_array_equal(back, real)


@either_engine
def test_line_1_a_transposed_self() -> None:
    codes, scales = lattice(np.random.default_rng(1), 4, 64, 8)
    real, scale = (codes * scales).reshape(1, 1, 4, 64), scales.astype(np.float32).reshape(1, 1, 4, 1)
    target = np.zeros((1, 1, 64, 4), np.float32).swapaxes(2, 3)
    run("aclnnCpy", target, codes.astype(np.int8).reshape(real.shape), scale, 64)
    np.testing.assert_array_equal(target, real)
    quants, found = np.zeros((1, 1, 64, 4), np.int8).swapaxes(2, 3), np.zeros_like(scale)
    run("aclnnCpy", quants, real.astype(np.float32), found, 64)
    np.testing.assert_array_equal(quants.reshape(codes.shape), codes)
    np.testing.assert_array_equal(found, scale)


def test_line_1_what_runs_backwards_is_read_at_each_run() -> None:
    memory, out = np.zeros((1, 1, 1, 4), np.float32), np.zeros((1, 1, 1, 4), np.float16)
    _, _, executor = aclnnCpyGetWorkspaceSize(out[..., ::-1], memory[..., ::-1], None, 0)
    assert executor is not None
    assert aclnn.aclSetAclOpExecutorRepeatable(executor) == 0
    for first in (1, 10):
        memory[...] = first + np.arange(4)
        assert aclnnCpy(None, 0, executor) == 0
        assert out.tolist() == memory.tolist()
    assert aclnnCpyGetWorkspaceSize(memory[..., ::-1], memory, None, 0)[0] == 161002  # the same bytes


# line 2: a group size of 0


@either_engine
def test_line_2_a_group_size_of_0_is_a_row_in_both() -> None:
    for bits in (8, 4):
        codes, scales = lattice(np.random.default_rng(2), 6, 64, bits)
        codes, scales = codes.reshape(1, 2, 3, 64), scales.reshape(1, 2, 3, 1)
        stored: Array = codes.astype(np.int8) if bits == 8 else packed(codes)
        scale = scales.astype(np.float32)
        src = stored if bits == 8 else AclTensor(stored, dims(codes.shape))
        out, back = np.zeros((1, 2, 1, 64), np.float32), np.zeros((1, 2, 3, 64), np.float32)
        run("aclnnGetRows", src, np.full((1, 1, 2, 1), 2, np.int32), scale, 0, out)
        run("aclnnCpy", back, src, scale, 0)
        np.testing.assert_array_equal(back, codes * scales)
        np.testing.assert_array_equal(out, back[:, :, 2:])
        quants, found = np.zeros_like(stored), np.zeros_like(scale)
        run("aclnnCpy", quants if bits == 8 else AclTensor(quants, codes.shape), back, found, 0)
        np.testing.assert_array_equal(quants, stored)
        np.testing.assert_array_equal(found, scale)


# line 3: every axis, masks of any type


@either_engine
@pytest.mark.parametrize("shape", [(2, 6, 3, 5), (2, 2, 3, 3, 5)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_line_3_every_axis(shape: tuple[int, ...], with_sink: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(shape).astype(np.float32)
    mask = rng.integers(0, 2, (shape[0], *[1] * (len(shape) - 3), *shape[-2:]))
    sink = rng.standard_normal((1, *shape[1:-2], 1, 1)).astype(np.float32) if with_sink else None
    columns = rng.integers(0, 2, (shape[0], shape[-1]))
    wide = rng.standard_normal((*shape[:-1], 140)).astype(np.float32)
    for axis in range(len(shape)):
        assert_near(softmax(x, axis), softmax_of(x, axis=axis), F32)
        assert_near(masked_softmax(x, mask, sink, axis), softmax_of(x, mask != 0, sink, axis), F32)
        kept = causal(shape, 2)
        assert_near(dynamic_masked_softmax(x, 2, None, sink, axis), softmax_of(x, kept, sink, axis), F32)
        kept = kept & (columns != 0).reshape(shape[0], *[1] * (len(shape) - 2), -1)
        assert_near(dynamic_masked_softmax(x, 2, columns, sink, axis), softmax_of(x, kept, sink, axis), F32)
        kept = causal(wide.shape, 128, 128)
        assert_near(window_softmax(wide, 128, sink, 128, axis), softmax_of(wide, kept, sink, axis), F32)


@either_engine
@pytest.mark.parametrize("dtype", [*NUMBERS, np.dtype(np.complex64), np.dtype(">i4"), np.dtype(ml_dtypes.float8_e5m2)])
def test_line_3_a_mask_of_any_type(dtype: Any) -> None:
    x = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)
    mask = np.array([1, 0, 1, 0, 1]).astype(dtype).reshape(x.shape)
    expected = softmax_of(x, np.array([True, False, True, False, True]))
    assert_near(masked_softmax(x, mask), expected, F32)
    assert_near(dynamic_masked_softmax(x, 5, mask[0, 0]), expected, F32)
    assert_near(flash_attn_tile(x, mask)[1], tile_of(x, mask != 0, None)[1], F32)


# line 4: x and rwkvag of any type each


@pytest.mark.parametrize("h0_type", [F16, F32])
@pytest.mark.parametrize("mu_type", [I8, F16, F32])
@pytest.mark.parametrize("type", [I8, F16, F32])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_line_4_all_types_of_x_and_rwkvag(type: Any, mu_type: Any, h0_type: Any, n_tokens: int) -> None:
    rng = np.random.default_rng(4)
    x, mu, h0 = (
        (rng.standard_normal(shape) * (40 if dtype == I8 else 2)).astype(dtype)
        for shape, dtype in (((2, n_tokens, 530), type), ((6, 1, 1, 530), mu_type), ((2, 1, 530), h0_type))
    )
    scales = {"x_scale": 0.05, "out_scale": 0.06} if type == I8 else {}
    assert_shifted(x, mu, h0, {**scales, **({"mu_scale": 1 / 127} if mu_type == I8 else {})})


# line 5: topk up to the width


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("topk", [1, 32, 33, 63, 64])
def test_line_5_topk_up_to_the_width(topk: int, norm: bool) -> None:
    rng = np.random.default_rng(5)
    assert_top(rng.integers(-40, 40, (6, 64)).astype(np.float32) / 8, topk, norm)


@pytest.mark.parametrize("topk", [4, 40])
def test_line_5_probabilities_that_underflow_are_ordered_as_they_are_before_they_do(topk: int) -> None:
    x = -np.random.default_rng(6).permutation(600)[:64].astype(np.float32)[None]
    x[0, 3] = 1
    assert (top(x, topk)[0] == 0).any() == (topk == 40)
    assert_top(x, topk, False)
    assert top(np.array([[0, -200, -150, -300]], np.float32), 4)[1].tolist() == [[0, 2, 1, 3]]


# line 6: constraints hold unless strict=False


def test_line_6_pad_c_has_no_constraint() -> None:
    x = np.random.default_rng(7).standard_normal((1, 2, 3, 140)).astype(np.float32)
    expected = softmax_of(x, causal(x.shape, 4, 128))
    pads: list[Any] = [-1, 0, 63, -7, np.int64(2)]
    for pad_c in pads:
        assert_near(window_softmax(x, 4, None, 128, -1, pad_c), expected, F32)
    with pytest.raises(ValueError, match=r"pad_c 0\.5"):
        window_softmax(x, 4, None, 128, -1, 0.5)  # type: ignore[arg-type]


def test_line_6_a_window_is_at_least_128_and_a_multiple_of_64() -> None:
    x = np.random.default_rng(8).standard_normal((1, 2, 3, 200)).astype(np.float32)
    for window in (1, 64, 127, 129, 160):
        with pytest.raises(ValueError, match=f"window_size {window}: must be at least 128 and a multiple of 64"):
            window_softmax(x, 0, window_size=window)
        loose = window_softmax(x, 1, window_size=window, strict=False)
        assert_near(loose, softmax_of(x, causal(x.shape, 1, window)), F32)
    for window in (128, 192):
        assert_near(window_softmax(x, 9, window_size=window), softmax_of(x, causal(x.shape, 9, window)), F32)


def test_line_6_an_index_is_below_the_length_and_updates_fit() -> None:
    data, updates = np.arange(6.0), np.array([7.0, 8.0])
    np.testing.assert_array_equal(insert(data, updates, 0, 4), [0, 1, 2, 3, 7, 8])
    for index in (5, 6):
        with pytest.raises(ValueError, match=f"index {index}"):
            insert(data, updates, 0, index)
    np.testing.assert_array_equal(insert(data, updates, 0, 5, strict=False), [0, 1, 2, 3, 4, 7])
    np.testing.assert_array_equal(insert(data, updates, 0, 6, strict=False), data)
    with pytest.raises(ValueError, match="index 6"):
        insert(data, updates[:0], 0, 6)
    with pytest.raises(ValueError, match="index 7"):
        insert(data, updates, 0, 7, strict=False)


def test_line_6_a_window_that_is_not_full_gives_what_is_there() -> None:
    data = np.arange(1.0, 9)
    for index in range(12):
        offset, size = index, len(data)
        if offset < 4:
            expected = data[0:offset]
        elif offset < size:
            expected = data[offset - 4 : offset]
        else:
            expected = data[size - 4 : size]
        np.testing.assert_array_equal(window_slice(data, index, 0, 4), expected)
        padded = np.concatenate([expected, np.zeros(4 - len(expected))])
        np.testing.assert_array_equal(window_slice(data, index, 0, 4, padded=True), padded)


@pytest.mark.parametrize("operator", [insert, window_softmax])
def test_line_6_strict_is_the_default(operator: Callable[..., Any]) -> None:
    assert inspect.signature(operator).parameters["strict"].default is True


# line 7: nothing is lost


@pytest.mark.parametrize(
    ("ptr", "value"),
    [
        (np.zeros(1, np.int8), np.array([300])),
        (np.zeros(1, np.int32), np.array([2**40 + 5])),
        (np.zeros(1, np.float32), np.array([7], np.int32)),
        (np.zeros(1, np.float64), np.array([2**60 + 1])),
        (np.zeros(1, np.uint8), np.array([-1], np.int8)),
        (np.zeros(1, np.int64), np.array([2**63], np.uint64)),
        (np.zeros(1, np.int32), np.array([1.0], np.float32)),
        (np.zeros(1, np.bool_), np.array([2], np.int8)),
        (np.zeros(1, np.float16), np.array([0.1], np.float32)),
        (np.zeros(1, np.float16), np.array([1e9], np.float32)),
        (np.zeros(1, np.float32), np.array([0.1])),
        (np.zeros(1, np.float32), np.array([1j])),
    ],
    ids=lambda array: f"{array.dtype} {array[0]}",
)
def test_line_7_what_loses_is_refused(ptr: Array, value: Array) -> None:
    for index in (None, 1):
        with pytest.raises(ValueError, match=f"value of {value.dtype}: ptr is of {ptr.dtype}"):
            dynamic_store(ptr, value, 0, index)
        assert not ptr.any()


@pytest.mark.parametrize(("dtype", "other"), [(F32, F16), (F32, BF16), (F32, I16), (I32, I8), (F64, I32), (BF16, I8)])
def test_line_7_a_type_that_has_all_numbers_of_the_other_takes_them(dtype: Any, other: Any) -> None:
    ptr, value = np.zeros(4, dtype), np.array([1, -3, 127, 0]).astype(other)
    dynamic_store(ptr, value)
    assert_equal(ptr, value, dtype)


def test_line_7_numbers_that_the_type_has_are_taken_within_a_kind() -> None:
    ptr, small = np.zeros(4, np.float16), np.zeros(2, np.int8)
    dynamic_store(ptr, np.array([1.5, NAN, -INF, 0], np.float32))
    np.testing.assert_array_equal(ptr, [1.5, NAN, -INF, 0])
    dynamic_store(small, [-128, 127])
    assert small.tolist() == [-128, 127]
    dynamic_store(small, [5, 300], 0, 1)  # the second is not stored
    assert small.tolist() == [5, 127]


# line 8: NaN in, NaN out


@either_engine
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [4, 9, 300])
def test_line_8_nan_of_a_tile_is_nan_in_its_row(width: int, dtype: Any) -> None:
    x = np.zeros((1, 1, 5, width), dtype)
    before = np.zeros((1, 1, 5, 1), np.float32)
    mask = np.ones((1, 1, 5, width), np.bool_)
    before[0, 0, 0] = NAN
    x[0, 0, 1, width - 1] = NAN
    x[0, 0, 2, 1], mask[0, 0, 2, 1] = NAN, False  # excluded, whatever it holds
    mask[0, 0, 3], before[0, 0, 3] = False, NAN
    for tile, rows in (
        (flash_attn_tile(x, mask, before), [0, 1, 3]),
        (dynamic_flash_attn_tile(x, width, before), [0, 1, 2, 3]),
    ):
        for row in range(5):
            for part in tile:
                assert np.isnan(part[0, 0, row]).all() == (row in rows)
                assert np.isnan(part[0, 0, row]).any() == (row in rows)
    spoiled = dynamic_flash_attn_tile(x[:, :, 4:], 1, sink=np.full((1, 1, 1, 1), NAN, np.float32))
    assert all(np.isnan(part).all() for part in spoiled)
    maxima, e, sums = flash_attn_tile(
        np.full((1, 1, 1, 4), 1, dtype), np.ones((1, 1, 1, 4)), np.full((1, 1, 1, 1), NAN, "f4")
    )
    assert np.isnan(maxima).all()
    assert np.isnan(sums).all()
    assert np.isnan(e).all()
    out = flash_attn_recompute(before[:, :, :1], maxima, before[:, :, :1], sums, e, e)
    assert all(np.isnan(part).all() for part in out)


@either_engine
def test_line_8_an_infinite_score_is_the_maximum_and_its_sum_is_nan() -> None:
    x = np.array([[[[0, INF, 1]]]], np.float32)
    maximum, e, total = flash_attn_tile(x, np.ones(x.shape))
    assert maximum == INF
    np.testing.assert_array_equal(e, [[[[0, NAN, 0]]]])
    assert np.isnan(total).all()


# line 9: clear errors


D = np.zeros((4, 5), np.float32)
X4 = np.zeros((1, 1, 3, 140), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TensorDescriptor.of([1]), "array is list: must be an ndarray"),  # type: ignore[arg-type]
        (lambda: dynamic_load(None), "ptr None: must be an array of numbers"),  # type: ignore[arg-type]
        (lambda: dynamic_load([[1], [1, 2]]), "ptr .*: must be an array of numbers"),
        (lambda: dynamic_store(np.zeros(1), None), "value None: must be an array of numbers"),  # type: ignore[arg-type]
        (lambda: insert(None, D, 0, 0), "data None: must be an array of numbers"),  # type: ignore[arg-type]
        (lambda: insert(D, ["a"], 0, 0), r"updates \['a'\]: must be an array of numbers"),
        (lambda: window_insert(None, D, 0, 0), "data None"),  # type: ignore[arg-type]
        (lambda: window_slice(None, 0, 0, 1), "data None"),  # type: ignore[arg-type]
        (lambda: nn_pad(None, 0, 0, 1), "input None"),  # type: ignore[arg-type]
        (lambda: softmax(None), "input None"),  # type: ignore[arg-type]
        (lambda: masked_softmax(X4, None), "mask None"),  # type: ignore[arg-type]
        *(
            (call, "axis True: must be an integer")
            for call in (
                lambda: softmax(D, True),
                lambda: dynamic_load(D, True, 1),
                lambda: insert(D, D, True, 0),
                lambda: window_insert(D, D, True, 0),
                lambda: window_slice(D, 1, True, 1),
                lambda: nn_pad(D, 0, True, 1),
                lambda: window_softmax(X4, 1, window_size=128, axis=True),
            )
        ),
        (lambda: window_softmax(X4, 1, window_size=True, strict=False), "window_size True: must be an integer"),
        (lambda: window_slice(D, 1, 1, True), "window_size True: must be an integer"),
        (lambda: window_slice(D, 1, 1, np.True_), r"window_size np\.True_: must be an integer"),  # type: ignore[arg-type]
        (lambda: window_softmax(X4, 1, window_size=128, pad_c=True), "pad_c True: must be an integer"),
        (lambda: nn_pad(D, 0, 1, True), "pad_size True: must be an integer"),
        (lambda: to_dynamic_index(np.array([1], np.int32), True), "max True: must be an integer"),
        *(
            (call, "axis -?[01]: a single number has no axes")
            for call in (
                lambda: softmax(np.float32(1)),
                lambda: dynamic_load(1.0, 0, 1),
                lambda: insert(1.0, 1.0, 0, 0),
                lambda: window_insert(1.0, 1.0, 0, 0),
                lambda: window_slice(1.0, 0, 0, 1),
                lambda: nn_pad(1.0, 0, -1, 1),
            )
        ),
    ],
)
def test_line_9_a_clear_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)
