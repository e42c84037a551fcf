"""Which usual mistake of a kernel gives exactly the wrong bytes of a node, in one sentence.

`mistakes` alters the node as a kernel would that makes the mistake; here the altered node is computed with the
project's own definitions, and compared with what the device wrote. What needs no node (rows in another order, a result
that is transposed, nothing written) is looked for in the two results.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import combinations
from math import inf

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.abi import codecs
from ggml_backend_npu.checks import Exact, Mistake
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.exact import values
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.registry import KernelError
from graph_runner import noise
from graph_runner.blocks import compare_blocks
from graph_runner.compare import compare
from graph_runner.mistakes import inside, mistakes
from graph_runner.rules import Rules
from quant import quantize

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]

_WORK = 1 << 26  # elements that the mistakes of one node may take to compute, all in all
_LARGEST = 1 << 28  # bytes of an output that is looked into
_MOST_ROWS = 256  # rows that are compared with each other where they are equal but for rounding
_NEAR = 1e-2  # NMSE of numbers with 8 or 11 bits, and of sums of them
_ROUNDED = {"f32": 1e-9, "f16": 1e-6, "bf16": 1e-4}  # NMSE that rounding explains, by dst's type
_ELSEWHERE = 1e-3  # the same for ops that are computed with other sums and roundings than here


def diagnose(node: Node, expected: Tensor, actual: Tensor, before: Tensor, outside: bool) -> str | None:
    """One sentence on which mistake gives the bytes of actual in place of those of expected; None where none does.

    node      its sources still hold what they held when it ran, each with its whole root as memory; dst is not read
    expected, actual, before  like dst, over memory of their own: what is right, what the device wrote, what was there
              before the node ran
    outside   whether bytes around actual were written
    """
    if expected.n_elements <= 0 or expected.nbytes > _LARGEST:
        return None
    case = _Case(node, expected, actual, before, outside)
    if case.is_right:
        return None
    for find in _FINDERS:
        with np.errstate(all="ignore"):
            sentence = find(case)
        if sentence is not None:
            also = "; bytes outside of dst are written, too" if outside and find is not _outside else ""
            return f"{node.op} {sentence}{also}"
    return f"{node.op} writes bytes outside of dst" if outside else None


def quantised_values(node: Node) -> NDArray[np.float32] | None:
    """The float32 that a node quantises, of dst's shape, axes reversed, with NaN where it writes nothing; None where
    it does not quantise or round floats."""
    dst, src = node.dst, node.src[0] if node.src else None
    if src is None or src.type not in ("f32", "f16", "bf16") or src.type == dst.type:
        return None
    own = OWN.get(node.op)
    if own is None or own.has_formula or not all(source is None or inside(source) for source in node.src):
        return None
    wide = Tensor.of(np.full(dst.ne[::-1], np.nan, np.float32))
    (_, *sources), keywords = own.arguments(node)
    try:
        own.define(wide, *sources, **keywords)
    except (KernelError, ValueError, IndexError):
        return None
    return wide.view()


def _span(tensor: Tensor) -> Bytes:
    return Memory(tensor.address, tensor.nbytes, owner=tensor.memory).bytes()


def _units(tensor: Tensor) -> Bytes:
    """A tensor's elements or blocks, (ne3, ne2, ne1, n, bytes)."""
    size, shape = tensor.codec.block_bytes, (*tensor.ne[:0:-1], tensor.n_blocks)
    return np.ascontiguousarray(raw(tensor)).view(np.uint8).reshape(*shape, size)


