"""A node with its results, as the finders see it: what differs, and what an altered node gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any

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
from graph_runner.judging.copies import blank
from graph_runner.judging.mistakes import inside
from graph_runner.judging.rules import Rules

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Again = Callable[[], tuple[Tensor, Tensor] | None]  # what dst holds in place of what it held, and the device's result

ROUNDED = {"f32": 1e-9, "f16": 1e-6, "bf16": 1e-4}  # NMSE that rounding explains, by dst's type
_ELSEWHERE = 1e-3  # the same for ops that are computed with other sums and roundings than here


@dataclass(frozen=True)
class Finding:
    """What a finder says of a node.

    text     the sentence, without the op
    gives    what dst holds if it is true: a tensor, elements as `units_of` gives them, or values; None if the text says
             no more than what is seen in the results
    unknown  elements (or blocks) of that tensor that are not known
    left     elements (or blocks) that the node has not written, if the text says so
    """

    text: str
    gives: Tensor | Bytes | Exact | None = None
    unknown: Flags | None = None
    left: Flags | None = None


class Case:
    """A node with its results, as the finders see it."""

    def __init__(
        self,
        node: Node,
        expected: Tensor,
        actual: Tensor,
        before: Tensor | None,
        outside: bool,
        again: Again | None = None,
    ) -> None:
        sources = tuple(source.unpacked() if source is not None else None for source in node.src)
        self.node = replace(node, src=sources)
        self.expected, self.actual, self.before, self.outside = expected, actual, before, outside
        self.e, self.a = units_of(expected), units_of(actual)
        self.b = None if before is None else units_of(before)
        self._again = again
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
        node, dst = mistake.node, self._start
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

    def bears_out(self, finding: Finding) -> bool:
        """Whether the results show that a finding is true: it gives what the device gave, but for rounding, and that is
        neither the right result nor what dst held before. If it says that something was not written, what dst held must
        be something that no kernel leaves by writing."""
        gives = finding.gives
        if finding.left is not None:
            return self._is_left(finding.left)
        if gives is None:
            return True
        if isinstance(gives, Tensor):
            differs = self._differs(gives, finding.unknown)
            return bool(differs.any()) and (not self.is_as_before[differs].all() or self._is_left(differs))
        if not self.gaps_are_right:
            return False
        if gives.dtype == np.uint8:
            units: Bytes = gives.astype(np.uint8, copy=False)
            differs = self._where(units != self.e) if self.holds(units) else self._nowhere
        else:
            numbers: Exact = gives.astype(np.float64, copy=False)
            differs = ~same_numbers(numbers, self.values_e)
            if self.before is not None:
                differs &= ~same_numbers(numbers, values(self.before))
        return bool((differs & ~self.is_as_before).any())

    def _differs(self, result: Tensor, unknown: Flags | None) -> Flags:
        """Returns where the result of an altered node differs from the right one; nowhere if it is not the
        device's."""
        h = bytes_of(result)
        if self.baseline is not None and np.array_equal(h, bytes_of(self.baseline)):
            return self._nowhere
        if not np.array_equal(h, bytes_of(self.actual)) and (self.is_exact or not self.fits(values(result))):
            return self._nowhere
        differs = self._where(units_of(result) != self.e)
        if not differs.any() and not np.array_equal(h, bytes_of(self.expected)):
            return ~self._nowhere  # in the gaps
        if unknown is not None:
            differs[unknown] = False
        return differs

    @property
    def _nowhere(self) -> Flags:
        """Flags of elements or blocks, (ne3, ne2, ne1, n), none of which is set."""
        return np.zeros(self.a.shape[:-1], np.bool_)

    @staticmethod
    def _where(bytes: Any) -> Flags:
        """Returns in which elements or blocks some byte is flagged."""
        flags: Flags = np.logical_or.reduce(bytes, axis=-1)
        return flags

    @cached_property
    def is_as_before(self) -> Flags:
        """Which elements or blocks are what dst held before, (ne3, ne2, ne1, n)."""
        return self._nowhere if self.b is None else ~self._where(self.a != self.b)

    def _is_left(self, left: Flags) -> bool:
        """Whether elements were not written. A kernel that adds to dst, or multiplies it, leaves a NaN and a 0 as they
        are, too: then others must show that it does not, or the node computed over another content of dst."""
        if self.b is None or not left.any() or not self.is_as_before[left].all():
            return False
        is_zero = ~self._where(self.b != 0)
        if not (is_zero | self._are_nan(self.b))[left].all() or not is_zero[~left].all():
            return True
        if self.again is None:
            return False
        before, after = map(units_of, self.again)
        return np.array_equal(before[left], after[left])

    def _are_nan(self, units: Bytes) -> Flags:
        """Returns which elements are NaN, or are bytes of 0xFF as a blank block is."""
        nan: Flags = ~self._where(units != 0xFF)
        if self.expected.type in ROUNDED:
            return nan | self._where(np.isnan(self.rows_of_values(units).reshape(*nan.shape, 1)))
        return nan

    @cached_property
    def again(self) -> tuple[Tensor, Tensor] | None:
        """What dst held and what the device gave when it computed the node once more, over another content of dst."""
        return self._again() if self._again is not None else None

    @cached_property
    def _start(self) -> Tensor:
        """What an altered node is computed over: dst before the node ran, or blank if that is not known."""
        if self.before is not None:
            return self.before
        start = replace(self.expected, memory=Memory.of(bytes_of(self.expected).copy()), offset=0)
        blank(start)
        return start

    def fits(self, values: Exact) -> bool:
        """Whether values, (ne3, ne2, ne1, ne0), are the actual ones except for rounding, and much closer than the right
        ones."""
        error = error_of(values, self.values_a)
        return error <= self.tolerance * power_of(self.values_a) and error <= self.ratio * self.least

    def holds(self, units: Bytes) -> bool:
        """Whether these elements are those of actual except for rounding."""
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


def same_numbers(x: Exact, y: Exact) -> Flags:
    """Returns where numbers are equal, or are both NaN."""
    same: Flags = (x == y) | (np.isnan(x) & np.isnan(y))
    return same


def _dtype(tensor: Tensor) -> np.dtype[np.generic]:
    dtype = tensor.codec.dtype
    assert dtype is not None
    return dtype


def error_of(x: Exact, y: Exact) -> float:
    """Returns the sum of squared differences; inf if one value is not finite and the other is not the same."""
    with np.errstate(all="ignore"):
        error = float(np.square(np.where(same_numbers(x, y), 0.0, x - y)).sum())
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
