"""Which differences from a reference are right: one rule for every op.

Most ops have to give the same bytes. Those with intermediate rounding have a bound (`Op.bound`) on the error against
the reference or against the exact value: ggml's CPU is itself inexact in places (it quantises the other source of
quantised weights, and takes GELU from a table of float16), and a kernel that is closer to the exact value is right. So
is a row that differs from the reference's by a hundredth of the reference's own error: the two are equally near to the
exact value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.backend.fusion import FUSIONS
from ggml_backend_npu.ggml.lib import ggml
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Exact
from ggml_backend_npu.registry.exact import values
from ggml_backend_npu.user_texts import TextError, read_text, read_toml
from graph_runner.judging import noise
from graph_runner.judging.compare import Comparison, compare
from graph_runner.judging.spoilt import defined
from quant import type_names
from quant.errors import UserError

GPU = "gpu"

_MOST = 1e300  # of a bound, which a float can hold

_EVERY = "*"  # in a file, every op that has a bound

_PRESETS = {GPU: Path(__file__).with_name("gpu.toml")}
_OUTLIER = 64  # how many times the mean of its row the squared error of an element may be
_AS_NEAR = 1e-2**2  # part of the reference's own error: by less, a row is as near to the exact value as the reference's
_REFERENCE, _TRUTH = "the reference", "the exact value"
_SMALLEST = float(np.finfo(np.float32).tiny)  # what is below may be taken for 0

# bits of the mantissa, least exponent and what is rounded to infinity, of types whose rounding is more than the bounds
_ROUNDING = {"f16": (10, -14, 65520.0), "bf16": (7, -126, 3.3961775e38)}

Bounds = Mapping[str, float]


class ToleranceError(UserError):
    """A tolerance file cannot be used. The message is one line that names the file, the key and its value."""


class Rules:
    """Which differences from a reference are right, by op and type.

    extra  a TOML file in the form of gpu.toml, whose values replace the built-in ones; or "gpu", for devices that
           compute in half floats
    ops    ops that the file may name besides those that have a bound

    are_given  whether a user has given a file

    Raises ToleranceError for a file that cannot be used.
    """

    def __init__(self, extra: str | Path | None = None, ops: Iterable[str] = OWN) -> None:
        self._table: dict[str, Bounds] = {name: op.bound for name, op in OWN.items() if op.bound}
        self._table |= {fusion.name: {"*": fusion.bound} for fusion in FUSIONS if fusion.bound}
        self.are_given = extra is not None
        if extra is not None:
            path = _PRESETS.get(str(extra), Path(extra))
            added = _read(path)
            every = added.pop(_EVERY, None)
            if every is not None:
                self._table = dict.fromkeys(self._table, every)
            _check_names(path, added, {*self._table, *ops, *(fusion.name for fusion in FUSIONS)})
            for op, bounds in added.items():
                self._table[op] = {**self._table.get(op, {}), **bounds}

    def allows(self, node: Node, expected: Tensor, actual: Tensor, found: Comparison) -> bool:
        """Whether a result whose bytes differ from the reference's is right.

        node   its sources hold what they held before it ran; dst is not read
        expected, actual  the reference's result and the device's, like node.dst, over memory of their own
        found  compare(expected, actual)
        """
        if found.outside or _gaps_differ(expected, actual, found):
            return False
        op = OWN.get(node.op)
        if op is not None and op.order is not None:
            (_, *sources), keywords = op.arguments(node)
            return not op.lacks_sources(node) and op.order[0](actual, *sources, **keywords)
        given, actual = actual, defined(node, expected, actual)
        if actual is not given and compare(expected, actual):
            return True
        bound = self.bound(node.op, type_of(node))
        return bound > 0 and any(measure.judged(bound) for measure in _measures(node, expected, actual))

    def judged(self, node: Node, expected: Tensor, actual: Tensor) -> Judged | None:
        """Returns the row that decides whether a result is right: by the first measure that allows it, since the others
        cost more; if none does, by the one in which it is nearest to its limit. None for an op that has no bound."""
        bound = self.bound(node.op, type_of(node))
        if bound <= 0:
            return None
        found = []
        for measure in _measures(node, expected, actual):
            found.append(measure.judged(bound))
            if found[-1]:
                return found[-1]
        return min(found, key=lambda judged: judged.error / judged.limit)

    def bound(self, op: str, type: str) -> float:
        """Returns the allowed normalised mean squared error; 0 if every byte has to be the same."""
        bounds = self._table.get(op, {})
        return bounds.get(type, bounds.get("*", 0.0))

    @property
    def ops(self) -> frozenset[str]:
        """The names of ops and fusions that have bounds."""
        return frozenset(self._table)

    def describe(self, op: str, type: str) -> str:
        """Returns in words the rule for an op's nodes of a type, as given by `type_of`."""
        words = free_order(op)
        if words is not None:
            return words
        bound = self.bound(op, type)
        return f"within NMSE {bound:g} of the reference or of the exact value" if bound else "same bytes"