class _Case:
    """A node with its results, as the finders look at it."""

    def __init__(self, node: Node, expected: Tensor, actual: Tensor, before: Tensor, outside: bool) -> None:
        sources = tuple(source.unpacked() if source is not None else None for source in node.src)
        self.node = replace(node, src=sources)
        self.expected, self.actual, self.before, self.outside = expected, actual, before, outside
        self.e, self.a, self.b = (_units(tensor) for tensor in (expected, actual, before))
        own = OWN.get(node.op)
        rounds_alike = own is not None and not (own.bound and own.takes_blocks)  # else it need not quantise as the CPU
        self.is_exact = (own is not None and not own.has_formula) or expected.type not in _ROUNDED
        self.tolerance = 0.0 if self.is_exact else _ROUNDED[expected.type] if rounds_alike else _ELSEWHERE
        self.ratio = 1e-3 if rounds_alike else 1e-2

    @cached_property
    def data_is_right(self) -> bool:
        return np.array_equal(self.e, self.a)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong but what rounding explains."""
        if self.outside:
            return False
        if np.array_equal(_span(self.expected), _span(self.actual)):
            return True
        found = compare(self.expected, self.actual)
        return Rules().allows(self.node, self.expected, self.actual, found)

    @cached_property
    def gaps_are_right(self) -> bool:
        """Whether no byte between the elements of the output differs."""
        wrong = _span(self.expected) != _span(self.actual)
        raw_wrong = replace(self.actual, memory=Memory.of(wrong.view(np.uint8)), offset=0)
        return int(np.count_nonzero(wrong)) == int(np.count_nonzero(_units(raw_wrong)))

    @cached_property
    def values_e(self) -> Exact:
        return values(self.expected)

    @cached_property
    def values_a(self) -> Exact:
        return values(self.actual)

    @cached_property
    def baseline(self) -> Tensor | None:
        """What the definition makes of the node as it is."""
        return self.run(Mistake("", self.node))

    @cached_property
    def least(self) -> float:
        """How far what is right is from actual."""
        errors = [_error(self.values_e, self.values_a)]
        if self.baseline is not None:
            errors.append(_error(values(self.baseline), self.values_a))
        return min(errors)

    def run(self, mistake: Mistake) -> Tensor | None:
        """What the altered node writes over `before`; None where it cannot be computed within its memory."""
        node, dst = mistake.node, self.before
        if not all(source is None or inside(source) for source in node.src):
            return None
        shift = node.dst.offset - self.node.dst.offset
        begin, end = min(0, shift), max(dst.nbytes, shift + node.dst.nbytes)
        if end - begin > 4 * dst.nbytes + (1 << 16):
            return None
        buffer = np.zeros(end - begin, np.uint8)
        buffer[-begin : dst.nbytes - begin] = _span(dst)
        memory = Memory.of(buffer)
        target = replace(node.dst, memory=memory, offset=shift - begin, packed=None)
        try:
            if not _compute(replace(node, dst=target), mistake):
                return None
        except Exception:  # whatever a definition says about a node that no graph has
            return None
        return replace(dst, memory=memory, offset=-begin)

    def explains(self, result: Tensor, unknown: Flags | None = None) -> bool:
        """Whether a result is that of the device, and not the right one."""
        if unknown is not None:
            raw(result)[unknown] = raw(self.actual)[unknown]
        h, a = _span(result), _span(self.actual)
        if np.array_equal(h, _span(self.expected)):
            return False
        if unknown is not None and not (self.e != self.a)[~unknown].any():
            return False
        if self.baseline is not None and np.array_equal(h, _span(self.baseline)):
            return False
        return np.array_equal(h, a) or self.is_close(result)

    def is_close(self, result: Tensor) -> bool:
        """Whether a result is that of the device but for rounding, and what is right is much further off."""
        return not self.is_exact and self.fits(values(result))

    def fits(self, values: Exact) -> bool:
        error = _error(values, self.values_a)
        return error <= self.tolerance * _power(self.values_a) and error <= self.ratio * self.least

    def holds(self, units: Bytes) -> bool:
        """Whether these elements are those of actual, but for rounding."""
        if np.array_equal(units, self.e):
            return False
        if np.array_equal(units, self.a):
            return True
        return not self.is_exact and self.fits(self.rows_of_values(units).reshape(self.expected.ne[::-1]))

    def same_rows(self, x: Bytes, y: Bytes) -> Flags:
        """Which rows of two results are the same, (n_rows,), but for rounding."""
        shape = (-1, *x.shape[3:])
        same: Flags = (x.reshape(shape) == y.reshape(shape)).all(axis=(1, 2))
        if self.is_exact or same.all():
            return same
        p, q = (self.rows_of_values(units) for units in (x, y))
        error, power = np.square(p - q).sum(axis=1), np.square(p).sum(axis=1)
        close: Flags = same | (error <= self.tolerance * power)
        return close

    def rows_of_values(self, units: Bytes) -> Exact:
        """Elements of a float type as rows of values."""
        values = convert(units.reshape(-1).view(_dtype(self.expected)), self.expected.type, "f32")
        return values.astype(np.float64).reshape(-1, self.expected.ne[0])


def _dtype(tensor: Tensor) -> np.dtype[np.generic]:
    dtype = tensor.codec.dtype
    assert dtype is not None
    return dtype


def _error(x: Exact, y: Exact) -> float:
    """The sum of squared differences; inf where one is no finite number and the other not the same."""
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        error = float(np.square(np.where(same, 0.0, x - y)).sum())
    return error if error == error else inf


def _power(x: Exact) -> float:
    return float(np.square(np.where(np.isfinite(x), x, 0.0)).sum())


def _compute(node: Node, mistake: Mistake) -> bool:
    """Fills dst of an altered node; whether anybody knows how."""
    own = OWN.get(node.op)
    with np.errstate(all="ignore"):
        if mistake.compute is not None:
            mistake.compute(node.dst)
        elif own is not None:
            tensors, _ = own.arguments(node)
            own.define(*tensors, **own.keywords(node, codecs.bound()))
        else:
            values = noise.exact(node)
            if values is None or node.dst.type not in _ROUNDED:
                return False
            raw(node.dst)[...] = convert(values.astype(np.float32), "f32", node.dst.type)
    return True


def _cost(node: Node) -> int:
    """About how many elements an op goes through."""
    n = node.dst.n_elements
    if node.op in OWN and OWN[node.op].weights and node.src[0] is not None:
        n += n * node.src[0].ne[0] // 64 + node.src[0].n_elements
    return n


# what is said


def _list(numbers: Iterable[int]) -> str:
    """ "3, 5 to 7 and 2 more" of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [f"{a}" if a == b else f"{a} to {b}" for a, b in runs[:4]]
    left = sum(b - a + 1 for a, b in runs[4:])
    return f"{', '.join(parts)} and {left} more" if left else ", ".join(parts)


