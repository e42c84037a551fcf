"""Where a device wrote: outside of dst, into its gaps, nothing at all, not all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ggml_backend_npu.registry.exact import values
from graph_runner.diagnosis.case import (
    ROUNDED,
    Case,
    Finding,
    bytes_of,
    error_of,
    power_of,
    same_bytes,
    units_of,
)
from graph_runner.diagnosis.words import rows_of, runs_of
from graph_runner.judging.mistakes import inside


def written_outside(case: Case) -> Iterator[Finding]:
    """Finds that dst is right, or as it was before, and that bytes around it were written."""
    if not case.outside:
        return
    around = case.actual.memory.bytes()
    begin, end = case.actual.offset, case.actual.offset + case.actual.nbytes
    guards = np.concatenate([around[:begin], around[end:]])
    if not case.data_is_right:
        yield from _elsewhere(case)
        return
    if not guards.size:
        yield Finding("writes bytes outside of dst, which itself is right")
        return
    untouched = int(np.bincount(guards, minlength=256).argmax())
    in_front, behind = (np.flatnonzero(part != untouched) for part in (around[:begin], around[end:]))
    parts = []
    if behind.size:
        parts.append(_extent(int(behind[-1]) + 1, "behind", case))
    if in_front.size:
        parts.append(_extent(begin - int(in_front[0]), "in front of", case))
    yield Finding(f"{' and '.join(parts) or 'writes bytes outside of dst'}; dst itself is right")


def _extent(n: int, where: str, case: Case) -> str:
    row = case.expected.codec.block_bytes * case.expected.n_blocks
    stride = case.expected.nb[1] if case.expected.ne[1] > 1 and where == "behind" else row
    rows = n / stride  # behind dst: a gap and a row, each
    as_rows = ": one row too many" if rows == 1 else f": {rows:.0f} rows too many" if rows == int(rows) else ""
    return f"writes up to {n} bytes {where} dst{as_rows}"


def _elsewhere(case: Case) -> Iterator[Finding]:
    """Finds the right result at another place of the memory: an offset was ignored."""
    around = case.actual.memory.bytes()
    row = np.ascontiguousarray(case.e[0, 0, 0]).tobytes()
    data, at = around.tobytes(), -1
    for _ in range(64):
        at = data.find(row, at + 1)
        if at < 0:
            break
        moved = replace(case.actual, offset=at)
        if at != case.actual.offset and inside(moved) and np.array_equal(units_of(moved), case.e):
            shift = at - case.actual.offset
            if at == 0 or shift == -case.node.dst.offset:
                yield Finding(
                    f"ignores the offset of dst: the right result lies at byte 0 of the memory, {-shift} too early"
                )
            yield Finding(f"writes the right result {abs(shift)} bytes too {'late' if shift > 0 else 'early'}")
    text = "writes nothing into dst, but bytes outside of it, as where the offset of dst is ignored"
    yield Finding(text, left=np.ones(case.a.shape[:-1], np.bool_))


def in_gaps(case: Case) -> Iterator[Finding]:
    """Finds the right result with bytes written in the gaps between its rows."""
    if not case.data_is_right or case.outside:
        return
    n = int(np.count_nonzero(bytes_of(case.expected) != bytes_of(case.actual)))
    yield Finding(f"writes {n} bytes into the gaps between dst's rows (nb {case.expected.nb}); dst itself is right")


def nothing_written(case: Case) -> Iterator[Finding]:
    """Finds dst as it was before."""
    if case.gaps_are_right:
        yield Finding("leaves dst as it was before the node ran", left=np.ones(case.a.shape[:-1], np.bool_))


def added(case: Case) -> Iterator[Finding]:
    """Finds the right result added to what dst held."""
    if case.expected.type not in ROUNDED or not case.gaps_are_right:
        return
    results = [(case.before, case.actual)] if case.before is not None else []
    if case.is_as_before.all() and case.again is not None:
        results.append(case.again)
    for held, given in results:
        before, after = values(held), values(given)
        total = before + case.values_e
        off, error = error_of(case.values_e, after), error_of(total, after)
        if error <= min(max(case.tolerance, ROUNDED[case.expected.type]) * power_of(after), 1e-2 * off) and off > 0:
            yield Finding("adds its result to what dst held before", total if given is case.actual else None)


def stale_rows(case: Case) -> Iterator[Finding]:
    """Finds rows, or elements, that are as they were before, while all others are right."""
    if not case.gaps_are_right or case.b is None:
        return
    right = case.same_rows(case.a, case.e)
    stale = same_bytes(case.a, case.b) & ~right
    if stale.any() and (right | stale).all():
        left = np.broadcast_to(stale.reshape(*case.a.shape[:3], 1), case.a.shape[:-1])
        text = f"does not write {rows_of(stale, case)}: {'it is' if stale.sum() == 1 else 'they are'} as before"
        yield Finding(text, left=left)
        return
    right = (case.a == case.e).all(axis=-1)
    stale = case.is_as_before & ~right
    if not stale.any() or not (right | stale).all() or case.expected.n_blocks == 1:
        return
    columns = stale.reshape(-1, stale.shape[-1]).any(axis=0)
    size = case.expected.codec.block_size
    unit = "elements" if size == 1 else f"blocks of {size}"
    which = f"{unit} {runs_of(np.flatnonzero(columns).tolist())} of its rows"
    which = f"{int(stale.sum()):,} of its {stale.size:,} {unit}" if columns.all() else which
    text = f"does not write {which}: they are as before"
    yield Finding(text, left=stale)
