"""Norms, activations and sums."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.norms import Norm
from ggml_backend_npu.registry.mistakes import with_stride


@exhibit("ggml-org/llama.cpp 2373", "all", "RMS_NORM", says="takes 1e-06 for the eps")
def rms_norm_with_an_eps_of_its_own(dst: Tensor, x: Tensor, params: Norm) -> None:
    """Kernels had an eps of 1e-6 of their own, whatever the model's was: Llama 2 was worse by it."""
    OWN["RMS_NORM"].define(dst, x, params=replace(params, eps=1e-6))


@exhibit("ggml-org/llama.cpp 2190", "CUDA", "MUL", says="index 0 of dimension 1 of src0")
def mul_of_the_first_row(dst: Tensor, a: Tensor, b: Tensor) -> None:
    """A product with a repeated vector took the first row for all: the prompt was ignored."""
    if b.ne[1] < a.ne[1]:
        a = replace(a, nb=with_stride(a.nb, 1, 0))
    OWN["MUL"].define(dst, a, b)


@exhibit("ggml-org/llama.cpp 5243", "Vulkan", "GELU", says="gives NaN in", model="loud gpt2")
def gelu_overflows(dst: Tensor, x: Tensor) -> None:
    """GELU gave NaN for large numbers: Phi-2 was broken on one vendor's driver. Here its tanh is made of exponentials,
    which overflow, and weights make such numbers."""
    z = np.float32(np.sqrt(2 / np.pi)) * x.view() * (1 + np.float32(0.044715) * np.square(x.view()))
    e = np.exp(2 * z)
    dst.view()[...] = x.view() / 2 * (1 + (e - 1) / (e + 1))
