"""The four documents line by line: what they say of every operator, against float64 written down here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support import ENGINES, examples

import ggml_backend_npu
from ggml_backend_npu import Tensor
from ggml_backend_npu.documents import aclnn, infiniop, rbln, rwkv
from ggml_backend_npu.documents.aclnn import (
    AclTensor,
    aclnnCpy,
    aclnnCpyGetWorkspaceSize,
    aclnnDup,
    aclnnDupGetWorkspaceSize,
    aclnnGetRows,
    aclnnGetRowsGetWorkspaceSize,
)
from ggml_backend_npu.documents.infiniop import TensorDescriptor, TopKSoftmax
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
from ggml_backend_npu.documents.rwkv import token_shift

Array = NDArray[Any]
F64, F32, F16, BF16 = (np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
I8, I16, I32, I64 = (np.dtype(d) for d in (np.int8, np.int16, np.int32, np.int64))
FLOATS = [F32, F16, BF16]
NUMBERS = [*FLOATS, F64, I8, I16, I32, I64, np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.bool_)]
LOWEST = float(np.finfo(np.float32).min)
NAN, INF = np.nan, np.inf
ROUNDING = {F32: 4e-6, F16: 6e-4, BF16: 5e-3}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has two engines, by either."""
    monkeypatch.setenv("GGML_NPU_ENGINE", request.param)


either_engine = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("module", [aclnn, infiniop, rbln, rwkv])
def test_an_operator_is_importable_from_the_package_for_a_release_more(module: Any) -> None:
    for name in ggml_backend_npu.MOVED[module.__name__.rpartition(".")[2]].split():
        with pytest.warns(DeprecationWarning, match=f"{name} has moved to {module.__name__}"):
            assert getattr(ggml_backend_npu, name) is getattr(module, name)


def test_what_the_package_has_not_is_told() -> None:
    with pytest.raises(AttributeError, match="no_such_operator"):
        _ = ggml_backend_npu.no_such_operator


# how an array lies in memory


def _a_part(array: Array) -> Array:
    whole = np.full([n + 2 for n in array.shape], 77, array.dtype)
    view = whole[(slice(1, -1),) * array.ndim]
    view[...] = array
    return view


def _apart(array: Array) -> Array:
    whole = np.full([2 * n for n in array.shape], 77, array.dtype)
    view = whole[(slice(None, None, 2),) * array.ndim]
    view[...] = array
    return view


def _backwards(array: Array) -> Array:
    return np.flip(np.flip(array).copy())


def _repeated(array: Array) -> Array:
    return np.broadcast_to(array[:1], array.shape) if array.ndim else array


WRITTEN: dict[str, Callable[[Array], Array]] = {
    "in order": np.array,
    "turned": lambda array: array.T.copy().T,
    "a part": _a_part,
    "apart": _apart,
    "backwards": _backwards,
}
LAYOUTS = {**WRITTEN, "repeated": _repeated}  # which changes the numbers: a reference is made of what it gives


class Case:
    """An example: choices that Hypothesis makes one by one, layouts, and numbers from a seed."""

    def __init__(self, seed: int, choice: int, layouts: tuple[str, str, str]) -> None:
        self.rng, self._choice, self._layouts = np.random.default_rng(seed), choice, [*layouts]

    def one_of(self, options: Any) -> Any:
        self._choice, at = divmod(self._choice, len(options))
        return options[at]

    def laid_out(self, array: Array, written: bool = False) -> Array:
        layout = self._layouts.pop()
        self._layouts.insert(0, layout)
        return LAYOUTS["apart" if written and layout == "repeated" else layout](array)

    def below(self, *most: int) -> list[int]:
        """Numbers from 1 to each."""
        return [int(self.rng.integers(1, n + 1)) for n in most]

    def numbers(self, shape: Any, dtype: Any, spread: float = 3) -> Array:
        if dtype.kind in "iub":
            return self.rng.integers(0 if dtype.kind != "i" else -100, 2 if dtype.kind == "b" else 100, shape).astype(
                dtype
            )
        return (self.rng.standard_normal(shape) * spread).astype(dtype)


