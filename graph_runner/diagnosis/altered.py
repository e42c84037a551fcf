"""Finds a mistake whose node, computed with the project's own definitions, gives the device's bytes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ggml_backend_npu import Node
from ggml_backend_npu.ops import OWN
from graph_runner.diagnosis.case import Case, Finding, bytes_of
from graph_runner.judging.mistakes import mistakes

_WORK = 1 << 26  # elements that the mistakes of one node may take to compute, all in all


def known_mistake(case: Case) -> Iterator[Finding]:
    """Finds a mistake whose node, computed here, gives the device's bytes."""
    if case.baseline is None and case.node.op not in OWN:
        return
    work = 0
    for mistake in mistakes(case.node):
        work += _cost(mistake.node)
        if work > _WORK:
            return
        result = case.run(mistake)
        if result is None:
            continue
        if mistake.unknown is not None:
            result.view()[mistake.unknown] = case.actual.view()[mistake.unknown]
        same = np.array_equal(bytes_of(result), bytes_of(case.actual))
        exactly = "exactly these bytes" if same else "these values"
        but = " in all rows that it is known of" if mistake.unknown is not None else ""
        joined = " it gives" if ": with" in mistake.text else ", which gives"
        yield Finding(f"{mistake.text}{joined} {exactly}{but}", result, mistake.unknown)


def _cost(node: Node) -> int:
    """Returns about how many elements an op goes through."""
    n = node.dst.n_elements
    if node.op in OWN and OWN[node.op].weights and node.src[0] is not None:
        n += n * node.src[0].ne[0] // 64 + node.src[0].n_elements
    return n
