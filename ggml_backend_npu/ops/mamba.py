"""SSM_CONV, SSM_SCAN: Mamba's convolution, and the scan of its states (`ops.kernels.recurrent`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.ir import Node, Tensor
from ggml_backend_npu.ops.kernels.exponentials import expf
from ggml_backend_npu.ops.kernels.recurrent import (
    BOUND,
    Snapshots,
    applied,
    bad_dst,
    halves,
    of_other_size,
)
from ggml_backend_npu.registry import probes
from ggml_backend_npu.registry.checks import Make, Mistake, Probe, Types
from ggml_backend_npu.registry.entry import Call, KernelError, op
from ggml_backend_npu.registry.mistakes import made
from ggml_backend_npu.registry.probes import HEADS, TOKENS, normal
from quant.kernels.jit import array_at, compiled, copy, fused_multiply_add, inlined
from quant.kernels.late import types
from quant.kernels.orders import GROUP, STEP, VECTOR, dots_f32
from quant.kernels.records import Place, record_at, row_of
from quant.kernels.threads import Job, Work

_CHANNELS = 16  # of a convolution whose results fill a cache line


def _refuse_conv(dst: Tensor, x: Tensor, weights: Tensor) -> str | None:
    n_conv, n_channels = weights.ne[:2]
    if min(n_conv, x.ne[0] - n_conv + 1) < 1:
        return f"{n_conv} weights for rows of {x.ne[0]}"
    return of_other_size(
        x=(x, (x.ne[0], n_channels, x.ne[2], 1)),
        weights=(weights, (n_conv, n_channels, 1, 1)),
        dst=(dst, (n_channels, x.ne[0] - n_conv + 1, x.ne[2], 1)),
    )


@op("SSM_CONV", types=[("f32", "f32", "f32")], refuse=_refuse_conv, bound=1e-12, wide=True)
@np.errstate(all="ignore")
def ssm_conv(dst: Tensor, x: Tensor, weights: Tensor) -> None:
    """dst[t, channel] = sum of x[channel, t + i] * weights[channel, i] over i: each channel has its own convolution.

    x (n_conv - 1 + tokens, channels, sequences), weights (n_conv, channels) -> dst (channels, tokens, sequences).
    Equals ggml_compute_forward_ssm_conv but for rounding.
    """
    windows = np.lib.stride_tricks.sliding_window_view(x.view()[0], weights.ne[0], axis=-1)
    dst.view()[0] = np.einsum("scti,ci->stc", windows, weights.view()[0, 0])


class Convolution(NamedTuple):
    """n_conv weights per channel."""

    x: Place
    weights: Place
    dst: Place
    n_conv: int
    n_tokens: int
    n_sequences: int


@compiled
def convolve(p, begin, end, scratch):
    """A unit is one channel of all sequences. Products are added one after the other: those of whole vectors of
    weights are rounded first, those of the rest are fused with their additions."""
    of = record_at(p, Convolution)
    x, weights, dst, n_conv = of.x, of.weights, of.dst, of.n_conv
    rounded = n_conv // VECTOR * VECTOR
    for sequence in range(of.n_sequences):
        for first in range(begin, end, _CHANNELS):
            for t in range(of.n_tokens):
                for channel in range(first, min(first + _CHANNELS, end)):
                    window = row_of(x, channel, sequence, 0) + t * x.nb[0]
                    factors = row_of(weights, channel, 0, 0)
                    total = types.float32(0)
                    for i in range(n_conv):
                        factor = array_at(factors + i * weights.nb[0], types.float32, 1)[0]
                        value = array_at(window + i * x.nb[0], types.float32, 1)[0]
                        fused = fused_multiply_add(value, factor, total)
                        total = total + value * factor if i < rounded else fused
                    to = row_of(dst, t, sequence, 0) + channel * dst.nb[0]
                    array_at(to, types.float32, 1)[0] = total
    return 0


@ssm_conv.compiled
def _ssm_conv(dst: Tensor, x: Tensor, weights: Tensor) -> Call:
    n_conv, n_channels = weights.ne[:2]
    _, n_tokens, n_sequences, _ = dst.ne
    of = Convolution(x.place, weights.place, dst.place, n_conv, n_tokens, n_sequences)
    return Job(Work(convolve, of, n_channels, 4 * n_conv * dst.n_elements, keep=(dst, x, weights)))


def _make_conv(width: int = 4) -> Make:
    """Channels of `width` weights."""

    def make(rng: probes.Rng, types: Types) -> Node:
        x, weights = normal(rng, "f32", 1, 2, 70, width + 8), normal(rng, "f32", 1, 1, 70, width)
        return probes.node("SSM_CONV", "f32", (1, 2, 9, 70), x, weights)

    return make


ssm_conv.nodes(_make_conv())
ssm_conv.probes(lambda: [Probe("", probes.of_widths(_make_conv))])


# SSM_SCAN


def _refuse_scan(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Snapshots
) -> str | None:
    n_state, (dim, n_head, n_tokens, n_sequences), n_group = s.ne[0], x.ne, b.ne[1]
    count = params.K
    if count < 1 or (count > 1 and a.ne[0] != 1):
        return f"{count} states of a decay of ne {a.ne}"
    if not n_group or n_head % n_group:
        return f"{n_head} heads in {n_group} groups"
    return of_other_size(
        s=(s, (n_state, dim, n_head, s.ne[3])),
        dt=(dt, (n_head, n_tokens, n_sequences, 1)),
        A=(a, (1 if a.ne[0] == 1 else n_state, n_head, 1, 1)),
        B=(b, (n_state, n_group, n_tokens, n_sequences)),
        C=(c, b.ne),
        ids=(ids, (n_sequences, 1, 1, 1)),
    ) or bad_dst(dst, x.n_elements + count * n_state * dim * n_head * n_sequences)


def _bad_sequence(ids: Tensor, place: int, n: int) -> KernelError:
    return KernelError(f"state {ids.view()[0, 0, 0, place]} of sequence {place} is outside 0..{n - 1}")


@op(
    "SSM_SCAN",
    types=[(*["f32"] * 7, "i32")],
    refuse=_refuse_scan,
    params=Snapshots,
    bound=BOUND,
    judged_by="x",
    wide=True,
    built_by={"ggml_ssm_scan": "cttttttt l"},
)
@np.errstate(all="ignore")
def ssm_scan(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Snapshots
) -> None:
    """Mamba's selective scan, token by token: s = s * exp(dt * A) + x * dt (outer) B, y = s C; dt through a softplus.

    s (state, dim, heads, any), of which each sequence starts from the one that ids names, x (dim, heads, tokens,
    sequences), dt (heads, tokens, sequences), A (state, heads) or, one for a head's whole state, (1, heads), B and C
    (state, groups, tokens, sequences), each group for several heads in a row -> dst: y, of x's shape, and then K times
    the states of all sequences: after the last token, the one before it, ... States for which there is no token stay as
    they are in dst. Equals ggml_compute_forward_ssm_scan but for rounding. Raises KernelError for an id outside s.
    """
    n_sequences, n_tokens, n_head, dim = x.view().shape
    count = params.K
    y, states = halves(dst, x.view().shape, (count, n_sequences, n_head, dim, s.ne[0]))
    rows = ids.view()[0, 0, 0]
    bad = (rows < 0) | (rows >= s.ne[3])
    if bad.any():
        raise _bad_sequence(ids, int(bad.argmax()), s.ne[3])
    state, per_group = states[0], n_head // b.ne[1]
    state[...] = s.view()[rows]
    steps = dt.view()[0]
    steps = np.where(steps > 20, steps, np.log(1 + np.exp(steps)))
    for t in range(n_tokens):
        step = steps[:, t, :, None, None]
        to_state, from_state = (np.repeat(v.view()[:, t], per_group, axis=1) for v in (b, c))
        state *= np.exp(step * a.view()[0, 0, :, None])
        state += to_state[:, :, None] * (x.view()[:, t, ..., None] * step)
        y[:, t] = applied(state, from_state)
        if 0 < n_tokens - 1 - t < count:
            states[n_tokens - 1 - t] = state


@inlined
def _scan_row(s, decay, b, x, n):
    """One row of a head's state: s = s * decay + b * x."""
    row, to_state = array_at(s, types.float32, n), array_at(b, types.float32, n)
    for i in range(n):
        row[i] = fused_multiply_add(row[i], decay, to_state[i] * x)