def assert_near(actual: Array, expected: Array, dtype: Any) -> None:
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    least = 6e-8 if dtype == F16 else 1e-9
    wrong = np.abs(actual.astype(F64) - expected) > ROUNDING[dtype] * np.abs(expected) + least
    assert not wrong.any(), (actual[wrong], expected[wrong])


def assert_equal(actual: Array, expected: Array, dtype: Any) -> None:
    """The very numbers."""
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual.astype(F64), expected.astype(F64))


# the algorithms of the documents in float64


def softmax_of(x: Array, kept: Any = True, sink: Array | None = None, axis: int = -1) -> Array:
    """The document's masked_softmax, MASK_VALUE being -inf, and 0 where nothing is left."""
    s = np.where(kept, x.astype(F64), -INF)
    if sink is not None:
        s = np.concatenate((s, np.broadcast_to(sink.astype(F64), (*s.shape[:-1], 1))), axis=-1)
    largest = s.max(axis, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(largest), 0, largest))
    total = e.sum(axis, keepdims=True)
    output = e / np.where(total == 0, 1, total)
    return output if sink is None else output[..., :-1]


def tile_of(x: Array, kept: Any, before: Array | None, sink: Array | None = None) -> tuple[Array, Array, Array]:
    """The document's flash_attn_tile, the lowest float32 being the maximum of nothing."""
    s = np.where(kept, x.astype(F64), -INF)
    if sink is not None:
        s = np.concatenate((s, np.broadcast_to(sink.astype(F64), (*s.shape[:-1], 1))), axis=-1)
    largest = np.maximum(s.max(-1, keepdims=True), LOWEST)
    if before is not None:
        largest = np.maximum(largest, before)
    e = np.exp(s - largest)
    return largest, e if sink is None else e[..., :-1], e.sum(-1, keepdims=True)


def causal(shape: tuple[int, ...], index: Any, window: int | None = None) -> Array:
    """(Nmb, 1, ..., Seq, Channel): the columns up to a row's own, all or the last of them."""
    own = np.broadcast_to(index, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) + np.arange(shape[-2])[:, None]
    column = np.arange(shape[-1])
    return (column <= own) & (column > own - (window or column.size + 1 + int(np.max(index)) + shape[-2]))


# line 1: CPY takes the strides that GET_ROWS takes


def copied(target: Any, source: Any, scale: Array | None = None, size: int = 0) -> None:
    status, n_bytes, executor = aclnnCpyGetWorkspaceSize(target, source, scale, size)
    assert status == 0, status
    assert executor is not None
    assert aclnnCpy(None, n_bytes, executor) == 0


def lattice(rng: np.random.Generator, n_groups: int, size: int, bits: int) -> tuple[Array, Array]:
    """Codes (n_groups, size) and scales (n_groups, 1) of which float64 knows what quantising their products gives."""
    most = 127 if bits == 8 else 7
    codes = rng.integers(-most, most + 1, (n_groups, size))
    codes[:, rng.integers(size)] = 127 if bits == 8 else -8
    return codes, 2.0 ** rng.integers(-9, 4, (n_groups, 1))


def packed(codes: Array) -> Array:
    """int4, two to a byte, the low nibble first."""
    nibbles = codes.astype(np.uint8) & 15
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpacked(pairs: Array) -> Array:
    nibbles = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*pairs.shape[:-1], -1).astype(np.int8)
    return (nibbles ^ 8) - 8


def blocks_of(type: str, codes: Array, scales: Array) -> Array:
    """(n_groups, bytes): float16 scale, then 32 int8, or the codes plus 8 of which the second half are high nibbles."""
    head = scales.astype(F16).view(np.uint8)
    if type == "q8_0":
        return np.hstack([head, codes.astype(np.int8).view(np.uint8)])
    nibbles = (codes + 8).astype(np.uint8)
    return np.hstack([head, nibbles[:, :16] | (nibbles[:, 16:] << 4)])


