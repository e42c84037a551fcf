"""Where a device wrote: outside of dst, into its gaps, nothing at all, not all of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graph_runner.diagnosis.case import Case, bytes_of, same_bytes, units_of
from graph_runner.diagnosis.words import rows_of, runs_of
from graph_runner.judging.mistakes import inside


def written_outside(case: Case) -> str | None:
    """Finds that dst is right, or as it was before, and that bytes around it were written."""
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


def _extent(n: int, where: str, case: Case) -> str:
    row = case.expected.codec.block_bytes * case.expected.n_blocks
    stride = case.expected.nb[1] if case.expected.ne[1] > 1 and where == "behind" else row
    rows = n / stride  # behind dst: a gap and a row, each
    as_rows = ": one row too many" if rows == 1 else f": {rows:.0f} rows too many" if rows == int(rows) else ""
    return f"writes up to {n} bytes {where} dst{as_rows}"


def _elsewhere(case: Case) -> str | None:
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
                return f"ignores the offset of dst: the right result lies at byte 0 of the memory, {-shift} too early"
            return f"writes the right result {abs(shift)} bytes too {'late' if shift > 0 else 'early'}"
    if np.array_equal(case.a, case.b):
        return "writes nothing into dst, but bytes outside of it, as where the offset of dst is ignored"
    return None


def in_gaps(case: Case) -> str | None:
    """Finds the right result with bytes written in the gaps between its rows."""
    if not case.data_is_right or case.outside:
        return None
    n = int(np.count_nonzero(bytes_of(case.expected) != bytes_of(case.actual)))
    return f"writes {n} bytes into the gaps between dst's rows (nb {case.expected.nb}); dst itself is right"


def nothing_written(case: Case) -> str | None:
    """Finds dst as it was before."""
    if not np.array_equal(case.a, case.b) or not case.gaps_are_right:
        return None
    return "leaves dst as it was before the node ran"


def stale_rows(case: Case) -> str | None:
    """Finds rows, or elements of all rows, that are as they were before, while all others are right."""
    if not case.gaps_are_right:
        return None
    right = case.same_rows(case.a, case.e)
    stale = same_bytes(case.a, case.b) & ~right
    if stale.any() and (right | stale).all():
        return f"does not write {rows_of(stale, case)}: {'it is' if stale.sum() == 1 else 'they are'} as before"
    right, stale = ((x == y).all(axis=-1) for x, y in ((case.a, case.e), (case.a, case.b)))
    stale &= ~right
    if not stale.any() or not (right | stale).all() or case.expected.n_blocks == 1:
        return None
    columns = stale.reshape(-1, stale.shape[-1]).any(axis=0)
    if columns.all():
        return None
    size = case.expected.codec.block_size
    unit = "elements" if size == 1 else f"blocks of {size}"
    return f"does not write {unit} {runs_of(np.flatnonzero(columns).tolist())} of its rows: they are as before"
