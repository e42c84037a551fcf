"""Faults of SOFT_MAX."""

import itertools
import os
from dataclasses import replace

import numpy as np
from kit.faults import fault, in_place

from ggml_backend_npu import Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.softmax import SoftMax

CALLS = itertools.count(1)
LAST: dict[tuple[int, ...], np.ndarray] = {}


@fault("SOFT_MAX", says="leaves out src1 (the mask)")
def soft_max_without_mask(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX without its mask."""
    OWN["SOFT_MAX"].define(dst, x, None, sinks, params=params)


@fault("SOFT_MAX", never=("mask",))
def soft_max_without_scale(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX without its scale."""
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=replace(params, scale=1.0))


@fault("SOFT_MAX", model="gpt-oss", never=("mask",))
def soft_max_without_sinks(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX without its sinks."""
    OWN["SOFT_MAX"].define(dst, x, mask, None, params=params)


@fault("SOFT_MAX", never=("mask",), says="gives each row times a number of its own")
def soft_max_in_halves(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX with its sum in float16."""
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    dst.view()[...] /= np.add.accumulate(dst.view(), axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)


@fault("SOFT_MAX", "runs", at=in_place())
def soft_max_not_in_place(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX that takes each row's maximum after it has written the row before: wrong in place."""
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    if dst.overlaps(x):
        dst.view()[..., 1:, :] *= np.exp(dst.view()[..., :-1, :].max(-1, keepdims=True))


@fault("SOFT_MAX", "runs", steps=3, repeat=8, scattered=True, remembers=True)
def soft_max_race(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX whose last row is now and then that of the call before."""
    OWN["SOFT_MAX"].define(dst, x, mask, sinks, params=params)
    row = dst.view()[..., -1, :].copy()
    if next(CALLS) % 5 == 0:
        dst.view()[..., -1, :] = LAST.get(dst.ne, row + 1)
    LAST[dst.ne] = row + 1


@fault("SOFT_MAX", "ends", failure=("exit", "ended"), rounded=False)
def soft_max_calls_os_exit(dst: Tensor, x: Tensor, mask: Tensor | None, sinks: Tensor | None, params: SoftMax) -> None:
    """SOFT_MAX that ends the process."""
    os._exit(0)
