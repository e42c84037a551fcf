"""Running error analysis: values in float64, each with a bound of what float32 arithmetic may have made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

U32, U16, UBF16 = 2.0**-24, 2.0**-11, 2.0**-8  # roundoff, to nearest
TINY32, TINY16 = 2.0**-126, 2.0**-24  # denormals may be flushed to zero; of f16 they are not
LARGE32, LARGE16 = 3.4028235e38, 65504.0
FUNCTION = 8 * U32  # exp, tanh, ... of a library or of vector code: a few units in the last place


def several(n: float) -> float:
    """How many roundings n of them add up to: all, or but for a chance of 1e-10, 7 sqrt(n) (Hoeffding)."""
    return min(n, 7 * np.sqrt(n))


def partial(total: np.ndarray, most: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """How large the partial sums of terms are: at most the sum of their magnitudes; in an order that has nothing to do
    with their signs, no more than 7 roots of their squares' sum beyond the total."""
    return np.minimum(most, np.abs(total) + 7 * np.sqrt(squares))


def usual_partial(total: np.ndarray, most: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """The root of the mean square of the partial sums of terms, which grow evenly: those of a random walk that ends at
    the total. How far they stray from a straight line is a Brownian bridge, whose mean square is below 4.7 but for a
    chance of 1e-10."""
    return np.minimum(most / np.sqrt(3), np.abs(total) / np.sqrt(3) + np.sqrt(4.7 * squares))


@dataclass
class B:
    """Values and bounds of their errors; arrays of one shape. An infinite bound: nothing is known."""

    v: np.ndarray
    e: np.ndarray
    __array_ufunc__ = None  # an array leaves arithmetic with one to it

    @staticmethod
    def of(x: B | np.ndarray | float) -> B:
        if isinstance(x, B):
            return x
        v = np.asarray(x, np.float64)
        return B(v, np.zeros(v.shape))

    def rounded(self, u: float = U32, tiny: float = TINY32, large: float = LARGE32) -> B:
        """After one rounding, of at most half a unit in the last place: u of the power of two below. An exact value
        that the type has is not rounded."""
        with np.errstate(all="ignore"):
            size = np.ldexp(1.0, np.frexp(np.abs(self.v) + self.e)[1] - 1)
            unit = np.maximum(2 * u * size, TINY16 if large == LARGE16 else 0.0)  # in the last place
            is_kept = (self.e == 0) & (np.abs(self.v) >= TINY32) & (np.fmod(self.v, unit) == 0)
            e = self.e + np.where((np.abs(self.v) + self.e > 0) & ~is_kept, u * size + tiny, 0.0)
            e = np.where(np.isnan(self.v) | np.isnan(e), np.inf, e)
            gone = np.isfinite(self.v) & (np.abs(self.v) + self.e >= large)
        return B(self.v, np.where(gone, np.inf, e))

    def to_f16(self) -> B:
        return self.rounded(U16, TINY16, LARGE16)

    def __add__(self, other: B | np.ndarray | float) -> B:
        other = B.of(other)
        with np.errstate(all="ignore"):
            return B(self.v + other.v, self.e + other.e).rounded(tiny=0.0)

    def __neg__(self) -> B:
        return B(-self.v, self.e)

    def __sub__(self, other: B | np.ndarray | float) -> B:
        return self + -B.of(other)

    def __mul__(self, other: B | np.ndarray | float) -> B:
        other = B.of(other)
        with np.errstate(all="ignore"):
            e = _times(np.abs(self.v), other.e) + _times(np.abs(other.v), self.e) + _times(self.e, other.e)
            return B(self.v * other.v, e).rounded()

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: np.ndarray | float) -> B:
        return -self + other

    def reciprocal(self) -> B:
        with np.errstate(all="ignore"):
            low = np.abs(self.v) - self.e
            e = np.where(low > 0, _times(1 / np.abs(self.v), self.e / low), np.inf)
            return B(1 / self.v, e).rounded()

    def __truediv__(self, other: B | np.ndarray | float) -> B:
        return self * B.of(other).reciprocal()

    def __getitem__(self, key: Any) -> B:
        return B(self.v[key], self.e[key])

    def reshape(self, *shape: int) -> B:
        return B(self.v.reshape(*shape), self.e.reshape(*shape))

    def sum(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False, u: float = U32) -> B:
        """Added up in float32, in any order."""
        with np.errstate(all="ignore"):
            v = self.v.sum(axis, keepdims=keepdims)
            n = self.v.size // max(v.size, 1)
            most = (np.abs(self.v) + self.e).sum(axis, keepdims=keepdims)
            squares = np.square(np.abs(self.v) + self.e).sum(axis, keepdims=keepdims)
            e = self.e.sum(axis, keepdims=keepdims) + several(n) * u * partial(v, most, squares)
            return B(v, e).rounded(tiny=0.0)

    def max(self, axis: int, keepdims: bool = True) -> B:
        return B(self.v.max(axis, keepdims=keepdims), self.e.max(axis, keepdims=keepdims))

    def exp(self) -> B:
        with np.errstate(all="ignore"):
            v = np.exp(self.v)
            e = _times(v, np.expm1(self.e) + FUNCTION)
            e = np.where(self.v == -np.inf, 0.0, e)
        return B(v, e).rounded(tiny=2 * TINY32)

    def sqrt(self) -> B:
        with np.errstate(all="ignore"):
            v = np.sqrt(self.v)
            low = np.sqrt(np.maximum(self.v - self.e, 0))
            return B(v, np.maximum(np.sqrt(self.v + self.e) - v, v - low)).rounded()

    def log(self) -> B:
        with np.errstate(all="ignore"):
            low = self.v - self.e
            v = np.log(self.v)
            e = np.where(low > 0, np.log1p(self.e / low), np.inf) + FUNCTION * np.abs(v)
            return B(v, e).rounded()

    def smooth(self, f: object, slope: float | np.ndarray) -> B:
        """A function of a library, whose slope is nowhere above `slope`."""
        with np.errstate(all="ignore"):
            v = f(self.v)  # type: ignore[operator]
            return B(v, slope * self.e + FUNCTION * np.abs(v)).rounded()

    def sigmoid(self) -> B:
        return ((-self).exp() + 1.0).reciprocal()

    def with_error(self, e: np.ndarray | float) -> B:
        return B(self.v, self.e + e)


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * b, with 0 * inf = 0."""
    return np.where((a == 0) | (b == 0), 0.0, a * b)


def exact(x: np.ndarray | float) -> B:
    return B.of(x)


def where(condition: np.ndarray, a: B | np.ndarray | float, b: B | np.ndarray | float) -> B:
    a, b = B.of(a), B.of(b)
    return B(np.where(condition, a.v, b.v), np.where(condition, a.e, b.e))


def concatenated(parts: list[B], axis: int = 0) -> B:
    return B(np.concatenate([p.v for p in parts], axis), np.concatenate([p.e for p in parts], axis))


def dot(a: np.ndarray, b: B | np.ndarray, spec: str, roundings: float | None = None) -> B:
    """einsum of exact a with b, added up in float32: n products.

    roundings  of a sum, if they are not n
    """
    b = B.of(b)
    with np.errstate(all="ignore"):
        v = np.einsum(spec, a, b.v, optimize=True)
        most = np.einsum(spec, np.abs(a), np.abs(b.v) + b.e, optimize=True)
        squares = np.einsum(spec, a * a, np.square(np.abs(b.v) + b.e), optimize=True)
        carried = np.einsum(spec, np.abs(a), b.e, optimize=True)
        n: float = 1
        names, out = spec.split("->")
        first = names.split(",")[0]
        for name, size in zip(first, a.shape, strict=True):
            n *= size if name not in out else 1
        n = n if roundings is None else roundings
        rounded = several(n) * usual_partial(v, most, squares) + np.sqrt(squares)
        return B(v, carried + U32 * rounded).rounded()
