"""Every operator of the four documents over random types and strides, against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.acl_tensors import packed, run, unpacked
from kit.documented import (
    F16,
    F32,
    F64,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    LAYOUTS,
    NAN,
    NUMBERS,
    ROUNDING,
    Array,
    a_part,
    assert_equal,
    assert_near,
    assert_shifted,
    assert_top,
    blocks_of,
    causal,
    either_engine,
    lattice,
    softmax_of,
    tile_of,
)
from kit.nodes import dims
from kit.support import examples

from ggml_backend_npu import Tensor
from ggml_backend_npu.documents import rbln
from ggml_backend_npu.documents.aclnn import AclTensor
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
            least, most = -100 if dtype.kind == "i" else 0, 2 if dtype.kind == "b" else 100
            drawn: Array = self.rng.integers(least, most, shape)
        else:
            drawn = self.rng.standard_normal(shape) * spread
        return drawn.astype(dtype)


# the softmax family


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


# what moves data


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


# token_shift, TopKSoftmax


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


# get_rows, cpy, dup


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
        stored = a_part(blocks_of(type, codes, scales).reshape(*shape[:3], -1))
        return Tensor.of(stored, type), None, (codes * scales).reshape(shape), case.one_of([0, 32])
    scales = case.laid_out(scales.astype(F32).reshape(*shape[:3], -1))
    stored = case.laid_out(codes.astype(I8).reshape(shape) if type == "int8" else packed(codes.reshape(shape)))
    codes = stored if type == "int8" else unpacked(stored)
    tensor = stored if type == "int8" else AclTensor(stored, dims(shape))
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
    run("aclnnGetRows", tensor, ids, scale, group, out)
    assert_equal(out, np.take_along_axis(real, ids[0][..., None], axis=2), F32)


def check_cpy(case: Case) -> None:
    """float -> anything, anything -> float."""
    type = case.one_of(ACL)
    shape, size = _shape(case, type)
    if case.one_of([True, False]):
        tensor, scale, real, group = _tensor(case, type, shape, size)
        target = case.laid_out(np.zeros(shape, np.float32), written=True)
        run("aclnnCpy", target, tensor, scale, group)
        assert_equal(target, real, F32)
        return
    source_type = case.one_of([F32] if type == "i32" else [F32, F16])
    if type in DTYPES:
        x = case.laid_out(case.numbers(shape, source_type, 100))
        target = case.laid_out(np.zeros(shape, DTYPES[type]), written=True)
        run("aclnnCpy", target, x, None, 0)
        exact = x.astype(F64)
        assert_equal(target, np.trunc(exact) if type == "i32" else exact.astype(target.dtype), target.dtype)
        return
    codes, scales = lattice(case.rng, prod(shape) // size, size, BITS[type])
    x = case.laid_out((codes * scales).astype(source_type).reshape(shape), written=True)
    if type in ("q8_0", "q4_0"):
        blocks = blocks_of(type, codes, scales).reshape(*shape[:3], -1)
        stored = a_part(np.zeros_like(blocks))
        run("aclnnCpy", Tensor.of(stored, type), x, None, 32)
        np.testing.assert_array_equal(stored, blocks)
        return
    wanted = codes.astype(I8).reshape(shape) if type == "int8" else packed(codes.reshape(shape))
    stored = case.laid_out(np.zeros_like(wanted), written=True)
    scale = case.laid_out(np.zeros((*shape[:3], shape[3] // size), np.float32), written=True)
    run("aclnnCpy", stored if type == "int8" else AclTensor(stored, dims(shape)), x, scale, size)
    np.testing.assert_array_equal(stored, wanted)
    np.testing.assert_array_equal(scale.reshape(-1, 1), scales)


def check_dup(case: Case) -> None:
    type = case.one_of(ACL)
    shape, size = _shape(case, type)
    tensor, _, _, group = _tensor(case, type, shape, size)
    source = tensor.packed if isinstance(tensor, AclTensor) else tensor.view() if isinstance(tensor, Tensor) else tensor
    target: Any
    if isinstance(tensor, Tensor):
        memory = a_part(np.zeros((*shape[:3], prod(source.shape[3:])), np.uint8))
        target, stored = Tensor.of(memory, type), memory.reshape(source.shape)
    else:
        memory = stored = case.laid_out(np.zeros(source.shape, source.dtype), written=True)
        target = AclTensor(stored, dims(shape)) if type == "int4" else stored
    run("aclnnDup", target, tensor, None, group)
    np.testing.assert_array_equal(memory.reshape(source.shape), source)


# all of them


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


@pytest.mark.daily(3)
@pytest.mark.conformance
@pytest.mark.parametrize("name", CHECKS)
@given(case=cases)
@examples(10_000)
def test_over_ten_thousand_types_and_strides(name: str, case: Case) -> None:
    CHECKS[name](case)
