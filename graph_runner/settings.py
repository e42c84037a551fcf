"""How a context is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceName = Literal["npu", "cpu"]
FlashAttention = Literal["auto", "on", "off"]

# what llama.cpp's own programs let a cache be; of other types its kernels crash
QUANTISED_CACHE_TYPES = ("q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
CACHE_TYPES = ("f32", "f16", "bf16", *QUANTISED_CACHE_TYPES)


@dataclass(frozen=True)
class Settings:
    """How a context is made.

    device        "npu": the NPU takes the nodes it supports; "cpu": llama.cpp's CPU takes all
    n_ctx         cells of the context
    cache_type_k  ggml type of the K cache; cache_type_v of the V cache (a quantised one needs flash attention)
    threads       of the CPU backend; 0 = all cores
    gpu_layers    layers whose weights and caches go to a device of type "gpu"
    weights       whether the model's weights are loaded; without them there are splits to see, but nothing to decode
    without       on the CPU: fused ops that the graph is to have no nodes of, as that of a device has none
    """

    device: DeviceName = "cpu"
    n_ctx: int = 512
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: FlashAttention = "auto"
    threads: int = 0
    gpu_layers: int = 0
    weights: bool = True
    without: frozenset[str] = frozenset()


def context_for(prompt: str, n: int) -> int:
    """Cells that surely hold a prompt and n more tokens: a token is at least a byte."""
    return -(-(len(prompt.encode()) + 8 + n) // 256) * 256
