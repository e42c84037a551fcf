"""Finds which common mistake of a kernel gives exactly the wrong bytes of a node, and says so in one sentence.

`mistakes` alters the node as a kernel with the mistake would see it; here the altered node is computed with the
project's own definitions and compared with what the device wrote. Mistakes that need no node (rows in another order, a
transposed result, nothing written) are looked for in the two results.

A finder yields findings about a `case`: sentences, each with what dst holds if it is true. The first that the results
bear out is the diagnosis. The finders are in `written`, `numbers`, `places`, `parts` and `altered`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ggml_backend_npu import Node, Tensor
from graph_runner.diagnosis.altered import known_mistake
from graph_runner.diagnosis.case import Again, Case, Finding
from graph_runner.diagnosis.numbers import (
    in_halves,
    not_finite,
    not_finite_at_all,
    other_zeros,
    quantised_values,
    rounded_otherwise,
    times_factor,
    times_row_factors,
    zero_rows,
)
from graph_runner.diagnosis.parts import left_out
from graph_runner.diagnosis.places import permuted, shifted, transposed
from graph_runner.diagnosis.written import added, in_gaps, nothing_written, stale_rows, written_outside

__all__ = ["diagnose", "quantised_values"]

_LARGEST = 1 << 28  # bytes of an output that is looked into


def diagnose(
    node: Node, expected: Tensor, actual: Tensor, before: Tensor | None, outside: bool, again: Again | None = None
) -> str | None:
    """Returns one sentence on the mistake that gives the bytes of actual in place of those of expected; None if none
    does.

    node     its sources still hold what they held when it ran, each with its whole root as memory; dst is not read
    expected, actual, before  like dst, each over memory of its own: the right result, what the device wrote, and what
             dst held before the node ran, or None if that is not known
    outside  whether bytes around actual were written
    again    has the device compute the node over another content of dst; None if it cannot
    """
    if expected.n_elements <= 0 or expected.nbytes > _LARGEST:
        return None
    case = Case(node, expected, actual, before, outside, again)
    if case.is_right:
        return None
    for find in _FINDERS:
        with np.errstate(all="ignore"):
            found = next((finding for finding in find(case) if case.bears_out(finding)), None)
        if found is not None:
            also = "; bytes outside of dst are written, too" if outside and find is not written_outside else ""
            return f"{node.op} {found.text}{also}"
    return f"{node.op} writes bytes outside of dst" if outside else None


_FINDERS: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    written_outside,
    in_gaps,
    nothing_written,
    added,
    other_zeros,
    rounded_otherwise,
    not_finite,
    known_mistake,
    stale_rows,
    zero_rows,
    transposed,
    permuted,
    shifted,
    left_out,
    times_factor,
    in_halves,
    times_row_factors,
    not_finite_at_all,
)