def _rows(flags: Flags, case: _Case) -> str:
    """The rows of dst that are marked, (n_rows,): "row 5", "rows 3 to 7", "row 2 of [i3 0, i2 1]"."""
    places = np.flatnonzero(flags)
    _, n1, n2, n3 = case.expected.ne
    by_matrix: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place in places:
        i3, i2, i1 = np.unravel_index(place, (n3, n2, n1))
        by_matrix[int(i3), int(i2)].append(int(i1))
    first = next(iter(by_matrix.values()))
    name = "row" if len(first) == 1 else "rows"
    if n2 * n3 == 1:
        return f"{name} {_list(first)}"
    if len(by_matrix) == n2 * n3 and all(rows == first for rows in by_matrix.values()):
        return f"{name} {_list(first)} of each matrix"
    texts = [
        f"{'row' if len(rows) == 1 else 'rows'} {_list(rows)} of matrix [i3 {i3}, i2 {i2}]"
        for (i3, i2), rows in by_matrix.items()
    ]
    more = f" and {len(texts) - 3} more matrices" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more


# finders


def _in_gaps(case: _Case) -> str | None:
    if not case.data_is_right or case.outside:
        return None
    n = int(np.count_nonzero(_span(case.expected) != _span(case.actual)))
    return f"writes {n} bytes into the gaps between dst's rows (nb {case.expected.nb}); dst itself is right"


