"""RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN: attention by means of a state (`ops.kernels.recurrent`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.recurrent import (
    BOUND,
    Floats,
    Heads,
    applied,
    are_contiguous,
    bad_dst,
    halves,
    of_other_size,
)
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Probe, Types
from ggml_backend_npu.registry.entry import Call, op
from ggml_backend_npu.registry.params import Instead, Params, f32
from ggml_backend_npu.registry.probes import HEADS, TOKENS, normal
from quant.kernels.jit import array_at, compiled, copy, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.matrices import LANES
from quant.kernels.orders import GROUP, dots_f32
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work


@dataclass(frozen=True)
class LinearAttn(Params):
    """op_params of GATED_LINEAR_ATTN: ggml_gated_linear_attn."""

    scale: Annotated[f32, Instead("scale", (1.0,))]


def _refuse_heads(dst: Tensor, state: Tensor, first: Tensor | None = None, **tokens: Tensor) -> str | None:
    """For operands (size, heads, tokens) and a state (any, sequences); `first` is one (size, heads) for all tokens."""
    ne, n_sequences = next(iter(tokens.values())).ne, state.ne[1]
    size, n_head, n_tokens, _ = ne
    if n_sequences < 1 or n_tokens % n_sequences:
        return f"{n_tokens} tokens of {n_sequences} sequences"
    of_a_token = size * n_head
    if first is not None and first.n_elements != of_a_token:
        return f"tf of ne {first.ne} for {n_head} heads of {size}"
    if state.n_elements != of_a_token * size * n_sequences:
        return f"state of ne {state.ne} for {n_head} heads of {size}"
    sizes = of_other_size(**{name: (tensor, (size, n_head, n_tokens, 1)) for name, tensor in tokens.items()})
    return sizes or bad_dst(dst, of_a_token * (n_tokens + size * n_sequences))


def _of_sequences(tensors: tuple[Tensor, ...], n_sequences: int) -> list[Floats]:
    """Operands (size, heads, tokens of all sequences) as (sequences, tokens, heads, size)."""
    return [x.view().reshape(n_sequences, x.ne[2] // n_sequences, x.ne[1], x.ne[0]) for x in tensors]


def _state(dst: Tensor, x: Floats, state: Tensor) -> tuple[Floats, Floats]:
    """The part of dst for the results of x's tokens, and the states, which begin as `state`."""
    n_sequences, _, n_head, size = x.shape
    y, s = halves(dst, x.shape, (n_sequences, n_head, size, size))
    s[...] = state.view().reshape(s.shape)
    return y, s


