"""NaN and infinity in a run: where they began, and what ggml leaves undefined about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from graph_runner.judging.compare import values
from quant import codec

_FLOATS = ("f32", "f16", "bf16")


@dataclass
class Spoilt:
    """A run that holds NaN or infinity. -inf alone is what masks hold, and counts in products with weights.

    step, index, node  the first node whose result holds one
    began     what it had that from: a source that holds one, or the node itself
    n_nodes   how many nodes have such results
    n_undefined  how many nodes quantise one, so that ggml does not define their bytes
    """

    step: int
    index: int
    node: str
    began: str
    n_nodes: int = 1
    n_undefined: int = 0

    def __str__(self) -> str:
        line = (
            f"NaN or infinity from step {self.step} node {self.index}, {self.node}, on: {self.began}; of the "
            f"{self.n_nodes:,} nodes with such results it is compared where these are, not what they would be"
        )
        if not self.n_undefined:
            return line
        return (
            f"{line}; {self.n_undefined:,} quantise them, which ggml leaves undefined: after these, bytes say nothing"
        )


class Watch:
    """Looks for NaN and infinity in the results of a run."""

    def __init__(self) -> None:
        self.found: Spoilt | None = None

    def look(self, step: int, index: int, node: Node, result: Tensor, leaves: Iterable[str]) -> None:
        """Looks at a node of the reference's run, whose sources hold what it read, and at its result.

        leaves  names of the sources that no node computes
        """
        if self.found is not None and is_undefined(node).any():
            self.found.n_undefined += 1
        if _is_a_part(node) or not _is_spoilt(result, minus=_multiplies_weights(node)):
            return
        if self.found is not None:
            self.found.n_nodes += 1
            return
        self.found = Spoilt(step, index, str(node), _began(node, leaves))


def _is_a_part(node: Node) -> bool:
    """Whether the node writes a part of its dst, which may be a whole cache."""
    return node.op in OWN and OWN[node.op].keeps


def _multiplies_weights(node: Node) -> bool:
    """Whether -inf in its result is no mask's."""
    return node.op in OWN and OWN[node.op].weights


def _began(node: Node, leaves: Iterable[str]) -> str:
    """What the first node whose result holds NaN or infinity had that from: a source that holds NaN or +inf, else one
    that holds -inf and is no mask."""
    roles = (*(OWN[node.op].sources if node.op in OWN else ()), *[""] * len(node.src))
    sources = [(source, role) for source, role in zip(node.src, roles, strict=False) if source is not None]
    for minus in (False, True):
        for source, role in sources:
            if _is_spoilt(source, minus=minus and role != "mask", every_type=True):
                whose = "the weight or input" if source.name in leaves else "its source"
                return f"{whose} {source.name!r} holds {_first(source, minus=minus)}"
    return "its inputs hold none"


def _is_spoilt(tensor: Tensor, *, minus: bool, every_type: bool = False) -> bool:
    """Whether a tensor of floats, or of blocks if `every_type`, holds NaN or +inf, or -inf if `minus`."""
    if tensor.type in _FLOATS:
        view = tensor.view()
        with np.errstate(invalid="ignore"):  # a NaN is the largest and the smallest
            good = bool(view.max(initial=-np.inf) < np.inf)
            return not (good and (not minus or bool(view.min(initial=np.inf) > -np.inf)))
    return every_type and codec(tensor.type).is_quantized and not bool(_good(values(tensor), minus).all())


def _good(x: NDArray[np.float64], minus: bool) -> NDArray[np.bool_]:
    """Which numbers are neither NaN nor +inf, nor -inf if `minus`."""
    return np.isfinite(x) if minus else x < np.inf


def _first(tensor: Tensor, *, minus: bool) -> str:
    """The first NaN or infinity of a tensor, and its place."""
    x = values(tensor)
    at = np.unravel_index(int(np.argmin(_good(x, minus))), x.shape)
    return f"{x[at]:g} at [{', '.join(str(i) for i in at)}]"


def is_undefined(node: Node) -> NDArray[np.bool_]:
    """Which elements or blocks of dst ggml leaves undefined, (ne3, ne2, ne1, ne0); empty where it leaves none."""
    op = OWN.get(node.op)
    if op is None or op.unset is None or op.lacks_sources(node):
        return np.zeros(0, np.bool_)
    tensors, keywords = op.arguments(node)
    return op.unset(*tensors, **keywords)


def defined(node: Node, expected: Tensor, actual: Tensor) -> Tensor:
    """A node's result, with the expected one's elements or blocks if ggml leaves them undefined, and its NaN if both
    computed one: which NaN is chosen by the compiler, by the order of operands. The result itself if there are none."""
    found = is_undefined(node), _computed_nan(node, expected, actual), _without_scale(expected, actual)
    flags = [each for each in found if each.any()]
    if not flags:
        return actual
    span = Memory(actual.address, actual.nbytes, owner=actual.memory).bytes().copy()
    patched = replace(actual, memory=Memory.of(span), offset=0)
    for each in flags:
        patched.view()[each] = expected.view()[each]
    return patched


def _without_scale(expected: Tensor, actual: Tensor) -> NDArray[np.bool_]:
    """Which blocks of iq4_nl have a scale of 0 in both results: quantize_row_iq4_nl leaves their quants as they are in
    memory if no value is 1e-15 or more."""
    if expected.type != "iq4_nl":
        return np.zeros(0, np.bool_)
    scales = np.concatenate([each.view()[..., :2] for each in (expected, actual)], axis=-1)
    return np.logical_not(np.asarray(scales.any(axis=-1)))


def _computed_nan(node: Node, expected: Tensor, actual: Tensor) -> NDArray[np.bool_]:
    """Which elements are NaN in both results; empty for an op that moves the NaN of its sources."""
    op = OWN.get(node.op)
    if op is None or not op.has_formula or actual.type not in _FLOATS:
        return np.zeros(0, np.bool_)
    found: NDArray[np.bool_] = np.isnan(values(expected)) & np.isnan(values(actual))
    return found