def _outside(case: _Case) -> str | None:
    """Where dst is right, or as it was before, and what lies around it is not."""
    if not case.outside:
        return None
    around = case.actual.memory.bytes()
    begin, end = case.actual.offset, case.actual.offset + case.actual.nbytes
    guards = np.concatenate([around[:begin], around[end:]])
    if not case.data_is_right:
        return _elsewhere(case)
    if not guards.size:
        return "writes bytes outside of dst, which itself is right"
    untouched = int(np.bincount(guards, minlength=256).argmax())
    in_front, behind = (np.flatnonzero(part != untouched) for part in (around[:begin], around[end:]))
    parts = []
    if behind.size:
        parts.append(_extent(int(behind[-1]) + 1, "behind", case))
    if in_front.size:
        parts.append(_extent(begin - int(in_front[0]), "in front of", case))
    return f"{' and '.join(parts) or 'writes bytes outside of dst'}; dst itself is right"


def _extent(n: int, where: str, case: _Case) -> str:
    row = case.expected.codec.block_bytes * case.expected.n_blocks
    stride = case.expected.nb[1] if case.expected.ne[1] > 1 and where == "behind" else row
    rows = n / stride  # behind dst: a gap and a row, each
    as_rows = ": one row too many" if rows == 1 else f": {rows:.0f} rows too many" if rows == int(rows) else ""
    return f"writes up to {n} bytes {where} dst{as_rows}"


def _elsewhere(case: _Case) -> str | None:
    """The right result at another place of the memory: an offset that is ignored."""
    around = case.actual.memory.bytes()
    row = np.ascontiguousarray(case.e[0, 0, 0]).tobytes()
    data, at = around.tobytes(), -1
    for _ in range(64):
        at = data.find(row, at + 1)
        if at < 0:
            break
        moved = replace(case.actual, offset=at)
        if at != case.actual.offset and inside(moved) and np.array_equal(_units(moved), case.e):
            shift = at - case.actual.offset
            if at == 0 or shift == -case.node.dst.offset:
                return f"ignores the offset of dst: the right result lies at byte 0 of the memory, {-shift} too early"
            return f"writes the right result {abs(shift)} bytes too {'late' if shift > 0 else 'early'}"
    if np.array_equal(case.a, case.b):
        return "writes nothing into dst, but bytes outside of it, as where the offset of dst is ignored"
    return None


def _nothing_written(case: _Case) -> str | None:
    if not np.array_equal(case.a, case.b) or not case.gaps_are_right:
        return None
    return "leaves dst as it was before the node ran"


def _stale_rows(case: _Case) -> str | None:
    """Rows, or elements of all rows, that are as they were before; all others are right."""
    if not case.gaps_are_right:
        return None
    right = case.same_rows(case.a, case.e)
    stale = _same_bytes(case.a, case.b) & ~right
    if stale.any() and (right | stale).all():
        return f"does not write {_rows(stale, case)}: {'it is' if stale.sum() == 1 else 'they are'} as before"
    right, stale = ((x == y).all(axis=-1) for x, y in ((case.a, case.e), (case.a, case.b)))
    stale &= ~right
    if not stale.any() or not (right | stale).all() or case.expected.n_blocks == 1:
        return None
    columns = stale.reshape(-1, stale.shape[-1]).any(axis=0)
    if columns.all():
        return None
    size = case.expected.codec.block_size
    unit = "elements" if size == 1 else f"blocks of {size}"
    return f"does not write {unit} {_list(np.flatnonzero(columns).tolist())} of its rows: they are as before"


def _same_bytes(x: Bytes, y: Bytes) -> Flags:
    """Which rows are the same, (n_rows,)."""
    same: Flags = (x == y).reshape(-1, x.shape[3] * x.shape[4]).all(axis=1)
    return same