@either_engine
def test_line_1_a_self_of_every_second_element() -> None:
    codes, scales = lattice(np.random.default_rng(0), 4, 64, 8)
    src, scale = codes.astype(np.int8).reshape(1, 1, 4, 64), scales.astype(np.float32).reshape(1, 1, 4, 1)
    target = np.zeros((1, 1, 4, 128), np.float32)[..., ::2]
    status, _, _ = aclnnCpyGetWorkspaceSize(target, src, scale, 64)
    assert status == 0
    copied(target, src, scale, 64)
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
        copied(tensor, LAYOUTS[source_layout](real.astype(np.float32)), scale, size)
        np.testing.assert_array_equal(quants, stored)
        np.testing.assert_array_equal(scale, scales)
        back = WRITTEN[layout](np.zeros(codes.shape, np.float32))
        copied(back, tensor, scale, size)
        np.testing.assert_array_equal(back, real)


@either_engine
def test_line_1_a_transposed_self() -> None:
    codes, scales = lattice(np.random.default_rng(1), 4, 64, 8)
    real, scale = (codes * scales).reshape(1, 1, 4, 64), scales.astype(np.float32).reshape(1, 1, 4, 1)
    target = np.zeros((1, 1, 64, 4), np.float32).swapaxes(2, 3)
    copied(target, codes.astype(np.int8).reshape(real.shape), scale, 64)
    np.testing.assert_array_equal(target, real)
    quants, found = np.zeros((1, 1, 64, 4), np.int8).swapaxes(2, 3), np.zeros_like(scale)
    copied(quants, real.astype(np.float32), found, 64)
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
        stored, scale = codes.astype(np.int8) if bits == 8 else packed(codes), scales.astype(np.float32)
        src = stored if bits == 8 else AclTensor(stored, codes.shape)
        out, back = np.zeros((1, 2, 1, 64), np.float32), np.zeros((1, 2, 3, 64), np.float32)
        status, size, executor = aclnnGetRowsGetWorkspaceSize(src, np.full((1, 1, 2, 1), 2, np.int32), scale, 0, out)
        assert status == 0
        assert executor is not None
        assert aclnnGetRows(None, size, executor) == 0
        copied(back, src, scale, 0)
        np.testing.assert_array_equal(back, codes * scales)
        np.testing.assert_array_equal(out, back[:, :, 2:])
        quants, found = np.zeros_like(stored), np.zeros_like(scale)
        copied(quants if bits == 8 else AclTensor(quants, codes.shape), back, found, 0)
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


def shifted(x: Array, mu: Array, h0: Array) -> tuple[Array, Array]:
    """(six outputs, how large what is added up is) in float64."""
    previous = np.concatenate([h0, x[:, :-1]], axis=1)
    mu = mu.reshape(6, 1, 1, -1)
    return x + mu * (previous - x), np.abs(x) + np.abs(mu) * (np.abs(previous) + np.abs(x))


def rounding(dtype: Any, x: Array) -> Array | float:
    """Half the distance of two float16 at x, that of subnormal ones at least; 0 of the other types."""
    return 2.0**-11 * np.abs(x) + 2.0**-25 if dtype == F16 else 0.0


def assert_shifted(x: Array, mu: Array, h0: Array, scales: dict[str, float]) -> None:
    *mixed, ht = token_shift(x, mu, h0, **scales)
    real = x.astype(F64) * scales.get("x_scale", 1)
    exact, size = shifted(real, mu.astype(F64) * scales.get("mu_scale", 1), h0.astype(F64))
    bound = 1e-6 * size  # of float32: three roundings, and those of the scales
    for y, wanted, few in zip(mixed, exact, bound, strict=True):
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        if x.dtype == I8:
            step = scales["out_scale"]
            wanted, few, last = np.clip(wanted / step, -128, 127), few / step, 0.5
        else:
            last = rounding(x.dtype, wanted)
        assert (np.abs(y - wanted) <= few + last).all()
    assert (ht.shape, ht.dtype) == (h0.shape, h0.dtype)
    last_x = np.abs(real[:, -1:])
    assert (np.abs(ht - real[:, -1:]) <= 1e-6 * last_x + rounding(h0.dtype, last_x)).all()


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


def top(x: Array, topk: int, norm: bool = False) -> tuple[Array, Array]:
    status, descriptor = TopKSoftmax.create("handle", TensorDescriptor.of(x))
    assert status == 0
    assert descriptor is not None
    values, indices = np.empty((len(x), topk), np.float32), np.empty((len(x), topk), np.int32)
    status = descriptor.calculate(None, 0, values, indices, x, topk, norm)
    assert status == 0, status
    return values, indices


