"""The settings of a context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

DeviceName = Literal["npu", "cpu", "foreign", "elsewhere"]
FlashAttention = Literal["auto", "on", "off"]
Gives = Literal["logits", "embeddings"]  # of a step

# what llama.cpp's own programs let a cache be; of other types its kernels crash
QUANTISED_CACHE_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
CACHE_TYPES = ("f32", "f16", "bf16", *QUANTISED_CACHE_TYPES)


N_BATCH = 512  # tokens that a graph has at most
ALL_LAYERS = 999  # more than any model has


@dataclass(frozen=True)
class Settings:
    """The settings of a context.

    device      "npu": the NPU takes the nodes it supports; "cpu": llama.cpp's CPU takes all;
                "foreign": a device of somebody else's backend takes what llama.cpp gives it;
                "elsewhere": the CPU of another llama.cpp, in another process
    n_ctx       context size in tokens (cells), of each sequence
    cache_type_k  ggml type of the K cache
    cache_type_v  ggml type of the V cache (a quantised one needs flash attention)
    flash_attention  "auto", "on" or "off"
    threads     of the CPU backend; 0 = as many as the process may use
    gpu_layers  layers to offload to a device of type "gpu", with their weights and caches; None: 0, in a diff all
    loras       LoRA adapters, each added with the scale 1
    weights     whether to load the model's weights; without them splits can be counted, but nothing can be decoded
    without     on the CPU: fused ops that the graph must not have, so that it matches the graph of a device without
                them
    sequences   that are decoded together, each with caches of its own
    draft       tokens that each step after the prompt decodes besides the next one, as a draft's are checked
    repack      whether ggml's CPU may have weights in an order of its own, in memory that cannot be read
    op_offload  whether a device computes large nodes of layers that it was not given
    text        whether a model that decodes and pools embeddings gives logits all the same
    """

    device: DeviceName = "cpu"
    n_ctx: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: FlashAttention = "auto"
    threads: int = 0
    gpu_layers: int | None = None
    loras: tuple[Path, ...] = ()
    weights: bool = True
    without: frozenset[str] = frozenset()
    sequences: int = 1
    draft: int = 0
    repack: bool = False
    op_offload: bool = True
    text: bool = False

    def holding(self, prompt: str, steps: int) -> Settings:
        """Returns them with a context that surely holds a prompt and the steps after it."""
        return replace(self, n_ctx=context_for(prompt, steps * (1 + self.draft)))


def context_for(prompt: str, n: int) -> int:
    """Returns a context size that surely holds a prompt and n more tokens: a token is at least a byte."""
    return -(-(len(prompt.encode()) + 8 + n) // 256) * 256
