"""A node with its results, as the finders see it: what differs, and what an altered node gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ggml import codecs
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import convert
from ggml_backend_npu.registry.checks import Exact, Mistake
from ggml_backend_npu.registry.exact import values
from graph_runner.judging import noise
from graph_runner.judging.compare import compare
from graph_runner.judging.mistakes import inside
from graph_runner.judging.rules import Rules

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

ROUNDED = {"f32": 1e-9, "f16": 1e-6, "bf16": 1e-4}  # NMSE that rounding explains, by dst's type
_ELSEWHERE = 1e-3  # the same for ops that are computed with other sums and roundings than here


class Case:
    """A node with its results, as the finders see it."""

    def __init__(self, node: Node, expected: Tensor, actual: Tensor, before: Tensor, outside: bool) -> None:
        sources = tuple(source.unpacked() if source is not None else None for source in node.src)
        self.node = replace(node, src=sources)
        self.expected, self.actual, self.before, self.outside = expected, actual, before, outside
        self.e, self.a, self.b = (units_of(tensor) for tensor in (expected, actual, before))
        own = OWN.get(node.op)
        rounds_alike = own is not None and not (own.bound and own.takes_blocks)  # else it need not quantise as the CPU
        self.is_exact = (own is not None and not own.has_formula) or expected.type not in ROUNDED
        self.tolerance = 0.0 if self.is_exact else ROUNDED[expected.type] if rounds_alike else _ELSEWHERE
        self.ratio = 1e-3 if rounds_alike else 1e-2

    @cached_property
    def data_is_right(self) -> bool:
        """Whether all elements of the output have the expected bytes, whatever the gaps hold."""
        return np.array_equal(self.e, self.a)

    @property
    def is_right(self) -> bool:
        """Whether the result is right, or differs only by rounding."""
        if self.outside:
            return False
        if np.array_equal(bytes_of(self.expected), bytes_of(self.actual)):
            return True
        found = compare(self.expected, self.actual)
        return Rules().allows(self.node, self.expected, self.actual, found)

    @cached_property
    def gaps_are_right(self) -> bool:
        """Whether all bytes between the elements of the output are as expected."""
        wrong = bytes_of(self.expected) != bytes_of(self.actual)
        raw_wrong = replace(self.actual, memory=Memory.of(wrong.view(np.uint8)), offset=0)
        return int(np.count_nonzero(wrong)) == int(np.count_nonzero(units_of(raw_wrong)))

    @cached_property
    def values_e(self) -> Exact:
        """The expected values as float64, (ne3, ne2, ne1, ne0)."""
        return values(self.expected)

    @cached_property
    def values_a(self) -> Exact:
        """The actual values as float64, (ne3, ne2, ne1, ne0)."""
        return values(self.actual)

    @cached_property
    def baseline(self) -> Tensor | None:
        """The result of the op's definition for the unaltered node."""
        return self.run(Mistake("", self.node))

    @cached_property
    def least(self) -> float:
        """The smaller of the squared errors of the expected result and of `baseline` against actual."""
        errors = [error_of(self.values_e, self.values_a)]
        if self.baseline is not None:
            errors.append(error_of(values(self.baseline), self.values_a))
        return min(errors)

    def run(self, mistake: Mistake) -> Tensor | None:
        """Returns what the altered node writes over `before`; None if it cannot be computed within its memory."""
        node, dst = mistake.node, self.before
        if not all(source is None or inside(source) for source in node.src):
            return None
        shift = node.dst.offset - self.node.dst.offset
        begin, end = min(0, shift), max(dst.nbytes, shift + node.dst.nbytes)
        if end - begin > 4 * dst.nbytes + (1 << 16):
            return None
        buffer = np.zeros(end - begin, np.uint8)
        buffer[-begin : dst.nbytes - begin] = bytes_of(dst)
        memory = Memory.of(buffer)
        target = replace(node.dst, memory=memory, offset=shift - begin, packed=None)
        try:
            if not _compute(replace(node, dst=target), mistake):
                return None
        except Exception:  # whatever a definition says about a node that no graph has
            return None
        return replace(dst, memory=memory, offset=-begin)

    def explains(self, result: Tensor, unknown: Flags | None = None) -> bool:
        """Whether a result is the device's, and not the right one.

        unknown  elements (or blocks) of the result to ignore
        """
        if unknown is not None:
            result.view()[unknown] = self.actual.view()[unknown]
        h, a = bytes_of(result), bytes_of(self.actual)
        if np.array_equal(h, bytes_of(self.expected)):
            return False
        if unknown is not None and not (self.e != self.a)[~unknown].any():
            return False
        if self.baseline is not None and np.array_equal(h, bytes_of(self.baseline)):
            return False
        return np.array_equal(h, a) or self.is_close(result)

    def is_close(self, result: Tensor) -> bool:
        """Whether a result is the device's except for rounding, while the right result is much further off."""
        return not self.is_exact and self.fits(values(result))

    def fits(self, values: Exact) -> bool:
        """Whether values, (ne3, ne2, ne1, ne0), are the actual ones except for rounding, and much closer than the right
        ones."""
        error = error_of(values, self.values_a)
        return error <= self.tolerance * power_of(self.values_a) and error <= self.ratio * self.least

    def holds(self, units: Bytes) -> bool:
        """Whether these elements are those of actual except for rounding, and not those of expected."""
        if np.array_equal(units, self.e):
            return False
        if np.array_equal(units, self.a):
            return True
        return not self.is_exact and self.fits(self.rows_of_values(units).reshape(self.expected.ne[::-1]))

    def same_rows(self, x: Bytes, y: Bytes) -> Flags:
        """Returns which rows of two results are the same except for rounding, (n_rows,)."""
        shape = (-1, *x.shape[3:])
        same: Flags = (x.reshape(shape) == y.reshape(shape)).all(axis=(1, 2))
        if self.is_exact or same.all():
            return same
        p, q = (self.rows_of_values(units) for units in (x, y))
        error, power = np.square(p - q).sum(axis=1), np.square(p).sum(axis=1)
        close: Flags = same | (error <= self.tolerance * power)
        return close

    def rows_of_values(self, units: Bytes) -> Exact:
        """Returns elements of a float type as rows of values, (n_rows, ne0)."""
        values = convert(units.reshape(-1).view(_dtype(self.expected)), self.expected.type, "f32")
        return values.astype(np.float64).reshape(-1, self.expected.ne[0])