def assert_top(x: Array, topk: int, norm: bool) -> None:
    """Of scores whose distances are multiples of 1 / 8."""
    p = softmax_of(x)
    places = np.argsort(-x.astype(F64), axis=1, kind="stable")[
        :, :topk
    ]  # exact: probabilities that are not 0 in any type
    expected = np.take_along_axis(p, places, axis=1)
    expected = expected / expected.sum(1, keepdims=True) if norm else expected
    values, indices = top(x, topk, norm)
    np.testing.assert_array_equal(indices, places)
    assert (np.abs(values - expected) <= 2e-6 * expected + 3e-45).all()


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
    assert top(np.float32([[0, -200, -150, -300]]), 4)[1].tolist() == [[0, 2, 1, 3]]


# line 6: constraints hold unless strict=False


def test_line_6_pad_c_has_no_constraint() -> None:
    x = np.random.default_rng(7).standard_normal((1, 2, 3, 140)).astype(np.float32)
    expected = softmax_of(x, causal(x.shape, 4, 128))
    for pad_c in (-1, 0, 63, -7, np.int64(2)):
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
    dynamic_store(ptr, np.float32([1.5, NAN, -INF, 0]))
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
    for e in (None, dynamic_flash_attn_tile(x, width, before)):
        maxima, e, sums = e or flash_attn_tile(x, mask, before)
        rows = [0, 1, 3] if mask is not None else [0, 1, 2, 3]
        for row in range(5):
            for part in (maxima, e, sums):
                assert np.isnan(part[0, 0, row]).all() == (row in rows)
                assert np.isnan(part[0, 0, row]).any() == (row in rows)
        mask = None  # type: ignore[assignment]
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
    x = np.float32([[[[0, INF, 1]]]])
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
        (lambda: dynamic_load(None), "ptr None: must be an array of numbers"),
        (lambda: dynamic_load([[1], [1, 2]]), "ptr .*: must be an array of numbers"),
        (lambda: dynamic_store(np.zeros(1), None), "value None: must be an array of numbers"),
        (lambda: insert(None, D, 0, 0), "data None: must be an array of numbers"),
        (lambda: insert(D, ["a"], 0, 0), r"updates \['a'\]: must be an array of numbers"),
        (lambda: window_insert(None, D, 0, 0), "data None"),
        (lambda: window_slice(None, 0, 0, 1), "data None"),
        (lambda: nn_pad(None, 0, 0, 1), "input None"),
        (lambda: softmax(None), "input None"),
        (lambda: masked_softmax(X4, None), "mask None"),
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
        (lambda: window_slice(D, 1, 1, np.True_), r"window_size np\.True_: must be an integer"),
        (lambda: window_softmax(X4, 1, window_size=128, pad_c=True), "pad_c True: must be an integer"),
        (lambda: nn_pad(D, 0, 1, True), "pad_size True: must be an integer"),
        (lambda: to_dynamic_index(np.int32([1]), True), "max True: must be an integer"),
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


# every operator, over types and strides


def _scores(case: Case, window: int = 0) -> tuple[Array, int, Array | None]:
    """Scores, an axis, and a sink or none."""
    shape = (*case.below(2), *case.one_of([(2,), (2, 2), (1, 3), (3,)]), *case.below(3))
    shape = (*shape, window + shape[-1] + int(case.rng.integers(0, 3)) if window else case.below(9)[0])
    x = case.laid_out(case.numbers(shape, case.one_of(FLOATS)))
    axis = case.one_of([-1, -1, *range(len(shape))])
    sink = case.one_of([None, None, *FLOATS])
    return x, axis, None if sink is None else case.numbers((1, *shape[1:-2], 1, 1), sink)


def _masked(case: Case, shape: tuple[int, ...]) -> Array:
    mask = case.numbers(shape, case.one_of(NUMBERS))
    return case.laid_out(np.where(case.rng.random(shape) < 0.4, np.zeros((), mask.dtype), mask))


def _index(case: Case, n: int, most: int) -> Any:
    """An index, or one for each of n."""
    if case.one_of([False, True]):
        return int(case.rng.integers(0, most + 1))
    return case.rng.integers(0, most + 1, n).astype(case.one_of([I32, I64, I16]))