def type_of(node: Node) -> str:
    """Returns the type that selects a bound: that of the first source; for attention that of v, in which the CPU adds
    it up."""
    op = OWN.get(node.op)
    source = None if op is None or op.bound_by is None else _source(node, op.bound_by)
    return (source or next(filter(None, node.src), node.dst)).type


def free_order(op: str) -> str | None:
    """For an op that has more than one right result, returns in words which those are; None for any other op."""
    own = OWN.get(op)
    return None if own is None or own.order is None else own.order[1]


def _source(node: Node, name: str) -> Tensor | None:
    place = OWN[node.op].sources.index(name)
    return node.src[place] if place < len(node.src) else None


@dataclass(frozen=True)
class Judged:
    """The row of a result that is furthest off, in terms of what it may be off. Falsy if that is too much.

    row      its place among the rows of the result, of which there are n_rows
    error    normalised mean squared, as in `errors`
    limit    what it may be: the op's bound, or a part of the reference's own error in that row if that is more
    against  "the reference" or "the exact value"
    """

    row: int
    n_rows: int
    error: float
    limit: float
    against: str

    def __bool__(self) -> bool:
        return self.error <= self.limit


@dataclass(frozen=True)
class _Measure:
    """The errors of the rows of a result, and for each row what it may be off whatever the bound is."""

    against: str
    rows: Exact
    as_near: Exact | float = 0.0

    def judged(self, bound: float) -> Judged:
        limits = np.maximum(bound, np.broadcast_to(self.as_near, self.rows.shape))
        row = int(np.argmax(self.rows / limits)) if self.rows.size else 0
        error, limit = (float(each[row]) if each.size else 0.0 for each in (self.rows, limits))
        return Judged(row, self.rows.size, error, limit or bound, self.against)


def errors(node: Node, expected: Tensor, actual: Tensor) -> Iterator[float]:
    """Yields the errors of a result: against the reference, against the exact value, and then both relative to the size
    of the terms, for terms that cancel. The smallest one counts. Those that cost more come later.

    An error is a normalised mean squared error of the worst row: the mean over the row of squared differences, each
    relative to the element or to the row's median if that is larger. A single element counts with a 64th of its own, if
    that is more. inf if one value is not finite and the other is not the same, but
    in a sum that overflows.
    """
    for measure in _measures(node, expected, actual):
        yield float(measure.rows.max(initial=0.0))


def _measures(node: Node, expected: Tensor, actual: Tensor) -> Iterator[_Measure]:
    """Yields the errors of `errors` row by row."""
    a, e = values(actual), values(expected)
    yield _Measure(_REFERENCE, _errors(node, a, e, np.abs(e)))
    truth = noise.exact(node)
    if truth is None:
        return
    given, free = truth, _free(node, e, a, truth)
    if free.any():
        a, e, truth = (np.where(free, 0.0, x) for x in (a, e, truth))
    rounding = half_ulp(a, actual.type)
    yield _Measure(_TRUTH, _errors(node, a, truth, np.abs(truth), rounding))
    size = np.where(free, 0.0, noise.size(node, given))
    own = _parts(node, e, truth, np.fmax(np.abs(e), size), half_ulp(e, expected.type)).mean(axis=-1)
    as_near = _AS_NEAR * np.where(np.isfinite(own), own, 0.0)
    yield _Measure(_REFERENCE, _errors(node, a, e, np.fmax(np.abs(e), size)), as_near)
    yield _Measure(_TRUTH, _errors(node, a, truth, np.fmax(np.abs(truth), size), rounding))


