"""What tests of the four documents share: arrays of any type and layout, and the documents' algorithms in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ggml_backend_npu.documents.infiniop import TensorDescriptor, TopKSoftmax
from ggml_backend_npu.documents.rwkv import token_shift

Array = NDArray[Any]
F64, F32, F16, BF16 = (np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))
I8, I16, I32, I64 = (np.dtype(d) for d in (np.int8, np.int16, np.int32, np.int64))
FLOATS = [F32, F16, BF16]
NUMBERS = [*FLOATS, F64, I8, I16, I32, I64, np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.bool_)]
LOWEST = float(np.finfo(np.float32).min)
NAN, INF = np.nan, np.inf
ROUNDING = {F32: 4e-6, F16: 6e-4, BF16: 5e-3}
either_engine = pytest.mark.usefixtures("engine")


# how an array lies in memory


def a_part(array: Array) -> Array:
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
    "a part": a_part,
    "apart": _apart,
    "backwards": _backwards,
}
LAYOUTS = {**WRITTEN, "repeated": _repeated}  # which changes the numbers: a reference is made of what it gives


# what is equal


def assert_near(actual: Array, expected: Array, dtype: Any) -> None:
    """As exact as float32 arithmetic of scores of some tens is, rounded once more."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual.astype(F64), expected, ROUNDING[dtype], 6e-8 if dtype == F16 else 1e-9)


def assert_equal(actual: Array, expected: Array, dtype: Any) -> None:
    """The very numbers."""
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual.astype(F64), expected.astype(F64))


# softmax and its tiles


def softmax_of(x: Array, kept: Any = True, sink: Array | None = None, axis: int = -1) -> Array:
    """The document's masked_softmax, MASK_VALUE being -inf, and 0 where nothing is left."""
    s = np.where(kept, x.astype(F64), -INF)
    if sink is not None:
        s = np.concatenate((s, np.broadcast_to(sink.astype(F64), (*s.shape[:-1], 1))), axis=-1)
    largest = s.max(axis, keepdims=True)
    e = np.exp(s - np.where(np.isneginf(largest), 0, largest))
    total = e.sum(axis, keepdims=True)
    output: Array = e / np.where(total == 0, 1, total)
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


# blocks of quants


def lattice(rng: np.random.Generator, n_groups: int, size: int, bits: int) -> tuple[Array, Array]:
    """Codes (n_groups, size) and scales (n_groups, 1) of which float64 knows what quantising their products gives."""
    most = 127 if bits == 8 else 7
    codes = rng.integers(-most, most + 1, (n_groups, size))
    codes[:, rng.integers(size)] = 127 if bits == 8 else -8
    return codes, 2.0 ** rng.integers(-9, 4, (n_groups, 1))


def blocks_of(type: str, codes: Array, scales: Array) -> Array:
    """(n_groups, bytes): float16 scale, then 32 int8, or the codes plus 8 of which the second half are high nibbles."""
    head = scales.astype(F16).view(np.uint8)
    if type == "q8_0":
        return np.hstack([head, codes.astype(np.int8).view(np.uint8)])
    nibbles = (codes + 8).astype(np.uint8)
    return np.hstack([head, nibbles[:, :16] | (nibbles[:, 16:] << 4)])


# token_shift


def shifted(x: Array, mu: Array, h0: Array) -> tuple[Array, Array]:
    """(six outputs, how large what is added up is) in float64."""
    previous = np.concatenate([h0, x[:, :-1]], axis=1)
    mu = mu.reshape(6, 1, 1, -1)
    return x + mu * (previous - x), np.abs(x) + np.abs(mu) * (np.abs(previous) + np.abs(x))


def rounding(dtype: Any, x: Array) -> Array | float:
    """Half the distance of two float16 at x, that of subnormal ones at least; 0 of the other types."""
    return 2.0**-11 * np.abs(x) + 2.0**-25 if dtype == F16 else 0.0


def assert_shifted(x: Array, mu: Array, h0: Array, scales: dict[str, Any]) -> None:
    *mixed, ht = token_shift(x, mu, h0, **scales)
    real = x.astype(F64) * scales.get("x_scale", 1)
    exact, size = shifted(real, mu.astype(F64) * scales.get("mu_scale", 1), h0.astype(F64))
    bound = 1e-6 * size  # of float32: three roundings, and those of the scales
    last: Array | float
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


# TopKSoftmax


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