@inlined
def _scan_row_by_element(s, a, b, c, x, step, n):
    """As `_scan_row`, but every element has its own decay. Returns s . c, added one after the other."""
    row, rate = array_at(s, types.float32, n), array_at(a, types.float32, n)
    to_state, from_state = array_at(b, types.float32, n), array_at(c, types.float32, n)
    y = types.float32(0)
    for i in range(n):
        row[i] = value = fused_multiply_add(row[i], expf(step * rate[i]), to_state[i] * x)
        y = fused_multiply_add(value, from_state[i], y)
    return y


@inlined
def _read_rows(s, c, n, to, count):
    """s . c of `count` rows: the last n % STEP products are added one after the other."""
    dots_f32(s, 4 * n, c, n // STEP * STEP, to, count)
    read, found = array_at(c, types.float32, n), array_at(to, types.float32, count)
    for r in range(count):
        row = array_at(s + 4 * n * r, types.float32, n)
        total = found[r]
        for i in range(n // STEP * STEP, n):
            total = fused_multiply_add(row[i], read[i], total)
        found[r] = total


class Scan(NamedTuple):
    """The sources, and where dst has what the tokens give and the states that are kept.

    n_states    states that ids may name
    n_state     elements of a state's row; a head has dim rows
    per_group   heads that share B and C
    n_kept      states that are wanted
    by_element  every element of a state has its own decay
    """

    s: Place
    x: Place
    dt: Place
    a: Place
    b: Place
    c: Place
    ids: Place
    y: int
    states: int
    n_states: int
    n_state: int
    dim: int
    n_head: int
    per_group: int
    n_tokens: int
    n_sequences: int
    n_kept: int
    by_element: int


@compiled
def scan(p, begin, end, scratch):
    """A unit is one head of one sequence. Returns 1 + the index of a sequence whose id names no state, or 0."""
    of = record_at(p, Scan)
    x, n_state, dim, n_head, n_tokens = of.x, of.n_state, of.dim, of.n_head, of.n_tokens
    row, head_bytes = 4 * n_state, 4 * n_state * dim
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        place = types.int64(array_at(of.ids.address + sequence * of.ids.nb[0], types.int32, 1)[0])
        if place < 0 or place >= of.n_states:
            return sequence + 1
        state = of.states + unit * head_bytes
        for i in range(dim):
            copy(row_of(of.s, i, head, place), state + i * row, row)
        group = head // of.per_group
        rate = row_of(of.a, head, 0, 0)
        for t in range(n_tokens):
            step = array_at(row_of(of.dt, t, sequence, 0) + head * of.dt.nb[0], types.float32, 1)[0]
            if not step > types.float32(20):
                step = np.log(types.float32(1) + expf(step))
            to_state, from_state = row_of(of.b, group, t, sequence), row_of(of.c, group, t, sequence)
            x_head = row_of(x, head, t, sequence)
            given = of.y + 4 * dim * ((sequence * n_tokens + t) * n_head + head)
            if of.by_element:
                found = array_at(given, types.float32, dim)
                for i in range(dim):
                    x_step = array_at(x_head + i * x.nb[0], types.float32, 1)[0] * step
                    found[i] = _scan_row_by_element(state + i * row, rate, to_state, from_state, x_step, step, n_state)
            else:
                decay = expf(step * array_at(rate, types.float32, 1)[0])
                for first in range(0, dim, GROUP):
                    count = min(GROUP, dim - first)
                    for i in range(first, first + count):
                        x_step = array_at(x_head + i * x.nb[0], types.float32, 1)[0] * step
                        _scan_row(state + i * row, decay, to_state, x_step, n_state)
                    _read_rows(state + first * row, from_state, n_state, given + 4 * first, count)
            before_last = n_tokens - 1 - t
            if before_last > 0 and before_last < of.n_kept:
                copy(state, state + before_last * of.n_sequences * n_head * head_bytes, head_bytes)
    return 0


@ssm_scan.compiled
def _ssm_scan(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Snapshots
) -> Call | None:
    if not all(tensor.has_contiguous_rows() for tensor in (s, a, b, c)):
        return None
    n_state, (dim, n_head, n_tokens, n_sequences) = s.ne[0], x.ne
    by_element = a.ne[0] != 1
    of = Scan(
        s=s.place,
        x=x.place,
        dt=dt.place,
        a=a.place,
        b=b.place,
        c=c.place,
        ids=ids.place,
        y=dst.address,
        states=dst.address + 4 * x.n_elements,
        n_states=s.ne[3],
        n_state=n_state,
        dim=dim,
        n_head=n_head,
        per_group=n_head // b.ne[1],
        n_tokens=n_tokens,
        n_sequences=n_sequences,
        n_kept=params.K,
        by_element=by_element,
    )
    n_bytes = 4 * n_state * x.n_elements * (4 if by_element else 1)
    kept = dst, s, x, dt, a, b, c

    def failed(status: int) -> Exception:
        return _bad_sequence(ids, status - 1, s.ne[3])

    return Job(Work(scan, of, n_head * n_sequences, n_bytes, keep=kept, failed=failed))


@ssm_scan.mistakes
def _mistaken(
    node: Node, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor
) -> Iterator[Mistake]:
    """A wrong mapping from heads to the groups of B and C."""
    n_head, n_group = x.ne[1], b.ne[1]
    if 1 < n_group < n_head:
        of_heads = np.arange(n_head) % n_group
        groups = (made(each, each.view()[:, :, of_heads]) for each in (b, c))
        text = f"has head h take group h % {n_group} of src4 and src5, not h // {n_head // n_group}"
        yield Mistake(text, replace(node, src=(s, x, dt, a, *groups, ids)))


def _make_scan(n_state: int = 32, dim: int = 16) -> Make:
    """dim 1: every element of a state has its own decay."""

    def make(rng: probes.Rng, types: Types) -> Node:
        b, c = (normal(rng, "f32", 2, TOKENS, 2, n_state) for _ in range(2))
        x, s = normal(rng, "f32", 2, TOKENS, HEADS, dim), normal(rng, "f32", 3, HEADS, dim, n_state)
        decays = rng.uniform(-1, 0, (1, 1, HEADS, n_state if dim == 1 else 1))
        dt, a = normal(rng, "f32", 1, 2, TOKENS, HEADS), probes.tensor("f32", decays)
        sources = s, x, dt, a, b, c, Tensor.of(np.array([2, 0], np.int32))
        size = HEADS * dim * 2 * (TOKENS + n_state)
        return probes.node("SSM_SCAN", "f32", (size,), *sources, params=Snapshots(1))

    return make


ssm_scan.nodes(_make_scan())
ssm_scan.probes(
    lambda: [
        Probe("with a decay for each element", probes.of_widths(partial(_make_scan, dim=1), (2, 16, 17, 70))),
        Probe("with a decay for each head", probes.of_widths(_make_scan)),
    ]
)