def _free(node: Node, expected: Exact, actual: Exact, truth: Exact) -> NDArray[np.bool_]:
    """Which elements of a result are right although they are not finite in it or in the reference's: they are as the
    reference or as the exact value says, or of a sum that overflows."""
    odd: NDArray[np.bool_] = ~(np.isfinite(expected) & np.isfinite(actual))
    if odd.any():
        overflows = noise.overflows(node, truth) & (np.isfinite(truth) | np.isnan(actual))
        odd &= _same(actual, expected) | _same(actual, truth) | overflows
    return odd


def _same(x: Exact, y: Exact) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (x == y) | (np.isnan(x) & np.isnan(y))
    return same


def _errors(node: Node, actual: Exact, right: Exact, size: Exact, rounding: Exact | float = 0.0) -> Exact:
    """Returns the errors of the rows as in `errors`, with `size` in place of the element; differences count only beyond
    `rounding`."""
    parts = _parts(node, actual, right, size, rounding)
    found = np.maximum(parts.mean(axis=-1), parts.max(axis=-1, initial=0.0) / _OUTLIER)
    return np.where(np.isnan(found), math.inf, found)


def _parts(node: Node, actual: Exact, right: Exact, size: Exact, rounding: Exact | float) -> Exact:
    """Returns the squared differences of each row's elements, relative to `size` or to its median in the row."""
    width = _row(node, right)
    with np.errstate(all="ignore"):
        limit = _ROUNDING.get(node.dst.type, (0, 0, float(np.finfo(np.float32).max)))[2]
        right = np.where(np.abs(right) >= limit, np.copysign(math.inf, right), right)
        far = np.maximum(np.abs(actual - right) - rounding - _SMALLEST, 0.0)
        off = np.where(_same(actual, right), 0.0, far).reshape(-1, width)
        rows = np.where(np.isfinite(size), size, 0.0).reshape(-1, width)
        scale = np.maximum(rows, np.median(rows, axis=-1, keepdims=True))
        return np.where(off == 0, 0.0, np.square(off / scale))


def _row(node: Node, result: Exact) -> int:
    """Returns how many elements are judged together: a row; or a head, if a row holds both the tokens' results and
    states."""
    op = OWN.get(node.op)
    x = None if op is None or op.judged_by is None else _source(node, op.judged_by)
    return max(1, x.ne[0] if x is not None else result.shape[-1])


def half_ulp(x: Exact, type: str) -> Exact | float:
    """Returns the largest distance of a number from its rounded value; 0 for types whose rounding is within the
    bounds."""
    if type not in _ROUNDING:
        return 0.0
    mantissa, least, _ = _ROUNDING[type]
    _, exponents = np.frexp(x)
    half: Exact = np.ldexp(0.5, np.maximum(exponents - 1, least) - mantissa)
    return half


def _gaps_differ(expected: Tensor, actual: Tensor, found: Comparison) -> bool:
    """Whether bytes between the elements differ."""
    if found.where is None:
        return True
    if expected.is_contiguous():
        return False
    e, a = (np.ascontiguousarray(tensor.view()).view(np.uint8) for tensor in (expected, actual))
    return int(np.count_nonzero(e != a)) != found.n_different


# tables


def _read(path: Path) -> dict[str, Bounds]:
    try:
        table = read_toml(read_text(path))
    except (TextError, ValueError) as error:
        raise ToleranceError(f"tolerances {str(path)!r}: {error}") from None
    return {op: _bounds(path, op, bounds) for op, bounds in table.items()}


def _bounds(path: Path, op: str, bounds: Any) -> Bounds:
    if not isinstance(bounds, dict):
        raise ToleranceError(f"tolerances {str(path)!r}: {op} = {bounds!r}: must be a table of types")
    for type, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound < _MOST:
            raise ToleranceError(f"tolerances {str(path)!r}: {op}.{type} = {bound!r}: must be a number of 0 or more")
        if type != "*" and type not in type_names():
            raise ToleranceError(
                f"tolerances {str(path)!r}: {op}.{type}: no such type; known: {' '.join(type_names())}"
            )
    return {type: float(bound) for type, bound in bounds.items()}


def _check_names(path: Path, table: dict[str, Bounds], known: set[str]) -> None:
    for op in table:
        words = free_order(op)
        if words is not None:
            raise ToleranceError(f"tolerances {str(path)!r}: {op} has no bound: its rule is {words!r}")
        if op not in known and op not in ggml().op_names:
            raise ToleranceError(f"tolerances {str(path)!r}: {op}: no such op")