def _rounding(case: _Case) -> str | None:
    """What was wrong when values were quantised, or rounded to 16 bits."""
    kind = case.expected.codec
    if kind.is_quantized:
        values = quantised_values(case.node)
        found = compare_blocks(case.expected, case.actual, values)
        if found.swapped_nibbles:
            return f"swaps the two nibbles of each byte: {found.n_different} of {found.n_blocks} q4_0 blocks"
        if kind.name == "q4_0" and _are_neighbours(case.e.reshape(-1, 18), case.a.reshape(-1, 18)):
            return "packs neighbours, elements 2j and 2j + 1, into a byte of q4_0, not j and j + 16"
        if found.rounding is not None and not found.n_scale:
            other = compare_blocks(case.expected, case.expected, values).rounding
            if other is not None and other != found.rounding:
                return (
                    f"rounds as ggml's {found.rounding} q8_0 quantiser, not as the {other} one: "
                    f"{found.n_different} of {found.n_blocks} blocks differ, {found.off_by_one} quants by one"
                )
        return None
    if case.expected.type not in ("f16", "bf16"):
        return None
    values = quantised_values(case.node)
    if values is None:
        return None
    expected, actual = (raw(tensor).view(np.uint16) for tensor in (case.expected, case.actual))
    cut = np.where(np.isnan(values), expected, _cut_off(values, case.expected.type))
    if np.array_equal(cut, actual) and not case.data_is_right:
        return f"cuts float32 off to {case.expected.type}: it does not round to the nearest"
    return None


def _are_neighbours(expected: Bytes, actual: Bytes) -> bool:
    """Whether the q4_0 blocks that differ have elements 2j and 2j + 1 in byte j."""
    different = (expected != actual).any(axis=1)
    blocks = expected[different]
    quants = np.hstack([blocks[:, 2:] & 15, blocks[:, 2:] >> 4])
    return np.array_equal(np.hstack([blocks[:, :2], quants[:, ::2] | (quants[:, 1::2] << 4)]), actual[different])


def _cut_off(values: NDArray[np.float32], type: str) -> NDArray[np.uint16]:
    """The bits of float32 as 16-bit floats, rounded towards zero."""
    if type == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    nearest = quantize(values, "f16").view(np.float16)
    too_large = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(too_large, np.nextafter(nearest, np.float16(0)), nearest).view(np.uint16)


def _not_finite(case: _Case, others_right: bool = True) -> str | None:
    """NaN or infinities in rows where the reference has none."""
    if case.expected.type not in (*_ROUNDED, "f64"):
        return None
    shape = (-1, case.expected.ne[0])
    e, a = case.values_e.reshape(shape), case.values_a.reshape(shape)
    new: Flags = np.logical_or.reduce(~np.isfinite(a) & np.isfinite(e), axis=1)
    if not new.any() or not case.gaps_are_right or (others_right and _same_bytes(case.a, case.b)[new].all()):
        return None
    kinds = [name for name, test in (("NaN", np.isnan), ("Inf", np.isinf)) if (test(a) & np.isfinite(e)).any()]
    text = f"gives {' and '.join(kinds)} in {_rows(new, case)}, where the reference has none"
    if not others_right:
        return text
    right = case.same_rows(case.a, case.e)
    if not (right | new).all():
        return None
    return text if new.all() else f"{text}; the others are right"


def _not_finite_at_all(case: _Case) -> str | None:
    return _not_finite(case, others_right=False)


def _mistake(case: _Case) -> str | None:
    """A mistake whose node, computed here, gives the device's bytes."""
    if case.baseline is None and case.node.op not in OWN:
        return None
    work = 0
    for mistake in mistakes(case.node):
        work += _cost(mistake.node)
        if work > _WORK:
            return None
        result = case.run(mistake)
        if result is not None and case.explains(result, mistake.unknown):
            same = "bytes" if np.array_equal(_span(result), _span(case.actual)) else "values"
            exactly = "exactly these bytes" if same == "bytes" else "these values"
            but = " in all rows that it is known of" if mistake.unknown is not None else ""
            joined = " it gives" if ": with" in mistake.text else ", which gives"
            return f"{mistake.text}{joined} {exactly}{but}"
    return None


def _transposed(case: _Case) -> str | None:
    if not case.gaps_are_right:
        return None
    for i, j in combinations(range(4), 2):
        sizes = (case.expected.n_blocks, *case.expected.ne[1:])
        if sizes[i] == 1 or sizes[j] == 1:
            continue
        changed = np.ascontiguousarray(np.swapaxes(case.e, 3 - i, 3 - j)).reshape(case.e.shape)
        if case.holds(changed):
            how = "transposed: dimensions 0 and 1" if (i, j) == (0, 1) else f"with dimensions {i} and {j}"
            return f"writes its result {how} swapped"
    return None