def _of(case: Case, x: Array, kept: Array) -> Array:
    """The scores with NaN where they are masked."""
    spoiled = np.where(kept, x, np.array(NAN, x.dtype))
    return case.laid_out(spoiled) if case.one_of([True, False]) else x


def check_softmax(case: Case) -> None:
    x = case.laid_out(case.numbers(case.below(*[4] * case.one_of([1, 2, 3, 4, 5, 6])), case.one_of(FLOATS)))
    axis = int(case.rng.integers(-1, x.ndim))
    assert_near(softmax(x, axis), softmax_of(x, axis=axis), x.dtype)


def check_masked_softmax(case: Case) -> None:
    x, axis, sink = _scores(case)
    mask = _masked(case, (x.shape[0], *[1] * (x.ndim - 3), *x.shape[-2:]))
    kept = np.broadcast_to(mask != 0, x.shape)
    x = _of(case, x, kept)
    kept = kept & ~np.isnan(x)
    assert_near(masked_softmax(x, mask, sink, axis), softmax_of(x, kept, sink, axis), x.dtype)


def check_dynamic_masked_softmax(case: Case) -> None:
    x, axis, sink = _scores(case)
    index, kept = _index(case, len(x), x.shape[-1]), np.ones(x.shape, np.bool_)
    mask = _masked(case, (len(x), x.shape[-1])) if case.one_of([True, False]) else None
    kept &= causal(x.shape, index)
    if mask is not None:
        kept &= (mask != 0).reshape(len(x), *[1] * (x.ndim - 2), -1)
    assert_near(dynamic_masked_softmax(x, index, mask, sink, axis), softmax_of(x, kept, sink, axis), x.dtype)


def check_window_softmax(case: Case) -> None:
    strict = case.one_of([False, False, False, True])
    window = 128 if strict else case.below(6)[0]
    x, axis, sink = _scores(case, window)
    index = _index(case, len(x), window)
    kept = causal(x.shape, index, window)
    actual = window_softmax(x, index, sink, window, axis, int(case.rng.integers(-9, 9)), strict=strict)
    assert_near(actual, softmax_of(x, kept, sink, axis), x.dtype)


def _before(case: Case, x: Array) -> Array | None:
    dtype = case.one_of([None, *FLOATS])
    return None if dtype is None else case.laid_out(case.numbers((*x.shape[:-1], 1), dtype))


def _assert_tile(actual: tuple[Array, Array, Array], expected: tuple[Array, Array, Array], dtype: Any) -> None:
    for a, e, of in zip(actual, expected, (F32, dtype, F32), strict=True):
        assert_near(a, e, of)


def check_flash_attn_tile(case: Case) -> None:
    x, _, _ = _scores(case)
    mask, before = _masked(case, (x.shape[0], *[1] * (x.ndim - 3), *x.shape[-2:])), _before(case, x)
    of = None if before is None else before.astype(F64)
    _assert_tile(flash_attn_tile(x, mask, before), tile_of(x, mask != 0, of), x.dtype)


def check_dynamic_flash_attn_tile(case: Case) -> None:
    x, _, sink = _scores(case)
    index, before = _index(case, len(x), x.shape[-1]), _before(case, x)
    of = None if before is None else before.astype(F64)
    actual = dynamic_flash_attn_tile(x, index, before, None, sink)
    _assert_tile(actual, tile_of(x, causal(x.shape, index), of, sink), x.dtype)


def check_flash_attn_recompute(case: Case) -> None:
    shape, dtype, of = case.below(2, 3, 4, 5), case.one_of(FLOATS), case.one_of(FLOATS)
    rows = [case.laid_out(case.numbers((*shape[:-1], 1), of)) for _ in range(4)]
    rows[1] = np.maximum(rows[0], rows[1])
    outs = [case.laid_out(case.numbers(shape, dtype)) for _ in range(2)]
    total, out = flash_attn_recompute(*rows, *outs)
    before, now, sum_before, sum_now, out_before, out_now = (array.astype(F64) for array in (*rows, *outs))
    factor = np.exp(before - now)
    for actual, old, new, kind in ((total, sum_before, sum_now, of), (out, out_before, out_now, dtype)):
        assert (actual.shape, actual.dtype) == (old.shape, kind)
        size = np.abs(factor * old) + np.abs(new)
        assert (np.abs(actual.astype(F64) - (factor * old + new)) <= ROUNDING[kind] * size + 6e-8).all()


