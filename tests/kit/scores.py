"""Scores, masks, sinks and indices to try the operators of RBLN's document with, and what these give, row by row."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from kit.documented import BF16, F16, F32, FLOATS, LOWEST, Array


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
        columns = min(size, shape[-1])
        kept[n, ..., :columns] = band[first : first + n_rows, :columns]
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


any_layout = st.sampled_from([*LAYOUTS])
any_float = st.sampled_from(FLOATS)
any_mask = st.sampled_from([np.dtype(np.bool_), F32, F16, BF16])
any_sink = st.sampled_from(["none", "f32", "f16"])
any_index = st.sampled_from(["int", "array", "each"])
