"""GATED_DELTA_NET: the gated delta rule (`ops.kernels.recurrent`)."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.exponentials import expf, scaled
from ggml_backend_npu.ops.kernels.recurrent import (
    BOUND,
    Floats,
    Heads,
    Snapshots,
    applied,
    are_contiguous,
    bad_dst,
    halves,
    of_other_size,
)
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.probes import HEADS, TOKENS, normal
from quant.kernels.jit import array_at, compiled, copy, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.orders import GROUP, dots_f32
from quant.kernels.records import Place, record_at, row_of
from quant.kernels.threads import Job, Work


def _refuse_delta(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Snapshots
) -> str | None:
    size, n_head, n_tokens, n_sequences = v.ne
    count = params.K
    if count < 1:
        return f"{count} states"
    for role, tensor in (("q", q), ("k", k)):
        if not tensor.ne[1] or not tensor.ne[3] or n_sequences % tensor.ne[3]:
            return f"{role} of ne {tensor.ne} does not repeat to v of ne {v.ne}"
    return of_other_size(
        q=(q, (size, q.ne[1], n_tokens, q.ne[3])),
        k=(k, (size, k.ne[1], n_tokens, k.ne[3])),
        g=(g, (1 if g.ne[0] == 1 else size, *v.ne[1:])),
        beta=(beta, (1, *v.ne[1:])),
        state=(state, (size, size, n_head, n_sequences)),
    ) or bad_dst(dst, v.n_elements + count * state.n_elements)


def _repeated(x: Tensor, v: Tensor) -> Floats:
    """x with the heads and sequences of v: its heads repeat as a whole, each sequence several times in a row."""
    sequences = np.arange(v.ne[3]) // (v.ne[3] // x.ne[3])
    spread: Floats = x.view()[sequences][:, :, np.arange(v.ne[1]) % x.ne[1]]
    return spread


@op(
    "GATED_DELTA_NET",
    types=[("f32",) * 7],
    refuse=_refuse_delta,
    params=Snapshots,
    bound=BOUND,
    wide=True,
    built_by={"ggml_gated_delta_net": "ctttttt l"},
)
@np.errstate(all="ignore")
def gated_delta_net(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Snapshots
) -> None:
    """The gated delta rule, token by token: s = s * exp(g), s += (v - s k) * beta (outer) k, y = s q / sqrt(size).

    v (size, heads, tokens, sequences), q and k the same or with fewer heads or sequences, which then repeat; g (size,
    heads, tokens, sequences), along s's columns, or (1, ...), beta (1, ...), state (size, size, heads, sequences) ->
    dst: y, of v's shape, and then K times the states of all sequences: after the last token, the one before it, ...
    States for which there is no token stay as they are in dst. Equals ggml_compute_forward_gated_delta_net but for
    rounding.
    """
    count, n_tokens, size = params.K, v.ne[2], np.float32(v.ne[0])
    y, states = halves(dst, v.view().shape, (count, *state.view().shape))
    s, queries, keys = states[0], _repeated(q, v), _repeated(k, v)
    s[...] = state.view()
    for t in range(n_tokens):
        s *= np.exp(g.view()[:, t, :, None])
        delta = (v.view()[:, t] - applied(s, keys[:, t])) * beta.view()[:, t]
        s += delta[..., None] * keys[:, t, :, None]
        y[:, t] = applied(s, queries[:, t]) * (1 / np.sqrt(size))
        if 0 < n_tokens - 1 - t < count:
            states[n_tokens - 1 - t] = s


@inlined
def _scaled_by(x, factors, n):
    row, by = array_at(x, types.float32, n), array_at(factors, types.float32, n)
    for i in range(n):
        row[i] *= by[i]


@inlined
def _add_scaled(x, y, factor, n):
    """x += y * factor"""
    row, added = array_at(x, types.float32, n), array_at(y, types.float32, n)
    for i in range(n):
        row[i] = fused_multiply_add(added[i], factor, row[i])


class Repeated(NamedTuple):
    """A source of n_head heads, which repeat, and of sequences, each of which serves `repeats` sequences in a row."""

    place: Place
    n_head: int
    repeats: int


class DeltaNet(NamedTuple):
    """g, beta  addresses; by_element: g has one number per element of a row
    scale    of what the tokens give
    n_kept   how many states are wanted, each of all sequences
    """

    heads: Heads
    q: Repeated
    k: Repeated
    v: Place
    g: int
    by_element: int
    beta: int
    scale: np.float32
    n_kept: int
    n_sequences: int


@inlined
def _head_of(source, head, t, sequence):
    """Address of a repeated source's row for a head."""
    return row_of(source.place, head % source.n_head, t, sequence // source.repeats)


@compiled
def delta_net(p, begin, end, scratch):
    """A unit is one head of one sequence. Scratch: the decays of a row, and the dots of GROUP rows."""
    of = record_at(p, DeltaNet)
    heads, v, n_kept, scale = of.heads, of.v, of.n_kept, of.scale
    size, n_head, n_tokens = heads.size, heads.n_head, heads.n_tokens
    row, head_bytes = 4 * size, 4 * size * size
    all_decays, all_found = scratch, scratch + 4 * size
    decays, found = array_at(all_decays, types.float32, size), array_at(all_found, types.float32, GROUP)
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = heads.states + unit * head_bytes
        copy(heads.state + unit * head_bytes, s, head_bytes)
        for t in range(n_tokens):
            token = (sequence * n_tokens + t) * n_head + head
            y = heads.dst + token * row
            query, key = _head_of(of.q, head, t, sequence), _head_of(of.k, head, t, sequence)
            value = array_at(row_of(v, head, t, sequence), types.float32, size)
            strength = array_at(of.beta + 4 * token, types.float32, 1)[0]
            if of.by_element:
                gate = array_at(of.g + token * row, types.float32, size)
                for i in range(size):
                    decays[i] = expf(gate[i])
            else:
                decays[:] = expf(array_at(of.g + 4 * token, types.float32, 1)[0])
            for first in range(0, size, GROUP):
                rows, count = s + first * row, min(GROUP, size - first)
                for i in range(count):
                    _scaled_by(rows + i * row, all_decays, size)
                dots_f32(rows, row, key, size, all_found, count)
                for i in range(count):
                    _add_scaled(rows + i * row, key, (value[first + i] - found[i]) * strength, size)
                dots_f32(rows, row, query, size, y + 4 * first, count)
            scaled(y, size, scale)
            before_last = n_tokens - 1 - t
            if before_last > 0 and before_last < n_kept:
                copy(s, s + before_last * of.n_sequences * n_head * head_bytes, head_bytes)
    return 0


@gated_delta_net.compiled
def _gated_delta_net(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Snapshots
) -> Call | None:
    if not are_contiguous(g, beta, state) or not all(tensor.has_contiguous_rows() for tensor in (q, k, v)):
        return None
    size, n_head, n_tokens, n_sequences = v.ne
    of = DeltaNet(
        heads=Heads(size, n_head, n_tokens, state.address, dst.address, dst.address + 4 * v.n_elements),
        q=Repeated(q.place, q.ne[1], n_sequences // q.ne[3]),
        k=Repeated(k.place, k.ne[1], n_sequences // k.ne[3]),
        v=v.place,
        g=g.address,
        by_element=g.ne[0] != 1,
        beta=beta.address,
        scale=1 / np.sqrt(np.float32(size)),
        n_kept=params.K,
        n_sequences=n_sequences,
    )
    n_bytes, scratch, kept = 4 * size * v.n_elements, 4 * (size + GROUP), (dst, q, k, v, g, beta, state)
    return Job(Work(delta_net, of, n_head * n_sequences, n_bytes, scratch=scratch, keep=kept))


def _make(size: int = 32, gates: bool = False) -> Make:
    """Heads of a size. gates: one per element of a row."""

    def make(rng: probes.Rng, types: Types) -> Node:
        n = 2  # sequences
        q, k = (normal(rng, "f32", n, TOKENS, 2, size, size=size**-0.5) for _ in range(2))
        v, state = normal(rng, "f32", n, TOKENS, HEADS, size), normal(rng, "f32", n, HEADS, size, size)
        g = probes.tensor("f32", rng.uniform(-1, 0, (n, TOKENS, HEADS, size if gates else 1)))
        beta = probes.tensor("f32", rng.uniform(0, 1, (n, TOKENS, HEADS, 1)))
        shape = (1, 1, n * (TOKENS + size), HEADS * size)
        return probes.node("GATED_DELTA_NET", "f32", shape, q, k, v, g, beta, state, params=Snapshots(1))

    return make


gated_delta_net.nodes(_make())


@gated_delta_net.probes
def _of_gates() -> list[Probe]:
    return [Probe("", (*probes.of_widths(_make), *probes.of_widths(partial(_make, gates=True), (7, 16, 40))))]
