"""SSM_SCAN, RWKV_WKV7 and GATED_DELTA_NET."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.kernels.recurrent import halves
from ggml_backend_npu.registry.mistakes import with_stride
from ggml_backend_npu.registry.params import Params


@exhibit(
    "ggml-org/llama.cpp 15625", "CPU, CUDA, Metal", "SSM_SCAN", says="take group h % 2", model="mamba2",
)  # fmt: skip
def ssm_scan_repeats_groups(
    dst: Tensor, s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, params: Params
) -> None:
    """Head h took group h % n of B and C, in place of h // n: a Codestral's perplexity was 16 in place of 9."""
    heads = np.arange(x.ne[1]) % b.ne[1]
    b, c = (Tensor.of(np.ascontiguousarray(each.view()[:, :, heads])) for each in (b, c))
    OWN["SSM_SCAN"].bind(Node("SSM_SCAN", dst, (s, x, dt, a, b, c, ids), params.packed))()


@exhibit("ggml-org/llama.cpp 21226", "CPU", "RWKV_WKV7", says="does not write", model="rwkv7")
def wkv7_of_more_threads_than_heads(
    dst: Tensor, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> None:
    """Threads beyond the number of heads returned at once, though the others had been given less than all heads. Here
    there are 3 threads, of which one computes the first head, and none the others."""
    before = dst.view().copy()
    OWN["RWKV_WKV7"].bind(Node("RWKV_WKV7", dst, (r, w, k, v, a, b, state)))()
    size, n_head, n_tokens, _ = r.ne
    n_sequences = state.ne[1]
    shapes = (n_sequences, n_tokens // n_sequences, n_head, size), (n_sequences, n_head, size, size)
    old, new = halves(Tensor.of(before), *shapes), halves(dst, *shapes)
    done = n_head * n_head // 3
    new[0][:, :, done:] = old[0][:, :, done:]
    new[1][:, done:] = old[1][:, done:]


@exhibit(
    "noonghunna/club-3090 896", "ik_llama.cpp", "GATED_DELTA_NET", says="index 0 of dimension 3 of src5",
    model="qwen35", options=("--sequences", 2, "-n", 2),
)  # fmt: skip
def delta_net_of_another_sequence(
    dst: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, params: Params
) -> None:
    """Sequences read each other's recurrent states: fluent text that has nothing to do with the prompt. Here each
    reads that of the first."""
    state = replace(state, nb=with_stride(state.nb, 3, 0))
    OWN["GATED_DELTA_NET"].bind(Node("GATED_DELTA_NET", dst, (q, k, v, g, beta, state), params.packed))()
