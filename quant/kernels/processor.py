"""The processor that kernels are compiled for."""

from __future__ import annotations

import functools

from llvmlite import binding
from numba.core import config


@functools.cache
def processor_has(*features: str) -> bool:
    """Whether the processor that kernels are compiled for has these features, by LLVM's names: "avx512f", ...

    It is this one, unless numba is told of another by NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
    """
    told = config.CPU_FEATURES
    found = binding.get_host_cpu_features().flatten() if told is None else told
    return {f"+{feature}" for feature in features} <= {*found.split(",")}


def target() -> str:
    """The processor that kernels are compiled for, and its features, by LLVM's names."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    return f"{name} {binding.get_host_cpu_features().flatten() if features is None else features}"


_lanes = 0  # as told by `follow`


def lanes() -> int:
    """How many float32 are added up side by side: as many as a vector of ggml's has, once `follow` has told it."""
    return _lanes or (16 if processor_has("avx512f") else 8)


def follow(n: int) -> None:
    """From here on n float32 (16 or 8) are added up side by side, whatever processor kernels are compiled for. With 8
    that is this one without AVX-512, unless numba was told of another. What has been compiled stays."""
    global _lanes
    _lanes = n
    if n == 8 and config.CPU_NAME is None and config.CPU_FEATURES is None:
        features = binding.get_host_cpu_features().flatten().split(",")
        config.CPU_NAME = binding.get_host_cpu_name()
        config.CPU_FEATURES = ",".join(f"-{each[1:]}" if each[1:].startswith("avx512") else each for each in features)
        processor_has.cache_clear()
