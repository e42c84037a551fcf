"""Sliding window attention over a stream of chunks, built from operators of `ggml_backend_npu.documents.rbln`.

python examples/sliding_window_attention.py

q is (1, Head, Group, Seq, D); keys and values are (1, Head, 1, Seq, D), their caches (1, Head, 1, window, D).
"""

import numpy as np

from ggml_backend_npu.documents.rbln import nn_pad, to_dynamic_index, window_insert, window_slice, window_softmax

SEQ = 3  # the axis that the window slides along
PAD = 63  # columns behind a window and its one new token: together a multiple of 64


def step(q, k, v, key_cache, value_cache, seen, sink=None):
    """Attention of some new tokens after `seen` ones. Returns (output, caches of the window that ends with the new
    tokens)."""
    scale = np.float32(q.shape[-1] ** -0.5)
    n_new, window = q.shape[3], key_cache.shape[3]
    index = to_dynamic_index(np.int32([min(seen, window)]), window)
    keys = window_insert(key_cache, k, SEQ, index)
    values = window_insert(value_cache, v, SEQ, index)
    caches = [window_slice(x, index + n_new, SEQ, window, padded=True) for x in (keys, values)]
    if n_new == 1:
        keys = nn_pad(keys, 0.0, SEQ, (0, PAD), "constant")
        values = nn_pad(values, 0.0, SEQ, (0, PAD), "constant")
    scores = scale * (q @ keys.swapaxes(-1, -2))
    p = window_softmax(scores, index, sink=sink, window_size=window, strict=False)  # windows of fewer than 128 too
    return p @ values, caches


def attention(q, k, v, *, window, chunks, sink=None):
    """Attention of a stream, in chunks of these numbers of tokens; (1, Head, Group, Seq, D)."""
    caches = [np.zeros((*x.shape[:3], window, x.shape[4]), np.float32) for x in (k, v)]
    outputs, seen = [], 0
    for n_new in chunks:
        new = slice(seen, seen + n_new)
        output, caches = step(q[..., new, :], k[..., new, :], v[..., new, :], *caches, seen, sink)
        outputs.append(output)
        seen += n_new
    return np.concatenate(outputs, axis=3)


def full_attention(q, k, v, window, sink=None):
    """The same by the definition, in float64: a token sees the `window` tokens that end with itself."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    n = scores.shape[-1]
    kept = np.tri(n, dtype=bool) & ~np.tri(n, k=-window, dtype=bool)
    e = np.exp(np.where(kept, scores, -np.inf))
    total = e.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink.astype(np.float64)))
    return e / total @ v


def main():
    """Compares both for a stream of chunks, without and with a sink."""
    rng = np.random.default_rng(0)
    head, group, d, window, chunks = 2, 4, 32, 128, [100, 60, 1, 1, 1, 64, *[1] * 40]
    q = rng.standard_normal((1, head, group, sum(chunks), d), np.float32)
    k, v = rng.standard_normal((2, 1, head, 1, sum(chunks), d), np.float32)
    sink = rng.standard_normal((1, head, group, 1, 1), np.float32)
    for name, given in (("no sink", None), ("a sink", sink)):
        actual = attention(q, k, v, window=window, chunks=chunks, sink=given)
        difference = np.abs(actual - full_attention(q, k, v, window, given)).max()
        print(f"{sum(chunks)} tokens in {len(chunks)} steps, a window of {window}, {name}: ", end="")
        print(f"max |difference| to full attention {difference:.1e}")
        assert difference < 1e-6


if __name__ == "__main__":
    main()
