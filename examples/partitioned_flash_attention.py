"""Flash attention over a partitioned cache that grows, built from operators of `ggml_backend_npu.documents.rbln`.

python examples/partitioned_flash_attention.py

q is (1, Head, Group, Seq, D); keys and values are (1, Head, 1, Seq, D), their caches (partitions, 1, Head, 1, P, D).
"""

import numpy as np

from ggml_backend_npu.documents.rbln import (
    dynamic_flash_attn_tile,
    dynamic_load,
    dynamic_store,
    flash_attn_recompute,
    insert,
    to_dynamic_index,
)

SEQ = 3  # the axis of a partition that grows


def step(q, k, v, key_cache, value_cache, cached, sink=None):
    """Attention of some new tokens to themselves and to the `cached` ones. Adds the new tokens to the caches.

    Returns (1, Head, Group, Seq, D). Raises ValueError if the tokens cross the end of a partition: `steps` cuts a
    prompt so that they do not.
    """
    scale = np.float32(q.shape[-1] ** -0.5)
    n_new, size = q.shape[3], key_cache.shape[4]
    if cached % size + n_new > size:
        raise ValueError(f"{n_new} tokens behind {cached}: they cross the end of a partition of {size}")
    row_max = row_sum = out = None
    for partition, (keys, values) in enumerate(zip(key_cache, value_cache, strict=True)):
        begin = partition * size
        if partition and begin >= cached + n_new:  # not to be seen from its index, which is 0
            break
        index = to_dynamic_index(np.int32([min(max(cached - begin, 0), size)]), size)
        new_keys = insert(dynamic_load(keys, SEQ, index), k, SEQ, index, strict=False)  # into a full one nothing
        new_values = insert(dynamic_load(values, SEQ, index), v, SEQ, index, strict=False)
        dynamic_store(keys, new_keys, SEQ, index + n_new)
        dynamic_store(values, new_values, SEQ, index + n_new)

        scores = scale * (q @ new_keys.swapaxes(-1, -2))
        tile_sink = sink if partition == 0 else None  # one more score of a row: in one tile of it only
        row_max_now, e, sum_now = dynamic_flash_attn_tile(scores, index, row_max, sink=tile_sink)
        if row_max is None:
            row_sum, out = sum_now, e @ new_values
        else:
            row_sum, out = flash_attn_recompute(row_max, row_max_now, row_sum, sum_now, out, e @ new_values)
        row_max = row_max_now
    return np.divide(out, row_sum, out=np.zeros_like(out), where=row_sum != 0)


def steps(n_prompt, n_total, longest, size):
    """(begin, end) of steps: the prompt in chunks that stay within partitions, then token by token."""
    begin = 0
    while begin < n_total:
        end = min(begin + longest, n_prompt, begin - begin % size + size) if begin < n_prompt else begin + 1
        yield begin, end
        begin = end


def attention(q, k, v, *, n_prompt, longest, size, sink=None):
    """Attention of a prompt and the tokens after it, step by step; (1, Head, Group, Seq, D)."""
    n_total = q.shape[3]
    n_partitions = -(-n_total // size) + 1  # the last one stays empty
    # NaN: what no token has been stored to is never read
    caches = [np.full((n_partitions, *x.shape[:3], size, x.shape[4]), np.nan, np.float32) for x in (k, v)]
    outputs = []
    for begin, end in steps(n_prompt, n_total, longest, size):
        new = slice(begin, end)
        outputs.append(step(q[..., new, :], k[..., new, :], v[..., new, :], *caches, begin, sink))
    return np.concatenate(outputs, axis=3)


def full_attention(q, k, v, sink=None):
    """The same by the definition, in float64."""
    scores = q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2) * q.shape[-1] ** -0.5
    e = np.exp(np.where(np.tri(scores.shape[-1], dtype=bool), scores, -np.inf))
    total = e.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink.astype(np.float64)))
    return e / total @ v


def main():
    """Compares both for a prompt and further tokens, without and with a sink."""
    rng = np.random.default_rng(0)
    head, group, d, n_prompt, n_total = 2, 4, 32, 90, 140
    q = rng.standard_normal((1, head, group, n_total, d), np.float32)
    k, v = rng.standard_normal((2, 1, head, 1, n_total, d), np.float32)
    sink = rng.standard_normal((1, head, group, 1, 1), np.float32)
    for name, given in (("no sink", None), ("a sink", sink)):
        actual = attention(q, k, v, n_prompt=n_prompt, longest=16, size=32, sink=given)
        difference = np.abs(actual - full_attention(q, k, v, given)).max()
        print(f"{n_prompt} tokens of prompt, {n_total - n_prompt} more, partitions of 32, {name}: ", end="")
        print(f"max |difference| to full attention {difference:.1e}")
        assert difference < 1e-6


if __name__ == "__main__":
    main()