def check_to_dynamic_index(case: Case) -> None:
    value = int(case.rng.integers(0, 30_000))
    data = case.laid_out(np.full(case.one_of([(1,), (1, 1), (1, 1, 1)]), value, case.one_of([I32, I16])))
    assert to_dynamic_index(data, case.one_of([-1, value, value + 5])) == value


def _along(case: Case) -> tuple[Array, int, int]:
    """An array of any type, an axis, and its length."""
    shape = case.below(*[4] * case.one_of([1, 2, 3, 4]))
    axis = int(case.rng.integers(0, len(shape)))
    data = case.laid_out(case.numbers(shape, case.one_of(NUMBERS)))
    return data, axis, shape[axis]


def _cut(array: Array, axis: int, begin: int, end: int | None) -> Array:
    return array[(slice(None),) * axis + (slice(begin, end),)]


def _zeros(data: Array, axis: int, n: int) -> Array:
    return np.zeros((*data.shape[:axis], n, *data.shape[axis + 1 :]))


def _joined(data: Array, axis: int, *parts: Array) -> Array:
    return np.concatenate([part.astype(F64) for part in parts], axis)


def _updates(case: Case, data: Array, axis: int, most: int) -> Array:
    shape = (*data.shape[:axis], int(case.rng.integers(0, most + 1)), *data.shape[axis + 1 :])
    return case.laid_out(case.numbers(shape, data.dtype))


def check_dynamic_load(case: Case) -> None:
    data, axis, size = _along(case)
    length = int(case.rng.integers(0, 6))
    expected = _joined(data, axis, _cut(data, axis, 0, length), _zeros(data, axis, max(0, size - length)))
    assert_equal(dynamic_load(data, axis, length), expected, data.dtype)
    assert_equal(dynamic_load(data), data, data.dtype)


def check_dynamic_store(case: Case) -> None:
    """What is stored is what was given, in any type; or it is refused, and ptr is what it was."""
    data, axis, size = _along(case)
    ptr = case.laid_out(case.numbers(data.shape, case.one_of(NUMBERS)), written=True)
    before, length = ptr.copy(), int(case.rng.integers(0, 6))
    try:
        dynamic_store(ptr, data, axis, length)
    except ValueError:
        assert not np.can_cast(data.dtype, ptr.dtype, "safe") or data.dtype == I64
        assert_equal(ptr, before, ptr.dtype)
        return
    expected = _joined(data, axis, _cut(data, axis, 0, length), _cut(before, axis, min(length, size), None))
    assert_equal(ptr, expected, ptr.dtype)


def check_insert(case: Case) -> None:
    data, axis, size = _along(case)
    updates, strict = _updates(case, data, axis, size), case.one_of([True, False])
    n_new = updates.shape[axis]
    most = min(size - n_new, size - 1) if strict else size
    index = int(case.rng.integers(0, most + 1))
    parts = _cut(data, axis, 0, index), _cut(updates, axis, 0, size - index), _cut(data, axis, index + n_new, None)
    assert_equal(insert(data, updates, axis, index, strict=strict), _joined(data, axis, *parts), data.dtype)


def check_window_insert(case: Case) -> None:
    data, axis, size = _along(case)
    updates, index = _updates(case, data, axis, 4), int(case.rng.integers(0, 7))
    parts = _cut(data, axis, 0, index), updates, _zeros(data, axis, max(0, size - index))
    assert_equal(window_insert(data, updates, axis, index), _joined(data, axis, *parts), data.dtype)


def check_window_slice(case: Case) -> None:
    data, axis, size = _along(case)
    window, offset = case.below(size)[0], int(case.rng.integers(0, 7))
    begin, end = (
        (0, offset) if offset < window else (offset - window, offset) if offset < size else (size - window, size)
    )
    part = _cut(data, axis, begin, end)
    assert_equal(window_slice(data, offset, axis, window), part, data.dtype)
    padded = _joined(data, axis, part, _zeros(data, axis, window - (end - begin)))
    assert_equal(window_slice(data, offset, axis, window, padded=True), padded, data.dtype)


