"""Faults of fused operators: what is done to the memory of their nodes after the operator's call."""

from collections.abc import Sequence

import numpy as np
from kit.faults import named, spoils

from ggml_backend_npu import Node

RESULTS: dict[object, np.ndarray] = {}


@spoils("masked_softmax", "SOFT_MAX")
def masked_softmax_is_off(nodes: Sequence[Node]) -> None:
    """masked_softmax, the operator, that leaves out the first cell."""
    nodes[0].dst.view()[..., 0] = 0


@spoils("masked_softmax", "SOFT_MAX")
def masked_softmax_is_off_in_place(nodes: Sequence[Node]) -> None:
    """masked_softmax, the operator, that is wrong where its output lies on its source."""
    dst, x = nodes[0].dst, nodes[0].src[0]
    if x is not None and dst.overlaps(x):
        dst.view()[..., 0] *= 2


@spoils("masked_softmax", "SOFT_MAX", at=named("kq_soft_max-1"), repeat=8, remembers=True)
def masked_softmax_is_stale(nodes: Sequence[Node]) -> None:
    """masked_softmax, the operator, that gives its first result of each shape for ever."""
    dst = nodes[0].dst
    dst.view()[...] = RESULTS.setdefault(dst.ne, dst.view().copy())


@spoils("token_shift", "ADD", at=lambda node: node.dst.ne[3] > 1, model="rwkv7")
def token_shift_is_off(nodes: Sequence[Node]) -> None:
    """token_shift, the operator, that leaves out the last token of each mixture."""
    nodes[-1].dst.view()[..., -1, :] = 0


@spoils("TopKSoftmax", "DIV", model="moe")
def top_k_softmax_is_off(nodes: Sequence[Node]) -> None:
    """TopKSoftmax, the operator, with the weights of the chosen experts in the other order."""
    weights = nodes[-1].dst
    weights.view()[...] = weights.view()[..., ::-1].copy()
