"""SSM_CONV, SSM_SCAN, RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN, GATED_DELTA_NET: a state that each token changes.

Every head of every sequence has a matrix of its own as its state, and goes through its tokens one by one. dst has no
gaps: what all tokens gave, and behind it the states that are left. All is computed in float32, as ggml's CPU does, by
the definitions but for the order of sums; the compiled kernels have its order and what GCC fuses and vectorises there
with AVX-512, where they are byte-equal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numba import types
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.softmax import expf, scaled
from ggml_backend_npu.params import Params, f32, i32
from ggml_backend_npu.registry import Call, KernelError, op
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    copy,
    fused_multiply_add,
    inlined,
    keep,
    parameters,
    values,
)
from quant.kernels.matrices import LANES
from quant.kernels.orders import GROUP, STEP, dots_f32
from quant.kernels.threads import Job, Work

_CHANNELS = 16  # of a convolution whose results fill a cache line

Floats = NDArray[np.float32]


def _halves(dst: Tensor, given: tuple[int, ...], states: tuple[int, ...]) -> tuple[Floats, Floats]:
    """dst as what the tokens gave and the states behind it, in these shapes."""
    flat, n = dst.view().reshape(-1), prod(given)
    return flat[:n].reshape(given), flat[n:].reshape(states)


def _applied(matrices: Floats, vectors: Floats) -> Floats:
    """matrix @ vector of each head."""
    product: Floats = (matrices @ vectors[..., None])[..., 0]
    return product


@dataclass(frozen=True)
class Snapshots(Params):
    """op_params of SSM_SCAN and GATED_DELTA_NET: ggml_ssm_scan, ggml_gated_delta_net.

    K  how many states are wanted: behind the last token, the one before it, ...
    """

    K: i32


@dataclass(frozen=True)
class LinearAttn(Params):
    """op_params of GATED_LINEAR_ATTN: ggml_gated_linear_attn."""

    scale: f32


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _of_other_size(**tensors: tuple[Tensor, tuple[int, ...]]) -> str | None:
    """The first tensor that has not the ne it needs."""
    for role, (tensor, ne) in tensors.items():
        if tensor.ne != ne:
            return f"{role} of ne {tensor.ne} instead of {ne}"
    return None


def _bad_dst(dst: Tensor, n_elements: int) -> str | None:
    if dst.n_elements != n_elements or not dst.is_contiguous():
        return f"dst of ne {dst.ne}, nb {dst.nb} is no {n_elements} elements without gaps"
    return None


# SSM_CONV


def _refuse_conv(dst: Tensor, x: Tensor, weights: Tensor) -> str | None:
    n_conv, n_channels = weights.ne[:2]
    if min(n_conv, x.ne[0] - n_conv + 1) < 1:
        return f"{n_conv} weights for rows of {x.ne[0]}"
    return _of_other_size(
        x=(x, (x.ne[0], n_channels, x.ne[2], 1)),
        weights=(weights, (n_conv, n_channels, 1, 1)),
        dst=(dst, (n_channels, x.ne[0] - n_conv + 1, x.ne[2], 1)),
    )


@op("SSM_CONV", types=[("f32", "f32", "f32")], refuse=_refuse_conv, optional=True)
@np.errstate(all="ignore")
def ssm_conv(dst: Tensor, x: Tensor, weights: Tensor) -> None:
    """dst[t, channel] = sum of x[channel, t + i] * weights[channel, i] over i: each channel's own convolution.

    x (n_conv - 1 + tokens, channels, sequences), weights (n_conv, channels) -> dst (channels, tokens, sequences).
    Equals ggml_compute_forward_ssm_conv but for rounding.
    """
    windows = np.lib.stride_tricks.sliding_window_view(x.view()[0], weights.ne[0], axis=-1)
    dst.view()[0] = np.einsum("scti,ci->stc", windows, weights.view()[0, 0])


@compiled
def convolve(p, begin, end):
    """Channels [begin, end) of all sequences, products added one after the other: whole eights rounded before."""
    (
        x, x_nb0, x_nb1, x_nb2, weights, w_nb0, w_nb1, n_conv, dst, dst_nb0, dst_nb1, dst_nb2, n_tokens, n_sequences,
    ) = values(p, 14)  # fmt: skip
    rounded = n_conv // 8 * 8
    for sequence in range(n_sequences):
        for first in range(begin, end, _CHANNELS):
            for t in range(n_tokens):
                for channel in range(first, min(first + _CHANNELS, end)):
                    window = x + sequence * x_nb2 + channel * x_nb1 + t * x_nb0
                    total = types.float32(0)
                    for i in range(n_conv):
                        factor = array_at(weights + channel * w_nb1 + i * w_nb0, types.float32, 1)[0]
                        value = array_at(window + i * x_nb0, types.float32, 1)[0]
                        fused = fused_multiply_add(value, factor, total)
                        total = total + value * factor if i < rounded else fused
                    to = dst + sequence * dst_nb2 + t * dst_nb1 + channel * dst_nb0
                    array_at(to, types.float32, 1)[0] = total
    return 0


@ssm_conv.compiled
def _ssm_conv(dst: Tensor, x: Tensor, weights: Tensor) -> Call:
    n_conv, n_channels = weights.ne[:2]
    _, n_tokens, n_sequences, _ = dst.ne
    p = parameters(
        x.address, *x.nb[:3], weights.address, *weights.nb[:2], n_conv, dst.address, *dst.nb[:3], n_tokens, n_sequences
    )
    return Job(Work(convolve, p, n_channels, 4 * n_conv * dst.n_elements, keep=(dst, x, weights)))


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
    return _of_other_size(
        s=(s, (n_state, dim, n_head, s.ne[3])),
        dt=(dt, (n_head, n_tokens, n_sequences, 1)),
        A=(a, (1 if a.ne[0] == 1 else n_state, n_head, 1, 1)),
        B=(b, (n_state, n_group, n_tokens, n_sequences)),
        C=(c, b.ne),
        ids=(ids, (n_sequences, 1, 1, 1)),
    ) or _bad_dst(dst, x.n_elements + count * n_state * dim * n_head * n_sequences)


def _bad_sequence(ids: Tensor, place: int, n: int) -> KernelError:
    return KernelError(f"state {ids.view()[0, 0, 0, place]} of sequence {place} is outside 0..{n - 1}")


@op("SSM_SCAN", types=[(*["f32"] * 7, "i32")], refuse=_refuse_scan, optional=True, params=Snapshots)
@np.errstate(all="ignore")
def ssm_scan(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Snapshots
) -> None:
    """Mamba's selective scan, token by token: s = s * exp(dt * A) + x * dt (outer) B, y = s C; dt through a softplus.

    s (state, dim, heads, any) of which each sequence has the one that ids names, x (dim, heads, tokens, sequences), dt
    (heads, tokens, sequences), A (state, heads) or, one for a head's whole state, (1, heads), B and C (state, groups,
    tokens, sequences), a group for as many heads in a row -> dst: y, of x's shape, and s of all sequences, K such
    states. Those that no token leaves stay. Equals ggml_compute_forward_ssm_scan but for rounding. Raises KernelError
    for an id outside s.
    """
    n_sequences, n_tokens, n_head, dim = x.view().shape
    count = params.K
    y, states = _halves(dst, x.view().shape, (count, n_sequences, n_head, dim, s.ne[0]))
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
        y[:, t] = _applied(state, from_state)
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
    """As `_scan_row`, every element with a decay of its own. Returns s . c, added one after the other."""
    row, rate = array_at(s, types.float32, n), array_at(a, types.float32, n)
    to_state, from_state = array_at(b, types.float32, n), array_at(c, types.float32, n)
    y = types.float32(0)
    for i in range(n):
        row[i] = value = fused_multiply_add(row[i], expf(step * rate[i]), to_state[i] * x)
        y = fused_multiply_add(value, from_state[i], y)
    return y


@inlined
def _read_rows(s, c, n, to, count):
    """s . c of `count` rows: a rest of n / STEP is added one after the other."""
    dots_f32(s, 4 * n, c, n // STEP * STEP, to, count)
    read, found = array_at(c, types.float32, n), array_at(to, types.float32, count)
    for r in range(count):
        row = array_at(s + 4 * n * r, types.float32, n)
        total = found[r]
        for i in range(n // STEP * STEP, n):
            total = fused_multiply_add(row[i], read[i], total)
        found[r] = total


@compiled
def scan(p, begin, end):
    """Heads [begin, end) of all sequences. Returns 1 + the place of an id that names no state."""
    (
        s, s_nb1, s_nb2, s_nb3, n_states, x, x_nb0, x_nb1, x_nb2, x_nb3, dt, dt_nb0, dt_nb1, dt_nb2,
        a, a_nb1, by_element, b, b_nb1, b_nb2, b_nb3, c, c_nb1, c_nb2, c_nb3, ids, ids_nb0,
        y, states, n_kept, n_state, dim, n_head, per_group, n_tokens, n_sequences,
    ) = values(p, 36)  # fmt: skip
    row, head_bytes = 4 * n_state, 4 * n_state * dim
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        place = types.int64(array_at(ids + sequence * ids_nb0, types.int32, 1)[0])
        if place < 0 or place >= n_states:
            return sequence + 1
        state = states + unit * head_bytes
        for i in range(dim):
            copy(s + place * s_nb3 + head * s_nb2 + i * s_nb1, state + i * row, row)
        group = head // per_group
        rate = a + head * a_nb1
        for t in range(n_tokens):
            step = array_at(dt + sequence * dt_nb2 + t * dt_nb1 + head * dt_nb0, types.float32, 1)[0]
            if not step > types.float32(20):
                step = np.log(types.float32(1) + expf(step))
            to_state = b + sequence * b_nb3 + t * b_nb2 + group * b_nb1
            from_state = c + sequence * c_nb3 + t * c_nb2 + group * c_nb1
            x_head = x + sequence * x_nb3 + t * x_nb2 + head * x_nb1
            given = y + 4 * dim * ((sequence * n_tokens + t) * n_head + head)
            if by_element:
                found = array_at(given, types.float32, dim)
                for i in range(dim):
                    x_step = array_at(x_head + i * x_nb0, types.float32, 1)[0] * step
                    found[i] = _scan_row_by_element(state + i * row, rate, to_state, from_state, x_step, step, n_state)
            else:
                decay = expf(step * array_at(rate, types.float32, 1)[0])
                for first in range(0, dim, GROUP):
                    count = min(GROUP, dim - first)
                    for i in range(first, first + count):
                        x_step = array_at(x_head + i * x_nb0, types.float32, 1)[0] * step
                        _scan_row(state + i * row, decay, to_state, x_step, n_state)
                    _read_rows(state + first * row, from_state, n_state, given + 4 * first, count)
            before_last = n_tokens - 1 - t
            if before_last > 0 and before_last < n_kept:
                copy(state, state + before_last * n_sequences * n_head * head_bytes, head_bytes)
    return 0


@ssm_scan.compiled
def _ssm_scan(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Snapshots
) -> Call | None:
    if not all(tensor.has_contiguous_rows() for tensor in (s, a, b, c)):
        return None
    n_state, (dim, n_head, n_tokens, n_sequences) = s.ne[0], x.ne
    by_element = a.ne[0] != 1
    p = parameters(
        s.address, *s.nb[1:], s.ne[3], x.address, *x.nb, dt.address, *dt.nb[:3], a.address, a.nb[1], by_element,
        b.address, *b.nb[1:], c.address, *c.nb[1:], ids.address, ids.nb[0],
        dst.address, dst.address + 4 * x.n_elements, params.K, n_state, dim, n_head, n_head // b.ne[1],
        n_tokens, n_sequences,
    )  # fmt: skip
    n_bytes = 4 * n_state * x.n_elements * (4 if by_element else 1)
    kept = dst, s, x, dt, a, b, c

    def failed(status: int) -> Exception:
        return _bad_sequence(ids, status - 1, s.ne[3])

    return Job(Work(scan, p, n_head * n_sequences, n_bytes, keep=kept, failed=failed))


# RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN


def _refuse_heads(dst: Tensor, state: Tensor, first: Tensor | None = None, **tokens: Tensor) -> str | None:
    """Of operands (size, heads, tokens) and a state (any, sequences); `first` is one for all tokens."""
    ne, n_sequences = next(iter(tokens.values())).ne, state.ne[1]
    size, n_head, n_tokens, _ = ne
    if n_sequences < 1 or n_tokens % n_sequences:
        return f"{n_tokens} tokens of {n_sequences} sequences"
    of_a_token = size * n_head
    if first is not None and first.n_elements != of_a_token:
        return f"tf of ne {first.ne} for {n_head} heads of {size}"
    if state.n_elements != of_a_token * size * n_sequences:
        return f"state of ne {state.ne} for {n_head} heads of {size}"
    sizes = _of_other_size(**{name: (tensor, (size, n_head, n_tokens, 1)) for name, tensor in tokens.items()})
    return sizes or _bad_dst(dst, of_a_token * (n_tokens + size * n_sequences))


def _of_sequences(tensors: tuple[Tensor, ...], n_sequences: int) -> list[Floats]:
    """Operands (size, heads, tokens of all sequences) as (sequences, tokens, heads, size)."""
    return [x.view().reshape(n_sequences, x.ne[2] // n_sequences, x.ne[1], x.ne[0]) for x in tensors]


def _state(dst: Tensor, x: Floats, state: Tensor) -> tuple[Floats, Floats]:
    """What of dst the tokens of x give, and the states, which begin as `state`."""
    n_sequences, _, n_head, size = x.shape
    y, s = _halves(dst, x.shape, (n_sequences, n_head, size, size))
    s[...] = state.view().reshape(s.shape)
    return y, s


def _refuse_wkv6(dst: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> str | None:
    return _refuse_heads(dst, state, tf, k=k, v=v, r=r, td=td)


@op("RWKV_WKV6", types=[("f32",) * 7], refuse=_refuse_wkv6, optional=True)
@np.errstate(all="ignore")
def rwkv_wkv6(dst: Tensor, k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> None:
    """RWKV-6, token by token: y = r (s + tf * k (outer) v), s = td * s + k (outer) v; r, tf, td, k along s's rows.

    k, v, r, td (size, heads, tokens of all sequences), tf (size, heads), state (size * size * heads, sequences) -> dst:
    y, of k's shape, and the states. Equals ggml_compute_forward_rwkv_wkv6 but for rounding.
    """
    keys, gains, reads, decays = _of_sequences((k, v, r, td), state.ne[1])
    y, s = _state(dst, keys, state)
    first = tf.view().reshape(*keys.shape[2:], 1)
    for t in range(keys.shape[1]):
        kv = keys[:, t, ..., None] * gains[:, t, :, None]
        y[:, t] = _applied((s + first * kv).swapaxes(-1, -2), reads[:, t])
        s *= decays[:, t, ..., None]
        s += kv


def _refuse_gla(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, params: LinearAttn
) -> str | None:
    return _refuse_heads(dst, state, k=k, v=v, q=q, g=g)


@op("GATED_LINEAR_ATTN", types=[("f32",) * 6], refuse=_refuse_gla, optional=True, params=LinearAttn)
@np.errstate(all="ignore")
def gated_linear_attn(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, params: LinearAttn
) -> None:
    """Gated linear attention, token by token: s = g * s + k (outer) v, y = q * scale s; q, g and k along s's rows.

    k, v, q, g (size, heads, tokens of all sequences), state (size * size * heads, sequences) -> dst: y,
    of k's shape, and the states. Equals ggml_compute_forward_gla but for rounding.
    """
    keys, gains, queries, gates = _of_sequences((k, v, q, g), state.ne[1])
    y, s = _state(dst, keys, state)
    queries = queries * np.float32(params.scale)
    for t in range(keys.shape[1]):
        s *= gates[:, t, ..., None]
        s += keys[:, t, ..., None] * gains[:, t, :, None]
        y[:, t] = _applied(s.swapaxes(-1, -2), queries[:, t])


@inlined
def _wkv6_row(s, v, y, k, r, first, decay, n):
    """One row of a head's state; what it gives is added to y."""
    row, gain, total = array_at(s, types.float32, n), array_at(v, types.float32, n), array_at(y, types.float32, n)
    for j in range(n):
        kv = gain[j] * k
        total[j] = fused_multiply_add(fused_multiply_add(kv, first, row[j]), r, total[j])
        row[j] = fused_multiply_add(row[j], decay, kv)


