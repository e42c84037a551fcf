"""Faults of ROPE."""

import ctypes
from dataclasses import replace

import numpy as np
from kit.faults import fault

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.rope import Rope


@fault("ROPE", says="takes 500000 for the frequency base")
def rope_other_base(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE with a base of 500000."""
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, freq_base=5e5))


@fault("ROPE", never=("permutes",))
def rope_next_position(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE with positions off by one."""
    OWN["ROPE"].bind(Node("ROPE", dst, (x, Tensor.of(positions.view() + 1), factors), params.packed))()


@fault("ROPE")
def rope_other_pairs(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE of the other pairs: neighbours in place of halves, or halves in place of neighbours."""
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, mode=params.mode ^ 2))


@fault("ROPE", says="takes 0.5 for the frequency scale")
def rope_half_scale(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE with half its freq_scale."""
    OWN["ROPE"].define(dst, x, positions, factors, params=replace(params, freq_scale=0.5))


@fault("ROPE", "runs", step=1)
def rope_of_one_token(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE that is wrong where there is one token."""
    OWN["ROPE"].bind(Node("ROPE", dst, (x, positions, factors), params.packed))()
    if dst.ne[2] == 1:
        dst.view()[..., 0] = x.view()[..., 0]


@fault("ROPE", "runs", step=2, steps=2)
def rope_up_to_27(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE whose table of angles ends at position 26."""
    OWN["ROPE"].bind(Node("ROPE", dst, (x, Tensor.of(np.minimum(positions.view(), 26)), factors), params.packed))()


@fault("ROPE", "ends", step=1, failure=("SIGSEGV",), rounded=False)
def rope_of_one_token_reads_address_0(
    dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope
) -> None:
    """ROPE that reads address 0 where there is one token."""
    OWN["ROPE"].bind(Node("ROPE", dst, (x, positions, factors), params.packed))()
    if dst.ne[2] == 1:
        ctypes.string_at(0)


@fault("ROPE", "ends", failure=("RecursionError",), rounded=False)
def rope_recurs(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """ROPE that calls itself without an end."""
    again(dst)


def again(dst: Tensor) -> None:
    again(dst)