def bytes_of(tensor: Tensor) -> Bytes:
    """Returns a tensor's bytes, gaps between its rows included."""
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes()


def units_of(tensor: Tensor) -> Bytes:
    """Returns a tensor's elements or blocks, (ne3, ne2, ne1, n, bytes)."""
    size, shape = tensor.codec.block_bytes, (*tensor.ne[:0:-1], tensor.n_blocks)
    return np.ascontiguousarray(tensor.view()).view(np.uint8).reshape(*shape, size)


def same_bytes(x: Bytes, y: Bytes) -> Flags:
    """Returns which rows are the same, (n_rows,)."""
    same: Flags = (x == y).reshape(-1, x.shape[3] * x.shape[4]).all(axis=1)
    return same


def _dtype(tensor: Tensor) -> np.dtype[np.generic]:
    dtype = tensor.codec.dtype
    assert dtype is not None
    return dtype


def error_of(x: Exact, y: Exact) -> float:
    """Returns the sum of squared differences; inf if one value is not finite and the other is not the same."""
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        error = float(np.square(np.where(same, 0.0, x - y)).sum())
    return error if error == error else inf


def power_of(x: Exact) -> float:
    """Returns the sum of the squares of the finite values."""
    return float(np.square(np.where(np.isfinite(x), x, 0.0)).sum())


def _compute(node: Node, mistake: Mistake) -> bool:
    """Fills dst of an altered node. Returns whether there is a definition or formula to do so."""
    own = OWN.get(node.op)
    with np.errstate(all="ignore"):
        if mistake.compute is not None:
            mistake.compute(node.dst)
        elif own is not None:
            tensors, _ = own.arguments(node)
            own.define(*tensors, **own.keywords(node, codecs.bound()))
        else:
            values = noise.exact(node)
            if values is None or node.dst.type not in ROUNDED:
                return False
            node.dst.view()[...] = convert(values.astype(np.float32), "f32", node.dst.type)
    return True
