"""Faults of RMS_NORM and NORM."""

import ctypes
from dataclasses import replace

import numpy as np
from kit.faults import fault

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.norms import Norm


@fault("RMS_NORM", says="ignores the eps")
def rms_norm_without_eps(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM without its eps."""
    OWN["RMS_NORM"].define(dst, x, params=replace(params, eps=0.0))


@fault("RMS_NORM", says="takes 0.001 for the eps")
def rms_norm_other_eps(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM with an eps of 1e-3."""
    OWN["RMS_NORM"].define(dst, x, params=replace(params, eps=1e-3))


@fault("RMS_NORM", says="gives each row times a number of its own")
def rms_norm_in_halves(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM with its sum of squares in float16."""
    squares = np.square(x.view().astype(np.float16))
    total = np.add.accumulate(squares, axis=-1, dtype=np.float16)[..., -1:].astype(np.float32)
    dst.view()[...] = x.view() / np.sqrt(total / np.float32(x.ne[0]) + np.float32(params.eps))


@fault("NORM", model="rwkv7")
def norm_without_eps(dst: Tensor, x: Tensor, params: Norm) -> None:
    """NORM without its eps."""
    OWN["NORM"].define(dst, x, params=replace(params, eps=0.0))


@fault("NORM", model="gpt2")
def norm_without_the_mean(dst: Tensor, x: Tensor, params: Norm) -> None:
    """NORM that does not subtract the mean."""
    OWN["RMS_NORM"].define(dst, x, params=params)


@fault("RMS_NORM", "sources")
def rms_norm_doubles_its_source(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM that doubles its source after it has read it."""
    OWN["RMS_NORM"].define(dst, x, params=params)
    if not dst.overlaps(x):
        Memory(x.address, x.nbytes).bytes().view(np.float32)[...] *= 2


@fault("RMS_NORM", "ends", failure=("SIGSEGV",), rounded=False)
def rms_norm_reads_address_0(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM that reads address 0."""
    ctypes.string_at(0)


@fault("RMS_NORM", "ends", failure=("time",), rounded=False)
def rms_norm_loops(dst: Tensor, x: Tensor, params: Norm) -> None:
    """RMS_NORM that never returns."""
    while True:
        pass