@inlined
def _gla_row(s, v, y, k, q, gate, n):
    """As `_wkv6_row`. Of what is no whole vector, GCC rounds the other product before it adds them."""
    row, gain, total = array_at(s, types.float32, n), array_at(v, types.float32, n), array_at(y, types.float32, n)
    for j in range(n // LANES * LANES):
        row[j] = fused_multiply_add(row[j], gate, gain[j] * k)
        total[j] = fused_multiply_add(row[j], q, total[j])
    for j in range(n // LANES * LANES, n):
        row[j] = fused_multiply_add(gain[j], k, row[j] * gate)
        total[j] = fused_multiply_add(row[j], q, total[j])


@compiled
def gated_attention(p, begin, end):
    """Heads [begin, end) of all sequences, of RWKV_WKV6, or of GATED_LINEAR_ATTN, which has no `first`."""
    k, v, q, first, gates, scale_bits, state, dst, states, size, n_head, n_tokens = values(p, 12)
    scale = bits_float(types.uint32(scale_bits))
    row = 4 * size
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = states + unit * size * row
        copy(state + unit * size * row, s, size * row)
        for t in range(n_tokens):
            at = ((sequence * n_tokens + t) * n_head + head) * row
            keys, reads = array_at(k + at, types.float32, size), array_at(q + at, types.float32, size)
            decays = array_at(gates + at, types.float32, size)
            array_at(dst + at, types.float32, size)[:] = types.float32(0)
            for i in range(size):
                if first:
                    bonus = array_at(first + head * row, types.float32, size)[i]
                    _wkv6_row(s + i * row, v + at, dst + at, keys[i], reads[i], bonus, decays[i], size)
                else:
                    _gla_row(s + i * row, v + at, dst + at, keys[i], reads[i] * scale, decays[i], size)
    return 0


def _gated(
    dst: Tensor, k: Tensor, v: Tensor, q: Tensor, first: Tensor | None, g: Tensor, state: Tensor, scale: np.float32
) -> Call | None:
    if not _are_contiguous(k, v, q, first or k, g, state):
        return None
    size, n_head, n_tokens, _ = k.ne
    n_sequences = state.ne[1]
    p = parameters(
        k.address, v.address, q.address, 0 if first is None else first.address, g.address, scale, state.address,
        dst.address, dst.address + 4 * k.n_elements, size, n_head, n_tokens // n_sequences,
    )  # fmt: skip
    kept = dst, k, v, q, first, g, state
    return Job(Work(gated_attention, p, n_head * n_sequences, 4 * size * k.n_elements, keep=kept))


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


@op("RWKV_WKV7", types=[("f32",) * 8], refuse=_refuse_wkv7, optional=True)
@np.errstate(all="ignore")
def rwkv_wkv7(dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> None:
    """RWKV-7, token by token: s = s * w + v (outer) k + (s a) (outer) b, y = s r; w, k and b along s's columns.

    r, w, k, v, a, b (size, heads, tokens of all sequences), state (size * size * heads, sequences) -> dst: y, of r's
    shape, and the states. Equals ggml_compute_forward_rwkv_wkv7 but for rounding, and for head sizes that its vectors
    do not divide: there it reads and writes beyond each row.
    """
    reads, decays, keys, gains, removals, returns = _of_sequences((r, w, k, v, a, b), state.ne[1])
    y, s = _state(dst, reads, state)
    for t in range(reads.shape[1]):
        removed = _applied(s, removals[:, t])
        s *= decays[:, t, :, None]
        s += gains[:, t, ..., None] * keys[:, t, :, None]
        s += removed[..., None] * returns[:, t, :, None]
        y[:, t] = _applied(s, reads[:, t])


@inlined
def _wkv7_row(s, w, k, b, v, removed, n):
    """One row of a head's state."""
    row, decay = array_at(s, types.float32, n), array_at(w, types.float32, n)
    key, back = array_at(k, types.float32, n), array_at(b, types.float32, n)
    for j in range(n):
        row[j] = fused_multiply_add(removed, back[j], fused_multiply_add(row[j], decay[j], v * key[j]))


@compiled
def wkv7(p, begin, end):
    """Heads [begin, end) of all sequences."""
    r, w, k, v, a, b, state, dst, states, size, n_head, n_tokens = values(p, 12)
    row = 4 * size
    removed = np.empty(GROUP, np.float32)
    all_removed = types.int64(removed.ctypes.data)
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = states + unit * size * row
        copy(state + unit * size * row, s, size * row)
        for t in range(n_tokens):
            at = ((sequence * n_tokens + t) * n_head + head) * row
            gains = array_at(v + at, types.float32, size)
            for first in range(0, size, GROUP):
                rows, count = s + first * row, min(GROUP, size - first)
                dots_f32(rows, row, a + at, size, all_removed, count)
                for i in range(count):
                    _wkv7_row(rows + i * row, w + at, k + at, b + at, gains[first + i], removed[i], size)
                dots_f32(rows, row, r + at, size, dst + at + 4 * first, count)
    keep(removed)
    return 0


@rwkv_wkv7.compiled
def _rwkv_wkv7(
    dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> Call | None:
    sources = (r, w, k, v, a, b, state)
    if not _are_contiguous(*sources):
        return None
    size, n_head, n_tokens, _ = r.ne
    n_sequences = state.ne[1]
    p = parameters(
        *(tensor.address for tensor in sources), dst.address, dst.address + 4 * r.n_elements, size, n_head,
        n_tokens // n_sequences,
    )  # fmt: skip
    return Job(Work(wkv7, p, n_head * n_sequences, 4 * size * r.n_elements, keep=(dst, sources)))


# GATED_DELTA_NET


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
    return _of_other_size(
        q=(q, (size, q.ne[1], n_tokens, q.ne[3])),
        k=(k, (size, k.ne[1], n_tokens, k.ne[3])),
        g=(g, (1 if g.ne[0] == 1 else size, *v.ne[1:])),
        beta=(beta, (1, *v.ne[1:])),
        state=(state, (size, size, n_head, n_sequences)),
    ) or _bad_dst(dst, v.n_elements + count * state.n_elements)


def _repeated(x: Tensor, v: Tensor) -> Floats:
    """x with the heads and sequences of v: its heads again and again, each of its sequences as often in a row."""
    sequences = np.arange(v.ne[3]) // (v.ne[3] // x.ne[3])
    spread: Floats = x.view()[sequences][:, :, np.arange(v.ne[1]) % x.ne[1]]
    return spread


@op("GATED_DELTA_NET", types=[("f32",) * 7], refuse=_refuse_delta, optional=True, params=Snapshots)
@np.errstate(all="ignore")
def gated_delta_net(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Snapshots
) -> None:
    """The gated delta rule, token by token: s = s * exp(g), s += (v - s k) * beta (outer) k, y = s q / sqrt(size).

    v (size, heads, tokens, sequences), q and k the same or with fewer heads, which then repeat, or sequences, g (size,
    ...), along s's columns, or (1, ...), beta (1, ...), state (size, size, heads, sequences) -> dst: y, of v's shape,
    and s of all sequences, K such states. Those that no token leaves stay. Equals
    ggml_compute_forward_gated_delta_net but for rounding.
    """
    count, n_tokens, size = params.K, v.ne[2], np.float32(v.ne[0])
    y, states = _halves(dst, v.view().shape, (count, *state.view().shape))
    s, queries, keys = states[0], _repeated(q, v), _repeated(k, v)
    s[...] = state.view()
    for t in range(n_tokens):
        s *= np.exp(g.view()[:, t, :, None])
        delta = (v.view()[:, t] - _applied(s, keys[:, t])) * beta.view()[:, t]
        s += delta[..., None] * keys[:, t, :, None]
        y[:, t] = _applied(s, queries[:, t]) * (1 / np.sqrt(size))
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


@compiled
def delta_net(p, begin, end):
    """Heads [begin, end) of all sequences."""
    (
        q, q_nb1, q_nb2, q_nb3, q_heads, q_repeats, k, k_nb1, k_nb2, k_nb3, k_heads, k_repeats, v, v_nb1, v_nb2, v_nb3,
        g, by_element, beta, state, dst, states, n_kept, scale_bits, size, n_head, n_tokens, n_sequences,
    ) = values(p, 28)  # fmt: skip
    scale = bits_float(types.uint32(scale_bits))
    row, head_bytes = 4 * size, 4 * size * size
    decays, found = np.empty(size, np.float32), np.empty(GROUP, np.float32)
    all_decays, all_found = types.int64(decays.ctypes.data), types.int64(found.ctypes.data)
    for unit in range(begin, end):
        head, sequence = unit % n_head, unit // n_head
        s = states + unit * head_bytes
        copy(state + unit * head_bytes, s, head_bytes)
        for t in range(n_tokens):
            token = (sequence * n_tokens + t) * n_head + head
            query = q + sequence // q_repeats * q_nb3 + t * q_nb2 + head % q_heads * q_nb1
            key = k + sequence // k_repeats * k_nb3 + t * k_nb2 + head % k_heads * k_nb1
            value = array_at(v + sequence * v_nb3 + t * v_nb2 + head * v_nb1, types.float32, size)
            strength = array_at(beta + 4 * token, types.float32, 1)[0]
            if by_element:
                gate = array_at(g + token * row, types.float32, size)
                for i in range(size):
                    decays[i] = expf(gate[i])
            else:
                decays[:] = expf(array_at(g + 4 * token, types.float32, 1)[0])
            for first in range(0, size, GROUP):
                rows, count = s + first * row, min(GROUP, size - first)
                for i in range(count):
                    _scaled_by(rows + i * row, all_decays, size)
                dots_f32(rows, row, key, size, all_found, count)
                for i in range(count):
                    _add_scaled(rows + i * row, key, (value[first + i] - found[i]) * strength, size)
                dots_f32(rows, row, query, size, dst + token * row + 4 * first, count)
            scaled(dst + token * row, size, scale)
            before_last = n_tokens - 1 - t
            if before_last > 0 and before_last < n_kept:
                copy(s, s + before_last * n_sequences * n_head * head_bytes, head_bytes)
    keep(decays)
    keep(found)
    return 0


@gated_delta_net.compiled
def _gated_delta_net(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Snapshots
) -> Call | None:
    if not _are_contiguous(g, beta, state) or not all(tensor.has_contiguous_rows() for tensor in (q, k, v)):
        return None
    size, n_head, n_tokens, n_sequences = v.ne
    p = parameters(
        q.address, *q.nb[1:], q.ne[1], n_sequences // q.ne[3], k.address, *k.nb[1:], k.ne[1], n_sequences // k.ne[3],
        v.address, *v.nb[1:], g.address, g.ne[0] != 1, beta.address, state.address,
        dst.address, dst.address + 4 * v.n_elements, params.K, 1 / np.sqrt(np.float32(size)),
        size, n_head, n_tokens, n_sequences,
    )  # fmt: skip
    kept = dst, q, k, v, g, beta, state
    return Job(Work(delta_net, p, n_head * n_sequences, 4 * size * v.n_elements, keep=kept))
