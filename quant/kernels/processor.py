"""The processor that kernels are compiled for."""

from __future__ import annotations

import functools

from llvmlite import binding
from numba.core import config


@functools.cache
def processor_has(*features: str) -> bool:
    """Whether the processor that kernels are compiled for has all of these features, by LLVM's names: "avx512f", ...

    That is this machine's processor, unless NUMBA_CPU_NAME and NUMBA_CPU_FEATURES tell numba of another.
    """
    told = config.CPU_FEATURES
    found = binding.get_host_cpu_features().flatten() if told is None else told
    return {f"+{feature}" for feature in features} <= {*found.split(",")}


def target() -> str:
    """The name and the features of the processor that kernels are compiled for, as LLVM writes them."""
    name = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    return f"{name} {binding.get_host_cpu_features().flatten() if features is None else features}"


_lanes = 0  # as told by `follow`


def lanes() -> int:
    """How many float32 are added side by side: as `follow` said, else 16 with AVX-512 and 8 without."""
    return _lanes or (16 if processor_has("avx512f") else 8)


def follow(n: int) -> None:
    """From now on n float32 (16 or 8) are added side by side, whatever processor kernels are compiled for.

    With 8, that processor becomes this one without AVX-512, unless numba was told of another. Kernels that are already
    compiled stay as they are.
    """
    global _lanes
    _lanes = n
    if n == 8 and config.CPU_NAME is None and config.CPU_FEATURES is None:
        features = binding.get_host_cpu_features().flatten().split(",")
        config.CPU_NAME = binding.get_host_cpu_name()
        config.CPU_FEATURES = ",".join(f"-{each[1:]}" if each[1:].startswith("avx512") else each for each in features)
        processor_has.cache_clear()
