"""Finds which common mistake of a kernel gives exactly the wrong bytes of a node, and says so in one sentence.

`mistakes` alters the node as a kernel with the mistake would see it; here the altered node is computed with the
project's own definitions and compared with what the device wrote. Mistakes that need no node (rows in another order, a
transposed result, nothing written) are looked for in the two results.

A finder returns a sentence about a `case`, or None. The finders are in `written`, `numbers`, `places` and `altered`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ggml_backend_npu import Node, Tensor
from graph_runner.diagnosis.altered import known_mistake
from graph_runner.diagnosis.case import Case
from graph_runner.diagnosis.numbers import (
    in_halves,
    not_finite,
    not_finite_at_all,
    quantised_values,
    rounded_otherwise,
    times_factor,
    times_row_factors,
)
from graph_runner.diagnosis.places import permuted, shifted, transposed
from graph_runner.diagnosis.written import in_gaps, nothing_written, stale_rows, written_outside

__all__ = ["diagnose", "quantised_values"]

_LARGEST = 1 << 28  # bytes of an output that is looked into


def diagnose(node: Node, expected: Tensor, actual: Tensor, before: Tensor, outside: bool) -> str | None:
    """Returns one sentence on the mistake that gives the bytes of actual in place of those of expected; None if none
    does.

    node     its sources still hold what they held when it ran, each with its whole root as memory; dst is not read
    expected, actual, before  like dst, each over memory of its own: the right result, what the device wrote, and what
             dst held before the node ran
    outside  whether bytes around actual were written
    """
    if expected.n_elements <= 0 or expected.nbytes > _LARGEST:
        return None
    case = Case(node, expected, actual, before, outside)
    if case.is_right:
        return None
    for find in _FINDERS:
        with np.errstate(all="ignore"):
            sentence = find(case)
        if sentence is not None:
            also = "; bytes outside of dst are written, too" if outside and find is not written_outside else ""
            return f"{node.op} {sentence}{also}"
    return f"{node.op} writes bytes outside of dst" if outside else None


_FINDERS: tuple[Callable[[Case], str | None], ...] = (
    written_outside,
    in_gaps,
    nothing_written,
    rounded_otherwise,
    not_finite,
    known_mistake,
    stale_rows,
    transposed,
    permuted,
    shifted,
    times_factor,
    in_halves,
    times_row_factors,
    not_finite_at_all,
)