def check_nn_pad(case: Case) -> None:
    data, axis, size = _along(case)
    mode = case.one_of(["constant", "edge", "reflect"])
    most = size - 1 if mode == "reflect" else 3
    left, right = (int(case.rng.integers(0, most + 1)) for _ in range(2))
    value = int(case.rng.integers(0, 2))
    places = np.arange(-left, size + right)
    inside = np.where(places < 0, -places, np.where(places >= size, 2 * (size - 1) - places, places))
    inside = inside if mode == "reflect" else np.clip(places, 0, size - 1)
    expected = np.take(data.astype(F64), inside, axis)
    if mode == "constant":
        _cut(expected, axis, 0, left)[...] = value
        _cut(expected, axis, left + size, None)[...] = value
    assert_equal(nn_pad(data, value, axis, (left, right), mode), expected, data.dtype)


def check_token_shift(case: Case) -> None:
    batch, n_tokens, width = case.below(2, 3, 20)
    type, mu_type, h0_type = case.one_of([F32, F16, I8]), case.one_of([F32, F16, I8]), case.one_of([F32, F16])
    x = case.laid_out(case.numbers((batch, n_tokens, width), type))
    mu, h0 = (
        case.laid_out(case.numbers((6, 1, 1, width), mu_type)),
        case.laid_out(case.numbers((batch, 1, width), h0_type)),
    )
    scales = {"x_scale": 0.05, "out_scale": 0.06} if type == I8 else {}
    assert_shifted(x, mu, h0, {**scales, **({"mu_scale": 1 / 127} if mu_type == I8 else {})})


def check_topk_softmax(case: Case) -> None:
    n, width = case.below(3)[0], case.one_of([*range(1, 9), 33, 40, 64])
    spread, gap = case.one_of([20, 200, 1000]), case.one_of([0, 3])
    x = (case.rng.integers(-spread, spread + 1, (n, width + gap)) / 8).astype(case.one_of(FLOATS))[:, :width]
    assert_top(x, case.one_of([1, width, case.below(width)[0]]), case.one_of([True, False]))


ACL = ("f32", "f16", "i32", "int8", "int4", "q8_0", "q4_0")
DTYPES = {"f32": F32, "f16": F16, "i32": I32}
BITS = {"int8": 8, "int4": 4, "q8_0": 8, "q4_0": 4}


def _tensor(case: Case, type: str, shape: tuple[int, ...], size: int) -> tuple[Any, Array | None, Array, int]:
    """A tensor to read with its scales, its numbers in float64, and its group size."""
    if type in DTYPES:
        x = case.laid_out(case.numbers(shape, DTYPES[type], 100))
        return x, None, x.astype(F64), 0
    n = prod(shape) // size
    codes, scales = lattice(case.rng, n, size, BITS[type])
    if type in ("q8_0", "q4_0"):
        stored = _a_part(blocks_of(type, codes, scales).reshape(*shape[:3], -1))
        return Tensor.of(stored, type), None, (codes * scales).reshape(shape), case.one_of([0, 32])
    scales = case.laid_out(scales.astype(F32).reshape(*shape[:3], -1))
    stored = case.laid_out(codes.astype(I8).reshape(shape) if type == "int8" else packed(codes.reshape(shape)))
    codes = stored if type == "int8" else unpacked(stored)
    tensor = stored if type == "int8" else AclTensor(stored, shape)
    return tensor, scales, codes * scales.repeat(size, -1).astype(F64), 0 if size == shape[3] else size


def _shape(case: Case, type: str) -> tuple[tuple[int, ...], int]:
    """A shape, and a group size of its rows."""
    size = 32 if type in ("q8_0", "q4_0") else case.one_of([2, 1, 3, 8])
    return (*case.below(2, 2, 3), size * case.one_of([2, 4] if type == "int4" and size % 2 else [1, 2, 3])), size


def check_get_rows(case: Case) -> None:
    type = case.one_of(ACL)
    shape, size = _shape(case, type)
    tensor, scale, real, group = _tensor(case, type, shape, size)
    a, b, c, d = shape
    ids = case.laid_out(case.rng.integers(0, c, (1, a, b, case.below(3)[0])).astype(np.int32))
    out = case.laid_out(np.zeros((a, b, ids.shape[3], d), np.float32), written=True)
    status, n_bytes, executor = aclnnGetRowsGetWorkspaceSize(tensor, ids, scale, group, out)
    assert status == 0, status
    assert executor is not None
    assert aclnnGetRows(None, n_bytes, executor) == 0
    assert_equal(out, np.take_along_axis(real, ids[0][..., None], axis=2), F32)


