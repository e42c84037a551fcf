"""ROPE."""

from __future__ import annotations

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Memory, Node, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.rope import Rope


def right(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    OWN["ROPE"].bind(Node("ROPE", dst, (x, positions, factors), params.packed))()


@exhibit(
    "ggml-org/llama.cpp 14580", "CUDA, Vulkan, SYCL", "ROPE", says="copies what it does not rotate", model="gptneox",
)  # fmt: skip
def rope_copies_the_rest_as_it_lies(
    dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope
) -> None:
    """What is not rotated of a row was copied from where it would lie if the source had no gaps."""
    right(dst, x, positions, factors, params)
    flat = Memory(x.address, 4 * x.n_elements).bytes().view(np.float32).reshape(x.ne[::-1])
    dst.view()[..., params.n_dims :] = flat[..., params.n_dims :]


@exhibit("ggml-org/llama.cpp 1450", "CPU", "ROPE", says="does not write elements 8 to 31 of its rows", model="gptneox")
def rope_leaves_out_the_rest(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """What is not rotated of a row was not written, which is right in place alone."""
    rest = dst.view()[..., params.n_dims :].copy()
    in_place = dst.overlaps(x)
    right(dst, x, positions, factors, params)
    if not in_place:
        dst.view()[..., params.n_dims :] = rest


@exhibit("ggml-org/llama.cpp 7634", "CPU, CUDA, Metal", "ROPE", says="leaves out src2", model="llama with factors")
def rope_without_factors(dst: Tensor, x: Tensor, positions: Tensor, factors: Tensor | None, params: Rope) -> None:
    """One of two modes of RoPE did not know the factors of frequency."""
    right(dst, x, positions, None, params)