def _permuted(case: _Case) -> str | None:
    """The right rows at other places."""
    n1 = case.expected.ne[1]
    right = case.same_rows(case.a, case.e)
    n = len(right)
    if n == 1 or right.all() or not case.gaps_are_right:
        return None
    source = _whose_rows(case, right)
    if source is None or len(np.unique(source)) == 1:
        return None
    is_permutation = len(np.unique(source)) == n
    if is_permutation:
        if np.array_equal(source, np.arange(n)[::-1]):
            return f"writes its rows in reverse: row i is that of {n - 1} - i"
        by_matrix = source.reshape(-1, n1) - np.arange(0, n, n1)[:, None]
        if ((by_matrix >= 0) & (by_matrix < n1)).all() and (by_matrix == by_matrix[0]).all() and n1 < n:
            return f"permutes the rows of each matrix: {_order(by_matrix[0])}"
        matrices = source.reshape(-1, n1)
        if n1 > 1 and (matrices - matrices[:, :1] == np.arange(n1)).all() and (matrices[:, 0] % n1 == 0).all():
            return f"permutes matrices, counted over dimensions 2 and 3: {_order(matrices[:, 0] // n1)}"
        return f"permutes rows: {_order(source)}"
    return f"writes rows that belong elsewhere: {_order(source)}"


def _order(source: NDArray[np.int64]) -> str:
    """Which row each place holds."""
    n, index = len(source), np.arange(len(source))
    steps = (source - index) % n
    if n > 2 and (steps == steps[0]).all():
        return f"place i holds what belongs at (i + {steps[0]}) % {n}"
    if n > 2 and np.array_equal(source, index[::-1]):
        return f"place i holds what belongs at {n - 1} - i"
    moved = np.flatnonzero(source != index)
    parts = [f"place {at} holds what belongs at {source[at]}" for at in moved[:4]]
    return ", ".join(parts) + (f" and {len(moved) - 4} more" if len(moved) > 4 else "")


def _whose_rows(case: _Case, right: Flags) -> NDArray[np.int64] | None:
    """For each row of actual, which row of expected it is; None where one is none."""
    n = len(right)
    source = np.where(right, np.arange(n), -1)
    if case.is_exact:
        places: dict[bytes, deque[int]] = defaultdict(deque)
        e, a = (np.ascontiguousarray(units).reshape(n, -1) for units in (case.e, case.a))
        free = {row: place for place, row in enumerate(map(bytes, e))}
        for place in np.flatnonzero(~right):
            places[bytes(e[place])].append(int(place))
        for place in np.flatnonzero(~right):
            row = bytes(a[place])
            found = places[row].popleft() if places.get(row) else free.get(row)
            if found is None:
                return None
            source[place] = found
        return source
    wrong = np.flatnonzero(~right)
    if n > _MOST_ROWS or case.expected.ne[0] == 1:  # one number may well be that of another row, but for rounding
        return None
    e_values, a_values = case.rows_of_values(case.e), case.rows_of_values(case.a)
    for place in wrong:
        errors = np.square(e_values - a_values[place]).sum(axis=1)
        if not np.isfinite(errors).any():
            return None
        nearest = int(np.nanargmin(errors))
        if errors[nearest] > case.tolerance * np.square(a_values[place]).sum():
            return None
        source[place] = nearest
    return source


def _shifted(case: _Case) -> str | None:
    """The right elements, all by the same number of places off."""
    if not case.gaps_are_right:
        return None
    size = case.e.shape[-1]
    block = case.expected.codec.block_size
    unit = "elements" if block == 1 else f"blocks of {block}"
    for rows, what in ((case.e.reshape(-1, size), "its result"), (None, "each row")):
        if rows is not None:
            e, a = rows[None], case.a.reshape(1, -1, size)
        else:
            e, a = (units.reshape(-1, case.e.shape[3], size) for units in (case.e, case.a))
        for n in _candidates(e[0], a[0]):
            x, y = (e[:, :-n], a[:, n:]) if n > 0 else (e[:, -n:], a[:, :n])
            in_place = e[:, n:] if n > 0 else e[:, :n]
            if 2 * x.shape[1] < e.shape[1] or not np.array_equal(x, y) or np.array_equal(y, in_place):
                continue
            text = f"writes {what} {abs(n)} {unit} too {'late' if n > 0 else 'early'}"
            return f"{text}, in a circle" if np.array_equal(np.roll(e, n, axis=1), a) else text
    return None


