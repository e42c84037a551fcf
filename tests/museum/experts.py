"""MUL_MAT_ID and ARGSORT: how experts are chosen, and what they compute."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ggml.numerics import Numerics
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.routing import Argsort

CALLS = itertools.count(1)


def right(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    OWN["MUL_MAT_ID"].bind(Node("MUL_MAT_ID", dst, (a, b, ids)), numerics)()


@exhibit("ikawrakow/ik_llama.cpp 446", "CUDA", "MUL_MAT_ID", says="rows that belong elsewhere", model="moe")
def mul_mat_id_of_two_or_three_tokens(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """A kernel was wrong for two or three tokens: seen if an expert had just so many. Here their last one is as the
    first."""
    right(dst, a, b, ids, numerics)
    chosen = ids.view()[0, 0]
    for expert in range(a.ne[2]):
        tokens, slots = np.nonzero(chosen == expert)
        if len(tokens) in (2, 3):
            dst.view()[0, tokens[-1], slots[-1]] = dst.view()[0, tokens[0], slots[0]]


@exhibit("ggml-org/llama.cpp 13294", "CUDA", "MUL_MAT_ID", says="permutes|belong", model="moe", options=("-n", 3))
def mul_mat_id_race(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """A race in the table that says where a row belongs: at some sizes rows were written to others' places. Here two
    are, at each third call."""
    right(dst, a, b, ids, numerics)
    if next(CALLS) % 3 == 0:
        dst.view()[0, 0, :2] = dst.view()[0, 0, 1::-1].copy()


@exhibit(
    "ggml-org/llama.cpp 26310", "CPU (repacked weights)", "MUL_MAT_ID", outcome="missed", model="moe",
    why="No router of llama.cpp names an expert twice for a token. A node of ids that repeat would show it.",
)  # fmt: skip
def mul_mat_id_of_an_expert_twice(dst: Tensor, a: Tensor, b: Tensor, ids: Tensor, numerics: Numerics) -> None:
    """A token that names one expert twice overflowed the expert's list of rows: its rows were computed by others."""
    right(dst, a, b, ids, numerics)
    for token, experts in enumerate(ids.view()[0, 0]):
        if len(np.unique(experts)) < len(experts):
            dst.view()[0, token, -1] = 0


@exhibit(
    "ggml-org/llama.cpp 5213", "CUDA, Metal", "ARGSORT", says="sorts the first 4 elements", model="moe of 6",
)  # fmt: skip
def argsort_of_a_power_of_two(dst: Tensor, x: Tensor, params: Argsort) -> None:
    """Rows were sorted by a network for powers of two, which was not padded: with 6 experts the chosen were others.
    Here what is beyond a power of two is left as it is."""
    n = 1 << (x.ne[0].bit_length() - 1)
    part = np.empty((*x.ne[:0:-1], n), np.int32)
    OWN["ARGSORT"].define(Tensor.of(part), replace(x, ne=(n, *x.ne[1:])), params=params)
    dst.view()[..., :n] = part
    dst.view()[..., n:] = np.arange(n, x.ne[0])