def _refuse_wkv6(dst: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> str | None:
    return _refuse_heads(dst, state, tf, k=k, v=v, r=r, td=td)


@op("RWKV_WKV6", types=[("f32",) * 7], refuse=_refuse_wkv6, bound=BOUND, wide=True)
@np.errstate(all="ignore")
def rwkv_wkv6(dst: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> None:
    """RWKV-6, token by token: y = r (s + tf * k (outer) v), s = td * s + k (outer) v; r, tf, td, k along s's rows.

    k, v, r, td (size, heads, tokens of all sequences), tf (size, heads), state (size * size * heads, sequences) -> dst:
    y, of k's shape, and then the states. Equals ggml_compute_forward_rwkv_wkv6 but for rounding.
    """
    keys, gains, reads, decays = _of_sequences((k, v, r, td), state.ne[1])
    y, s = _state(dst, keys, state)
    first = tf.view().reshape(*keys.shape[2:], 1)
    for t in range(keys.shape[1]):
        kv = keys[:, t, ..., None] * gains[:, t, :, None]
        y[:, t] = applied((s + first * kv).swapaxes(-1, -2), reads[:, t])
        s *= decays[:, t, ..., None]
        s += kv


def _refuse_gla(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, params: LinearAttn
) -> str | None:
    return _refuse_heads(dst, state, k=k, v=v, q=q, g=g)


@op("GATED_LINEAR_ATTN", types=[("f32",) * 6], refuse=_refuse_gla, params=LinearAttn, bound=BOUND, wide=True)
@np.errstate(all="ignore")
def gated_linear_attn(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, params: LinearAttn
) -> None:
    """Gated linear attention, token by token: s = g * s + k (outer) v, y = q * scale s; q, g and k along s's rows.

    k, v, q, g (size, heads, tokens of all sequences), state (size * size * heads, sequences) -> dst: y, of k's shape,
    and then the states. Equals ggml_compute_forward_gla but for rounding.
    """
    keys, gains, queries, gates = _of_sequences((k, v, q, g), state.ne[1])
    y, s = _state(dst, keys, state)
    queries = queries * np.float32(params.scale)
    for t in range(keys.shape[1]):
        s *= gates[:, t, ..., None]
        s += keys[:, t, ..., None] * gains[:, t, :, None]
        y[:, t] = applied(s.swapaxes(-1, -2), queries[:, t])


@inlined
def _wkv6_row(s, v, y, k, r, first, decay, n):
    """One row of a head's state; its contribution is added to y."""
    row, gain, total = array_at(s, types.float32, n), array_at(v, types.float32, n), array_at(y, types.float32, n)
    for j in range(n):
        kv = gain[j] * k
        total[j] = fused_multiply_add(fused_multiply_add(kv, first, row[j]), r, total[j])
        row[j] = fused_multiply_add(row[j], decay, kv)


@inlined
def _gla_row(s, v, y, k, q, gate, n):
    """As `_wkv6_row`. After the last whole vector, GCC rounds the other one of the two products before it adds them."""
    row, gain, total = array_at(s, types.float32, n), array_at(v, types.float32, n), array_at(y, types.float32, n)
    for j in range(n // LANES * LANES):
        row[j] = fused_multiply_add(row[j], gate, gain[j] * k)
        total[j] = fused_multiply_add(row[j], q, total[j])
    for j in range(n // LANES * LANES, n):
        row[j] = fused_multiply_add(gain[j], k, row[j] * gate)
        total[j] = fused_multiply_add(row[j], q, total[j])


def _heads_of(dst: Tensor, x: Tensor, state: Tensor) -> Heads:
    """The heads of a source x."""
    size, n_head, n_tokens, _ = x.ne
    states = dst.address + 4 * x.n_elements
    return Heads(size, n_head, n_tokens // state.ne[1], state.address, dst.address, states)


class GatedAttention(NamedTuple):
    """Addresses of the sources. first: 0 if there is none; scale: of q."""

    heads: Heads
    k: int
    v: int
    q: int
    first: int
    gates: int
    scale: np.float32


@compiled
def gated_attention(p, begin, end, scratch):
    """A unit is one head of one sequence, of RWKV_WKV6, or of GATED_LINEAR_ATTN, which has no `first`."""
    of = record_at(p, GatedAttention)
    heads, first, scale = of.heads, of.first, of.scale
    size, n_head, n_tokens = heads.size, heads.n_head, heads.n_tokens
    row = 4 * size
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = heads.states + unit * size * row
        copy(heads.state + unit * size * row, s, size * row)
        for t in range(n_tokens):
            at = ((sequence * n_tokens + t) * n_head + head) * row
            keys, reads = array_at(of.k + at, types.float32, size), array_at(of.q + at, types.float32, size)
            decays = array_at(of.gates + at, types.float32, size)
            v, y = of.v + at, heads.dst + at
            array_at(y, types.float32, size)[:] = types.float32(0)
            for i in range(size):
                if first:
                    bonus = array_at(first + head * row, types.float32, size)[i]
                    _wkv6_row(s + i * row, v, y, keys[i], reads[i], bonus, decays[i], size)
                else:
                    _gla_row(s + i * row, v, y, keys[i], reads[i] * scale, decays[i], size)
    return 0


def _gated(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, first: Tensor | None, g: Tensor, state: Tensor, scale: np.float32
) -> Call | None:
    if not are_contiguous(k, v, q, first or k, g, state):
        return None
    of = GatedAttention(
        heads=_heads_of(dst, k, state),
        k=k.address,
        v=v.address,
        q=q.address,
        first=0 if first is None else first.address,
        gates=g.address,
        scale=scale,
    )
    kept = dst, k, v, q, first, g, state
    return Job(Work(gated_attention, of, k.ne[1] * state.ne[1], 4 * k.ne[0] * k.n_elements, keep=kept))


@rwkv_wkv6.compiled
def _rwkv_wkv6(dst: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Call | None:
    return _gated(dst, k, v, r, tf, td, state, np.float32(1))


@gated_linear_attn.compiled
def _gated_linear_attn(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, params: LinearAttn
) -> Call | None:
    return _gated(dst, k, v, q, None, g, state, np.float32(params.scale))


def _refuse_wkv7(
    dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> str | None:
    return _refuse_heads(dst, state, r=r, w=w, k=k, v=v, a=a, b=b)


@op("RWKV_WKV7", types=[("f32",) * 8], refuse=_refuse_wkv7, bound=BOUND, wide=True)
@np.errstate(all="ignore")
def rwkv_wkv7(dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    """RWKV-7, token by token: s = s * w + v (outer) k + (s a) (outer) b, y = s r; w, k and b along s's columns.

    r, w, k, v, a, b (size, heads, tokens of all sequences), state (size * size * heads, sequences) -> dst: y, of r's
    shape, and then the states. Equals ggml_compute_forward_rwkv_wkv7 but for rounding, and except for head sizes that
    its vectors do not divide: with those it reads and writes beyond each row.
    """
    reads, decays, keys, gains, removals, returns = _of_sequences((r, w, k, v, a, b), state.ne[1])
    y, s = _state(dst, reads, state)
    for t in range(reads.shape[1]):
        removed = applied(s, removals[:, t])
        s *= decays[:, t, :, None]
        s += gains[:, t, ..., None] * keys[:, t, :, None]
        s += removed[..., None] * returns[:, t, :, None]
        y[:, t] = applied(s, reads[:, t])


@inlined
def _wkv7_row(s, w, k, b, v, removed, n):
    """One row of a head's state."""
    row, decay = array_at(s, types.float32, n), array_at(w, types.float32, n)
    key, back = array_at(k, types.float32, n), array_at(b, types.float32, n)
    for j in range(n):
        row[j] = fused_multiply_add(removed, back[j], fused_multiply_add(row[j], decay[j], v * key[j]))


class Wkv7(NamedTuple):
    """Addresses of the sources."""

    heads: Heads
    r: int
    w: int
    k: int
    v: int
    a: int
    b: int


@compiled
def wkv7(p, begin, end, dots):
    """A unit is one head of one sequence. dots: of GROUP rows."""
    of = record_at(p, Wkv7)
    heads, removed = of.heads, array_at(dots, types.float32, GROUP)
    size, n_head, n_tokens = heads.size, heads.n_head, heads.n_tokens
    row = 4 * size
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = heads.states + unit * size * row
        copy(heads.state + unit * size * row, s, size * row)
        for t in range(n_tokens):
            at = ((sequence * n_tokens + t) * n_head + head) * row
            gains = array_at(of.v + at, types.float32, size)
            for first in range(0, size, GROUP):
                rows, count = s + first * row, min(GROUP, size - first)
                dots_f32(rows, row, of.a + at, size, dots, count)
                for i in range(count):
                    _wkv7_row(rows + i * row, of.w + at, of.k + at, of.b + at, gains[first + i], removed[i], size)
                dots_f32(rows, row, of.r + at, size, heads.dst + at + 4 * first, count)
    return 0


@rwkv_wkv7.compiled
def _rwkv_wkv7(
    dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Call | None:
    sources = (r, w, k, v, a, b, state)
    if not are_contiguous(*sources):
        return None
    of = Wkv7(
        heads=_heads_of(dst, r, state),
        r=r.address,
        w=w.address,
        k=k.address,
        v=v.address,
        a=a.address,
        b=b.address,
    )
    n_units, n_bytes = r.ne[1] * state.ne[1], 4 * r.ne[0] * r.n_elements
    return Job(Work(wkv7, of, n_units, n_bytes, scratch=4 * GROUP, keep=(dst, sources)))


def _heads(rng: probes.Rng, n: int, decays: int, size: int) -> tuple[list[Tensor], Tensor, tuple[int, ...]]:
    """n sources of heads of a size, one of them decays; a state of two sequences; and the shape of dst."""
    shape, sequences = (1, TOKENS, HEADS, size), 2
    sources = [probes.tensor("f32", rng.uniform(-1, 1, shape)) for _ in range(n)]
    sources[decays] = probes.tensor("f32", rng.uniform(0.5, 1, shape))
    state = normal(rng, "f32", 1, 1, sequences, size * size * HEADS)
    return sources, state, (1, 1, TOKENS + size * sequences, HEADS * size)


def _make_wkv6(size: int = 64) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        sources, state, shape = _heads(rng, 5, 4, size)
        sources[3] = probes.tensor("f32", rng.uniform(-1, 1, (1, 1, HEADS, size)))
        return probes.node("RWKV_WKV6", "f32", shape, *sources, state)

    return make


def _make_gla(size: int = 64) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        sources, state, shape = _heads(rng, 4, 3, size)
        return probes.node("GATED_LINEAR_ATTN", "f32", shape, *sources, state, params=LinearAttn(0.3))

    return make


def _make_wkv7(size: int = 64) -> Make:
    def make(rng: probes.Rng, types: Types) -> Node:
        sources, state, shape = _heads(rng, 6, 1, size)
        sources[4] = probes.tensor("f32", 0.2 * sources[4].view())
        return probes.node("RWKV_WKV7", "f32", shape, *sources, state)

    return make


rwkv_wkv6.nodes(_make_wkv6())
rwkv_wkv6.probes(lambda: [Probe("", probes.of_widths(_make_wkv6))])
gated_linear_attn.nodes(_make_gla())
gated_linear_attn.probes(lambda: [Probe("", probes.of_widths(_make_gla))])
rwkv_wkv7.nodes(_make_wkv7())
rwkv_wkv7.probes(lambda: [Probe("", probes.of_widths(_make_wkv7, (64, 128)), fixed=True)])