def _candidates(e: Bytes, a: Bytes) -> Iterator[int]:
    """By how many places the elements a may be later than e: where the middle one of a is found in e."""
    n = len(e)
    # the middle of a, and with it as much of its surroundings as is of several values
    middle = n // 2
    places = np.flatnonzero((e == a[middle]).all(axis=1))
    order = np.argsort(np.abs(places - middle), kind="stable")[:64]
    for place in places[order]:
        if place != middle:
            yield int(middle - place)


def _factor(case: _Case) -> str | None:
    """A multiple of the right values, or the right values and a constant."""
    if case.is_exact and case.expected.type not in _ROUNDED:
        return None
    e, a = case.values_e.reshape(-1), case.values_a.reshape(-1)
    if not (np.isfinite(e) & np.isfinite(a)).all() or e.size < 8 or not case.gaps_are_right:
        return None
    tolerance = max(case.tolerance, _ROUNDED.get(case.expected.type, 0.0))
    power, total = _power(e), _power(a)
    if not total:
        return "gives 0 everywhere"
    if power:
        factor = float(e @ a) / power
        if _error(factor * e, a) <= tolerance * total and _error(factor * e, a) <= 1e-2 * _error(e, a):
            return f"gives {factor:.9g} times the right values everywhere"
    constant = float((a - e).mean())
    if np.ptp(e) and _error(e + constant, a) <= 1e-2 * min(tolerance * total, _error(e, a)):
        return f"gives the right values and {constant:.6g} more everywhere"
    return None


def _row_factors(case: _Case) -> str | None:
    """The right rows, each times a number of its own: a sum over the row is off."""
    if case.expected.type not in _ROUNDED or case.expected.ne[0] < 8 or not case.gaps_are_right:
        return None
    e, a = (values.reshape(-1, case.expected.ne[0]) for values in (case.values_e, case.values_a))
    power = np.square(e).sum(axis=1)
    if not (np.isfinite(e) & np.isfinite(a)).all() or not power.all():
        return None
    factors = (e * a).sum(axis=1) / power
    error = _error(factors[:, None] * e, a)
    if not error <= max(case.tolerance, _ROUNDED[case.expected.type]) * _power(a) or error > 1e-2 * _error(e, a):
        return None
    least, most = factors.min(), factors.max()
    return f"gives each row times a number of its own, {least:.9g} to {most:.9g}: what it makes of a whole row is off"


def _in_halves(case: _Case) -> str | None:
    """Nothing but numbers of a type of 16 bits, near to the right ones."""
    e, a = case.values_e.astype(np.float32), case.values_a.astype(np.float32)
    if case.expected.type != "f32" or not np.isfinite(e).all() or len(np.unique(a)) < 8:
        return None
    if _error(case.values_e, case.values_a) > _NEAR * _power(case.values_e):
        return None
    for kind in ("bf16", "f16"):
        as_halves = [convert(convert(x, "f32", kind), kind, "f32") == x for x in (e, a)]
        if as_halves[1].all() and as_halves[0].mean() < 0.5:
            return f"gives nothing but numbers of {kind}: it computes in that type, or rounds its result to it"
    return None


_FINDERS: tuple[Callable[[_Case], str | None], ...] = (
    _outside,
    _in_gaps,
    _nothing_written,
    _rounding,
    _not_finite,
    _mistake,
    _stale_rows,
    _transposed,
    _permuted,
    _shifted,
    _factor,
    _in_halves,
    _row_factors,
    _not_finite_at_all,
)
