"""What goes from token to token with a state: SSM, RWKV, gated linear attention, gated delta net; and SOLVE_TRI."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .bounded import B, concatenated, dot, exact, where
from .movers import Result
from .tensors import Node


def ssm_conv(node: Node) -> Result:
    """dst[s, t, c] = sum over i of src0[s, c, t + i] * src1[c, i]."""
    x, w = node.x(0)[0], node.x(1)[0, 0]  # (s, c, d_conv - 1 + t), (c, d_conv)
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[1], axis=2)[:, :, : node.dst.ne[1]]
    return dot(windows, exact(w), "scti,ci->stc").reshape(*node.dst.shape)


def ssm_scan(node: Node) -> Result:
    """Mamba: state = state * exp(dt A) + B x dt, y = C state, dt after softplus."""
    s0, x, dt, a, b, c = (node.x(k) for k in range(6))
    ids, slots = node.x(6).reshape(-1), node.i32(0)
    n_seq, n_tok, n_head, dim = x.shape
    groups = b.shape[2]
    of = np.arange(n_head) // (n_head // groups)
    state = exact(s0[ids])  # (seq, head, dim, d_state)
    ys, kept = [], {}
    for t in range(n_tok):
        step = exact(dt[0, :, t])  # (seq, head)
        step = where(step.v <= 20, (step.exp() + 1.0).log(), step)
        decay = (step.reshape(n_seq, n_head, 1) * a[0, 0][None]).exp()  # (seq, head, d_state or 1)
        decay = decay.reshape(n_seq, n_head, 1, decay.v.shape[-1])
        gain = exact(x[:, t]) * step.reshape(n_seq, n_head, 1)
        state = state * decay + gain.reshape(n_seq, n_head, dim, 1) * b[:, t][:, of][:, :, None]
        ys.append((state * c[:, t][:, of][:, :, None]).sum(-1))
        kept[n_tok - 1 - t] = state
    y = B(np.stack([each.v for each in ys], 1), np.stack([each.e for each in ys], 1))
    unknown = B(s0[ids], np.full(state.v.shape, np.inf))
    return _flat(node, y, [kept.get(slot, unknown) for slot in range(slots)])


def _flat(node: Node, y: B, states: list[B]) -> B:
    parts = [part.reshape(-1) for part in (y, *states)]
    return concatenated(parts).reshape(*node.dst.shape)


def _sequences(node: Node, place: int, state: int) -> tuple[int, int, int, int, B]:
    """Sequences, tokens of each, heads, size of a head, and the state (seq, head, size, size)."""
    size, heads, tokens = node.source(place).ne[:3]
    n_seq = node.source(state).ne[1]
    found = exact(node.x(state)).reshape(n_seq, heads, size, size)
    return n_seq, tokens // n_seq, heads, size, found


def _by_token(node: Node, place: int, shape: tuple[int, int, int, int]) -> np.ndarray:
    return node.x(place).reshape(shape)


def rwkv_wkv6(node: Node) -> Result:
    """out = r (u k v + state), state = state w + k v; rows of the state by k, columns by v."""
    n_seq, tokens, heads, size, state = _sequences(node, 1, 5)
    shape = (n_seq, tokens, heads, size)
    k, v, r, w = (_by_token(node, place, shape) for place in (0, 1, 2, 4))
    u = node.x(3).reshape(heads, size, 1)
    out = []
    for t in range(tokens):
        kv = exact(k[:, t, :, :, None]) * v[:, t, :, None, :]
        out.append(((kv * u + state) * r[:, t, :, :, None]).sum(2))
        state = state * w[:, t, :, :, None] + kv
    return _flat(node, _over_tokens(out), [state])


def _over_tokens(parts: list[B]) -> B:
    return B(np.stack([p.v for p in parts], 1), np.stack([p.e for p in parts], 1))


def gated_linear_attention(node: Node) -> Result:
    n_seq, tokens, heads, size, state = _sequences(node, 1, 4)
    shape = (n_seq, tokens, heads, size)
    k, v, q, g = (_by_token(node, place, shape) for place in range(4))
    out = []
    for t in range(tokens):
        state = state * g[:, t, :, :, None] + exact(k[:, t, :, :, None]) * v[:, t, :, None, :]
        out.append((state * (exact(q[:, t, :, :, None]) * node.f32(0))).sum(2))
    return _flat(node, _over_tokens(out), [state])


def rwkv_wkv7(node: Node) -> Result:
    """state = state w + v k + (state a) b, out = state r; rows of the state by v, columns by k."""
    n_seq, tokens, heads, size, state = _sequences(node, 1, 6)
    shape = (n_seq, tokens, heads, size)
    r, w, k, v, a, b = (_by_token(node, place, shape)[:, :, :, None, :] for place in range(6))
    out = []
    for t in range(tokens):
        along = (state * a[:, t]).sum(-1, keepdims=True)
        state = state * w[:, t] + exact(np.swapaxes(v[:, t], -1, -2)) * k[:, t] + along * b[:, t]
        out.append((state * r[:, t]).sum(-1))
    return _flat(node, _over_tokens(out), [state])


def gated_delta_net(node: Node) -> Result:
    """state = exp(g) state; d = beta (v - state k); state = state + d k; out = state q / sqrt(size)."""
    q, k, v, g, beta, s = (node.x(place) for place in range(6))
    n_seq, tokens, heads, size = v.shape
    slots = node.i32(0)

    def spread(x: np.ndarray, t: int) -> np.ndarray:
        """A row for each sequence and head of v: (seq, head, 1, size)."""
        seq, head = np.arange(n_seq) // (n_seq // x.shape[0]), np.arange(heads) % x.shape[2]
        return x[seq, t][:, head][:, :, None, :]

    state, out, kept = exact(s.reshape(-1)[: n_seq * heads * size * size]).reshape(n_seq, heads, size, size), [], {}
    for t in range(tokens):
        state = state * exact(g[:, t][:, :, None, :]).exp()
        away = exact(np.swapaxes(v[:, t][:, :, None, :], -1, -2)) - (state * spread(k, t)).sum(-1, keepdims=True)
        state = state + away * beta[:, t][:, :, None, :] * spread(k, t)
        out.append((state * spread(q, t)).sum(-1) * exact(float(size)).sqrt().reciprocal())
        kept[tokens - 1 - t] = state
    unknown = B(state.v, np.full(state.v.shape, np.inf))
    return _flat(node, _over_tokens(out), [kept.get(slot, unknown) for slot in range(slots)])


def solve_tri(node: Node) -> Result:
    """A X = B, A lower triangular: row by row."""
    a, b = node.x(0), exact(node.x(1))
    rows: list[B] = []
    for i in range(a.shape[-1]):
        rest = b[:, :, i]
        if rows:
            before = B(np.stack([x.v for x in rows], 2), np.stack([x.e for x in rows], 2))
            rest = rest - (before * a[:, :, i, :i, None]).sum(2)
        rows.append(rest / a[:, :, i, i, None])
    return B(np.stack([x.v for x in rows], 2), np.stack([x.e for x in rows], 2))


OPS: dict[str, Callable[[Node], Result]] = {
    "SSM_CONV": ssm_conv, "SSM_SCAN": ssm_scan, "RWKV_WKV6": rwkv_wkv6, "RWKV_WKV7": rwkv_wkv7,
    "GATED_LINEAR_ATTN": gated_linear_attention, "GATED_DELTA_NET": gated_delta_net, "SOLVE_TRI": solve_tri,
}  # fmt: skip
