"""Shared by ops whose state each token changes: `ops.mamba`, `ops.rwkv`, `ops.delta_net`.

Every head of every sequence has a matrix of its own as its state, and processes its tokens one by one. dst has no gaps:
first the results of all tokens, then the states that are kept. All is computed in float32, as in ggml's CPU; the
definitions are equal but for the order of sums; the compiled kernels use its order and what GCC fuses and vectorises
there with AVX-512, where they are byte-equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.registry.params import Params, i32

BOUND = 1e-11  # of states that go from token to token

Floats = NDArray[np.float32]


def halves(dst: Tensor, given: tuple[int, ...], states: tuple[int, ...]) -> tuple[Floats, Floats]:
    """The two parts of dst in these shapes: what the tokens gave, and the states after it."""
    flat, n = dst.view().reshape(-1), prod(given)
    return flat[:n].reshape(given), flat[n:].reshape(states)


def applied(matrices: Floats, vectors: Floats) -> Floats:
    """matrix @ vector for each head."""
    product: Floats = (matrices @ vectors[..., None])[..., 0]
    return product


@dataclass(frozen=True)
class Snapshots(Params):
    """op_params of SSM_SCAN and GATED_DELTA_NET: ggml_ssm_scan, ggml_gated_delta_net.

    K  how many states are wanted: after the last token, the one before it, ...
    """

    K: i32


class Heads(NamedTuple):
    """n_head heads of `size`, of sequences of n_tokens tokens, as kernels get them; all are without gaps.

    state, dst, states  addresses: of the states before all tokens, of what the tokens give, of the states that are kept
    """

    size: int
    n_head: int
    n_tokens: int
    state: int
    dst: int
    states: int


def are_contiguous(*tensors: Tensor) -> bool:
    """Whether all tensors are contiguous."""
    return all(tensor.is_contiguous() for tensor in tensors)


def of_other_size(**tensors: tuple[Tensor, tuple[int, ...]]) -> str | None:
    """The first tensor that does not have the ne it needs, in words."""
    for role, (tensor, ne) in tensors.items():
        if tensor.ne != ne:
            return f"{role} of ne {tensor.ne} instead of {ne}"
    return None


def bad_dst(dst: Tensor, n_elements: int) -> str | None:
    """What is wrong with a dst that must have n_elements contiguous elements."""
    if dst.n_elements != n_elements or not dst.is_contiguous():
        return f"dst of ne {dst.ne}, nb {dst.nb} is no {n_elements} elements without gaps"
    return None