def check_cpy(case: Case) -> None:
    """float -> anything, anything -> float."""
    type = case.one_of(ACL)
    shape, size = _shape(case, type)
    if case.one_of([True, False]):
        tensor, scale, real, group = _tensor(case, type, shape, size)
        target = case.laid_out(np.zeros(shape, np.float32), written=True)
        copied(target, tensor, scale, group)
        assert_equal(target, real, F32)
        return
    source_type = case.one_of([F32] if type == "i32" else [F32, F16])
    if type in DTYPES:
        x = case.laid_out(case.numbers(shape, source_type, 100))
        target = case.laid_out(np.zeros(shape, DTYPES[type]), written=True)
        copied(target, x)
        exact = x.astype(F64)
        assert_equal(target, np.trunc(exact) if type == "i32" else exact.astype(target.dtype), target.dtype)
        return
    codes, scales = lattice(case.rng, prod(shape) // size, size, BITS[type])
    x = case.laid_out((codes * scales).astype(source_type).reshape(shape), written=True)
    if type in ("q8_0", "q4_0"):
        blocks = blocks_of(type, codes, scales).reshape(*shape[:3], -1)
        stored = _a_part(np.zeros_like(blocks))
        copied(Tensor.of(stored, type), x, None, 32)
        np.testing.assert_array_equal(stored, blocks)
        return
    wanted = codes.astype(I8).reshape(shape) if type == "int8" else packed(codes.reshape(shape))
    stored = case.laid_out(np.zeros_like(wanted), written=True)
    scale = case.laid_out(np.zeros((*shape[:3], shape[3] // size), np.float32), written=True)
    copied(stored if type == "int8" else AclTensor(stored, shape), x, scale, size)
    np.testing.assert_array_equal(stored, wanted)
    np.testing.assert_array_equal(scale.reshape(-1, 1), scales)


def check_dup(case: Case) -> None:
    type = case.one_of(ACL)
    shape, size = _shape(case, type)
    tensor, _, _, group = _tensor(case, type, shape, size)
    source = tensor.packed if isinstance(tensor, AclTensor) else tensor.view() if isinstance(tensor, Tensor) else tensor
    if isinstance(tensor, Tensor):
        memory = _a_part(np.zeros((*shape[:3], prod(source.shape[3:])), np.uint8))
        target, stored = Tensor.of(memory, type), memory.reshape(source.shape)
    else:
        memory = stored = case.laid_out(np.zeros(source.shape, source.dtype), written=True)
        target = AclTensor(stored, shape) if type == "int4" else stored
    status, n_bytes, executor = aclnnDupGetWorkspaceSize(target, tensor, None, group)
    assert status == 0, status
    assert executor is not None
    assert aclnnDup(None, n_bytes, executor) == 0
    np.testing.assert_array_equal(memory.reshape(source.shape), source)


CHECKS: dict[str, Callable[[Case], None]] = {
    **{name: globals()[f"check_{name}"] for name in rbln.__all__},
    "token_shift": check_token_shift,
    "TopKSoftmax": check_topk_softmax,
    "aclnnGetRows": check_get_rows,
    "aclnnCpy": check_cpy,
    "aclnnDup": check_dup,
}
cases = st.builds(  # up to 2**24 Hypothesis draws integers evenly
    Case, st.integers(0, (1 << 24) - 1), st.integers(0, (1 << 24) - 1), st.sampled_from([*product(LAYOUTS, repeat=3)])
)


@either_engine
@pytest.mark.parametrize("name", CHECKS)
@given(case=cases)
@examples(25)
def test_over_types_and_strides(name: str, case: Case) -> None:
    CHECKS[name](case)


@pytest.mark.conformance
@pytest.mark.parametrize("name", CHECKS)
@given(case=cases)
@examples(10_000)
def test_over_ten_thousand_types_and_strides(name: str, case: Case) -> None:
    CHECKS[name](case)
