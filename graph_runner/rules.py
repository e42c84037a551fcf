"""Which differences from a reference are right: one rule for every op.

Most ops have to give the same bytes. Those that round on the way have a bound (`Op.bound`) of the error against the
reference or against the exact value: ggml's CPU is itself inexact in places (it quantises the other source of
quantised weights, and takes GELU from a table of float16), and a kernel that is closer to the truth is right.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.abi.lib import ggml
from ggml_backend_npu.checks import Exact
from ggml_backend_npu.fusion import FUSIONS
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.exact import values
from ggml_backend_npu.ops.movers import raw
from graph_runner import noise
from graph_runner.compare import Comparison
from quant import type_names
from quant.errors import UserError

GPU = "gpu"

_EVERY = "*"  # in a file, every op that has a bound

_PRESETS = {GPU: Path(__file__).with_name("gpu.toml")}
_OUTLIER = 64  # how many times the mean of its row the squared error of an element may be
_SMALLEST = float(np.finfo(np.float32).tiny)  # what is below may be taken for 0

# bits of the mantissa, least exponent and what is rounded to infinity, of types whose rounding is more than the bounds
_ROUNDING = {"f16": (10, -14, 65520.0), "bf16": (7, -126, 3.3961775e38)}

Bounds = Mapping[str, float]


class ToleranceError(UserError):
    """A table that cannot be used: one line that names the file, the key and its value."""


class Rules:
    """Which differences from a reference are right: by op and type.

    extra  a TOML file of the form of gpu.toml, of which each value takes the place of ours; or "gpu", for devices that
           compute in half floats
    ops    that it may name besides those that have a bound

    Raises ToleranceError for a file that is none.
    """

    def __init__(self, extra: str | Path | None = None, ops: Iterable[str] = OWN) -> None:
        self._table: dict[str, Bounds] = {name: op.bound for name, op in OWN.items() if op.bound}
        self._table |= {fusion.name: {"*": fusion.bound} for fusion in FUSIONS if fusion.bound}
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
        """Whether a result whose bytes are not the reference's is right.

        node              its sources hold what they held before it ran; dst is not read
        expected, actual  the reference's result and the device's, like node.dst, over memory of their own
        found             compare(expected, actual)
        """
        if found.outside or _gaps_differ(expected, actual, found):
            return False
        op = OWN.get(node.op)
        if op is not None and op.order is not None:
            (_, *sources), keywords = op.arguments(node)
            return not op.lacks_sources(node) and op.order[0](actual, *sources, **keywords)
        bound = self.bound(node.op, type_of(node))
        return bound > 0 and any(error <= bound for error in errors(node, expected, actual))

    def bound(self, op: str, type: str) -> float:
        """The normalised mean squared error that is allowed; 0 where every byte has to be the same."""
        bounds = self._table.get(op, {})
        return bounds.get(type, bounds.get("*", 0.0))

    @property
    def ops(self) -> frozenset[str]:
        """What has bounds."""
        return frozenset(self._table)

    def describe(self, op: str, type: str) -> str:
        """The rule of an op's nodes of a type, which is that of `type_of`, in words."""
        words = free_order(op)
        if words is not None:
            return words
        bound = self.bound(op, type)
        return f"within NMSE {bound:g} of the reference or of the exact value" if bound else "same bytes"


def type_of(node: Node) -> str:
    """The type that a bound goes by: that of the first source; of attention that of v, in which the CPU adds it up."""
    op = OWN.get(node.op)
    source = None if op is None or op.bound_by is None else _source(node, op.bound_by)
    return (source or next(filter(None, node.src), node.dst)).type


def free_order(op: str) -> str | None:
    """Of an op that has more than one right result, which those are, in words; None for any other op."""
    own = OWN.get(op)
    return None if own is None or own.order is None else own.order[1]


def _source(node: Node, name: str) -> Tensor | None:
    place = OWN[node.op].sources.index(name)
    return node.src[place] if place < len(node.src) else None


def errors(node: Node, expected: Tensor, actual: Tensor) -> Iterator[float]:
    """How far a result is from the reference, and from the exact value; then both again, where the terms are large that
    cancel: the least of these counts. Whatever costs more comes later.

    A normalised mean squared error: the mean over a row, of the largest row, of squared differences in parts of the
    element, or of the row's median where that is larger. A single element counts by a 64th of its own, if that is more.
    inf where one is no finite number and the other not the same.
    """
    a, e = values(actual), values(expected)
    yield _error(node, a, e, np.abs(e))
    truth = noise.exact(node)
    if truth is None:
        return
    rounding = _half_ulp(a, actual.type)
    yield _error(node, a, truth, np.abs(truth), rounding)
    size = noise.size(node, truth)
    yield _error(node, a, e, np.fmax(np.abs(e), size))
    yield _error(node, a, truth, np.fmax(np.abs(truth), size), rounding)


def _error(node: Node, actual: Exact, right: Exact, size: Exact, rounding: Exact | float = 0.0) -> float:
    """As `errors` says, with `size` in place of the element; of the difference only what is more than `rounding`."""
    width = _row(node, right)
    with np.errstate(all="ignore"):
        limit = _ROUNDING.get(node.dst.type, (0, 0, float(np.finfo(np.float32).max)))[2]
        right = np.where(np.abs(right) >= limit, np.copysign(math.inf, right), right)
        same = (actual == right) | (np.isnan(actual) & np.isnan(right))
        off = np.where(same, 0.0, np.maximum(np.abs(actual - right) - rounding - _SMALLEST, 0.0)).reshape(-1, width)
        rows = np.where(np.isfinite(size), size, 0.0).reshape(-1, width)
        scale = np.maximum(rows, np.median(rows, axis=-1, keepdims=True))
        parts = np.where(off == 0, 0.0, np.square(off / scale))
        found = float(np.maximum(parts.mean(axis=-1), parts.max(axis=-1, initial=0.0) / _OUTLIER).max(initial=0.0))
    return found if found == found else math.inf


def _row(node: Node, result: Exact) -> int:
    """How many elements are judged together: a row; where what tokens gave and states lie in one, those of a head."""
    op = OWN.get(node.op)
    x = None if op is None or op.judged_by is None else _source(node, op.judged_by)
    return max(1, x.ne[0] if x is not None else result.shape[-1])


def _half_ulp(x: Exact, type: str) -> Exact | float:
    """How far a number may be from one that is rounded to it; 0 for types whose rounding the bounds hold."""
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
    e, a = (np.ascontiguousarray(raw(tensor)).view(np.uint8) for tensor in (expected, actual))
    return int(np.count_nonzero(e != a)) != found.n_different


# tables


def _read(path: Path) -> dict[str, Bounds]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ToleranceError(f"tolerances {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ToleranceError(f"tolerances {str(path)!r}: {error}") from None
    return {op: _bounds(path, op, bounds) for op, bounds in table.items()}


def _bounds(path: Path, op: str, bounds: Any) -> Bounds:
    if not isinstance(bounds, dict):
        raise ToleranceError(f"tolerances {str(path)!r}: {op} = {bounds!r}: must be a table of types")
    for type, bound in bounds.items():
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound) or bound < 0:
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
