"""Small synthetic nodes, for what no node of a run could have shown: of the same op and types, with inputs that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.checks import Types
from graph_runner.diff.alone import Alone
from graph_runner.diff.blindness import Blindness, Sight
from graph_runner.diff.explaining import Explainer
from graph_runner.diff.side import Side
from graph_runner.diff.turns import Compared
from graph_runner.judging.copies import Copied
from graph_runner.judging.mistakes import ignored
from graph_runner.judging.results import ISOLATED, NodeResult, Verdict, types_of

_SIZES = (1.0, 1e-2, 1e2, 1e-4, 1e-6, 1e-8)  # of numbers in sources
_POSITIONS = 64  # below which positions are
_FLOATS = ("f32", "f16", "bf16")


class Synthetic:
    """Has the device compute synthetic nodes alone, and judges them as nodes of a run.

    blindness  what the run has not shown, and a node of each op
    """

    def __init__(self, reference: Side, alone: Alone, explainer: Explainer, blindness: Blindness) -> None:
        self._reference, self._alone, self._explainer, self._blindness = reference, alone, explainer, blindness

    def judged(self, step: int) -> Iterator[NodeResult]:
        """Yields the results of nodes that show what the run has not; their sights are synthetic from then on.

        step  that they are said to belong to
        """
        unseen: dict[str, list[Sight]] = defaultdict(list)
        for sight in self._blindness.sights:
            if not sight.is_shown:
                unseen[sight.op].append(sight)
        place = 0
        for op, sights in unseen.items():
            for node in _candidates(op, self._blindness.examples.get(op)):
                if all(sight.is_synthetic for sight in sights):
                    break
                expected = self._expected(node)
                shown = [] if expected is None else self._shown(node, expected, sights)
                found = None if expected is None or not shown else self._judged(node, expected, shown, step, place)
                if found is not None:
                    place += 1
                    yield found

    def _expected(self, node: Node) -> Tensor | None:
        """Returns the reference's result, computed from copies; None if it does not take the node, or gives NaN or
        infinity."""
        if self._reference.refusal(node) is not None:
            return None
        copied = Copied.of(node).node
        self._reference.compute(copied)
        return copied.dst if np.isfinite(copied.dst.view().astype(np.float64)).all() else None

    def _shown(self, node: Node, expected: Tensor, sights: list[Sight]) -> list[Sight]:
        """Returns which sights a node shows, of those that none has shown."""
        without = dict(ignored(node))
        return [
            sight
            for sight in sights
            if not sight.is_synthetic and sight.what in without
            and self._blindness.shows(node, expected, without[sight.what])
        ]  # fmt: skip

    def _judged(self, node: Node, expected: Tensor, shown: list[Sight], step: int, place: int) -> NodeResult | None:
        """Has the device compute a node. Returns the result; None if the device does not take it."""
        compared = self._alone.synthetic(node, expected, step, place)
        if compared is None:
            return None
        for sight in shown:
            sight.is_synthetic = True
        name = f"synthetic, shows {' and '.join(sight.what for sight in shown)}"
        found = NodeResult(
            step, place, node.op, name, types_of(node), node.dst.ne, _verdict(compared), isolated=compared.found,
            failure=compared.failure, wrong_in="" if compared else ISOLATED,
        )  # fmt: skip
        return found if found else self._explainer.explained(found, compared, None)


def _verdict(compared: Compared) -> Verdict:
    if compared.failure is not None:
        return Verdict.FAILED
    if not compared:
        return Verdict.INTRODUCED
    return Verdict.EXACT if compared.found else Verdict.ROUNDING


def _candidates(op: str, example: Node | None) -> Iterator[Node]:
    """Yields a node of the run with other inputs, of several sizes, and then the op's own small nodes of its types, or
    of any if the run has none that is small."""
    random, own = np.random.default_rng(0), OWN[op]
    if example is not None:
        for size in _SIZES:
            yield _with_inputs(example, random, size)
    types: Types = ("f32",) * 9
    if example is not None:
        types = (example.dst.type, *(x.type if x is not None else "f32" for x in example.src), *types)
    n = len(next(iter(own.types))) if own.types else 0
    if own.types is None or types[:n] in own.types:
        for size, make in product(_SIZES, own.makes):
            made = make(random, types)
            yield made if size == _SIZES[0] else _with_inputs(made, random, size)


def _with_inputs(node: Node, random: np.random.Generator, size: float) -> Node:
    """Returns a node over other numbers as large as a size, and over other positions if its op has them; blocks and ids
    stay."""
    made = Copied.of(node).node
    for source in made.src:
        if source is None or not source.nbytes:
            continue
        view = replace(source, memory=replace(source.memory, writable=True)).view()
        with np.errstate(all="ignore"):
            if source.type in _FLOATS:
                view[...] = (random.standard_normal(view.shape) * size).astype(view.dtype)
            elif source.type == "i32" and OWN[node.op].moved:
                view[...] = random.integers(0, _POSITIONS, view.shape)
    return made
