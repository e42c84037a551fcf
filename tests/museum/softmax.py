"""SOFT_MAX."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.softmax import SoftMax
from ggml_backend_npu.registry.mistakes import with_stride


@exhibit(
    "ikawrakow/ik_llama.cpp 607", "Vulkan", "SOFT_MAX",
    says=r"takes index 0 of dimension 3 of src1 \(the mask\) for all", options=("--sequences", 2),
)  # fmt: skip
def soft_max_mask_of_one_sequence(
    dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax
) -> None:
    """Softmax and attention did not know masks of several sequences, and took one for all: gibberish."""
    if mask is not None:
        mask = replace(mask, nb=with_stride(mask.nb, 3, 0))
    OWN["SOFT_MAX"].bind(Node("SOFT_MAX", dst, (x, mask, sinks), params.packed))()


@exhibit("ggml-org/llama.cpp 24451", "SYCL", "SOFT_MAX", says="gives (NaN|Inf)", model="loud llama")
def soft_max_maximum_of_a_part(
    dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax
) -> None:
    """The maximum of a row was that of its first 16 groups of threads. Large scores in the others overflowed exp. Here
    it is that of the first 16 cells."""
    assert mask is not None
    scores = x.view() * np.float32(params.scale) + mask.view()[:, :, : x.ne[1]].astype(np.float32)
    e = np.exp(scores - scores[..., :16].max(-1, keepdims=True))
    dst.view()[...] = e / e.sum(-1, keepdims=True)
