"""A node without rounding: its value in float64 by its op's formula, the size of the numbers that are rounded on the
way to it, and how much larger a result's error is than the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Node, Op, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Exact
from ggml_backend_npu.registry.entry import KernelError
from ggml_backend_npu.registry.exact import values

_STEP = 2.0**-20  # by which a source's numbers are moved
_PROBES = 3
_INTEGERS = ("i8", "i16", "i32", "i64")
_LARGEST = float(np.finfo(np.float32).max)


def exact(node: Node) -> Exact | None:
    """Computes the node from its sources in float64, (ne3, ne2, ne1, ne0); None for an op that is not known here.

    The sources are taken as they are, rounded or quantised. The result is not rounded to dst's type. Also None for a
    node that is not as ggml makes them.
    """
    op = OWN.get(node.op)
    if op is None or op.lacks_sources(node):
        return None
    return _evaluated(op, node, partial(_defined, op, node) if op.wide else op.exact)


def size(node: Node, truth: Exact) -> Exact:
    """Returns how large the numbers are that are rounded on the way to each element of truth, which is `exact` of the
    node.

    If the terms of a sum cancel, or a function is steep, an intermediate rounding is large relative to the element. So
    the numbers of each source are moved up or down by a small step, and the element's movement, divided by that step,
    is its size. For some ops the terms themselves are used, since moving the sources does not show their size.
    """
    squares = np.zeros_like(truth)
    with np.errstate(all="ignore"):
        for place in range(len(node.src)):
            for source in _moved(node, place):
                moved = exact(replace(node, src=(*node.src[:place], source, *node.src[place + 1 :])))
                if moved is not None:
                    squares += np.nan_to_num(np.square((moved - truth) / _STEP), nan=0, posinf=0, neginf=0)
    found: Exact = np.sqrt(squares / _PROBES)
    op = OWN.get(node.op)
    if op is None:
        return found
    terms = _products(node) if op.products else _evaluated(op, node, op.size)
    return found if terms is None else np.fmax(found, terms)


def overflows(node: Node, truth: Exact) -> NDArray[np.bool_]:
    """Which elements of truth, which is `exact` of the node, are sums whose finite terms may become too large for
    float32: their order, and whether a product is rounded before it is added, decide what becomes of them: a number, an
    infinity or NaN; beside a term that is infinite, that infinity or NaN."""
    op, terms = OWN.get(node.op), None
    if op is not None and (op.products or op.weights):
        terms = exact(replace(node, src=tuple(map(_magnitudes, node.src))))
    elif op is not None:
        terms = _evaluated(op, node, op.largest)
    if terms is None:
        return np.zeros(truth.shape, np.bool_)
    too_large: NDArray[np.bool_] = (terms > _LARGEST) & np.isfinite(terms)
    return too_large


def _magnitudes(source: Tensor | None) -> Tensor | None:
    """The finite numbers of a source, without their signs."""
    if source is None or source.type in _INTEGERS:
        return source
    x = np.abs(values(source))
    return Tensor.of(np.where(np.isinf(x), 0, x), "f64", source.name)


def _products(node: Node) -> Exact | None:
    """For sums of products with one factor from each source: returns how large the products are together, as
    independent ones."""
    squares = (x if x is None else Tensor.of(np.square(values(x)), "f64", x.name) for x in node.src)
    found = exact(replace(node, src=tuple(squares)))
    return None if found is None else np.sqrt(np.fmax(found, 0))


def _moved(node: Node, place: int) -> Iterator[Tensor]:
    """Yields a source, as float64, `_PROBES` times with its numbers made larger or smaller by `_STEP` of themselves.

    In the first two, neighbours that move alike in one move apart in the other: their difference is not taken for small
    by chance. Weights do not move, since the other source's movement shows all products; nor do integers, except
    positions.
    """
    op, source = OWN.get(node.op), node.src[place]
    of_weights = op is not None and op.weights and place == 0
    stays = source is not None and source.type in _INTEGERS and not (op is not None and op.moved)
    if source is None or of_weights or stays:
        return
    x, signs = values(source), np.random.default_rng(place)
    first, last = (signs.choice([-1.0, 1.0], x.shape) for _ in range(2))
    turned = first * (-1.0) ** sum(np.ogrid[tuple(slice(n) for n in x.shape)])
    for up_or_down in (first, turned, last):
        yield Tensor.of(x * (1 + _STEP * up_or_down), "f64", source.name)


def _evaluated(op: Op, node: Node, formula: Callable[..., Exact | None] | None) -> Exact | None:
    if formula is None:
        return None
    (_, *sources), keywords = op.arguments(node)
    try:
        with np.errstate(all="ignore"):
            result = formula(*sources, **keywords)
    except (ValueError, IndexError, AttributeError, ArithmeticError, KernelError):
        return None
    return None if result is None or result.shape != node.dst.ne[::-1] else result


def _defined(op: Op, node: Node, *sources: Tensor | None, **_: object) -> Exact:
    """Computes the node by the op's definition, which takes float64 as well as float32."""
    dst = Tensor.of(np.empty(node.dst.ne[::-1]), "f64")
    wide = (x if x is None or x.type == "i32" else Tensor.of(values(x), "f64") for x in sources)
    op.define(dst, *wide, **op.keywords(node, codecs.bound()))
    return dst.view()


def noise_multiple(node: Node, expected: Tensor, actual: Tensor) -> float | None:
    """Returns the error of actual as a multiple of the error of expected: 1 is as good as the reference.

    Both are root mean squares of the differences from `exact`, over the elements where that and expected are finite.
    inf if expected has no error and actual has one, or if actual is not finite there; 1 if neither has an error; None
    without an exact value.
    """
    truth = exact(node)
    return None if truth is None else multiple(truth, values(expected), values(actual))


def multiple(truth: Exact, expected: Exact, actual: Exact) -> float | None:
    """Returns the root mean square of actual - truth over that of expected - truth, as in `noise_multiple`."""
    known = np.isfinite(truth) & np.isfinite(expected)
    if not known.any():
        return None
    floor, error = (_rms(result[known] - truth[known]) for result in (expected, actual))
    if not isfinite(error):
        return inf
    if floor == 0:
        return 1.0 if error == 0 else inf
    return error / floor


def _rms(error: Exact) -> float:
    with np.errstate(all="ignore"):
        largest = float(np.abs(error).max(initial=0.0))
        if largest == 0 or not isfinite(largest):
            return largest if largest == 0 else inf
        return largest * float(np.sqrt(np.square(error / largest).mean()))
