"""Faults of CPY, CONT and CONCAT."""

import ctypes
from dataclasses import replace

import numpy as np
from kit.faults import fault
from kit.nodes import src

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import Concat


@fault("CPY", at=lambda node: src(node).offset > 0, model="rwkv7", says="ignores the offset of src0")
def cpy_without_offset(dst: Tensor, src: Tensor) -> None:
    """CPY that ignores the offset of a view."""
    OWN["CPY"].define(dst, replace(src, offset=0))


@fault("CPY", at=lambda node: not src(node).is_contiguous(), model="mamba")
def cpy_without_strides(dst: Tensor, src: Tensor) -> None:
    """CPY that takes the bytes of its source as they lie."""
    values = Memory(src.address, dst.nbytes).bytes().view(np.float32)
    dst.view()[...] = values.reshape(dst.ne[::-1])


@fault("CONT", never=("permutes rows",))
def cont_without_strides(dst: Tensor, src: Tensor) -> None:
    """CONT that takes the bytes of its source as they lie."""
    values = Memory(src.address, dst.nbytes).bytes().view(np.float32)
    dst.view()[...] = values.reshape(dst.ne[::-1])


@fault("CONT", never=("offset",))
def cont_heads_reversed(dst: Tensor, src: Tensor) -> None:
    """CONT that puts the heads of its source in the wrong order."""
    dst.view()[...] = src.view()[:, :, ::-1].reshape(dst.ne[::-1])


@fault("CONT", says="gives NaN in row 3")
def cont_nan_in_a_row(dst: Tensor, src: Tensor) -> None:
    """CONT with NaN in one row."""
    OWN["CONT"].define(dst, src)
    if dst.ne[1] > 3:
        dst.view()[0, 0, 3] = np.nan


@fault("CONCAT", model="mamba")
def concat_of_swapped_sources(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> None:
    """CONCAT with its sources swapped."""
    dst.view()[...] = np.concatenate([b.view(), a.view()], axis=3 - params.dim)


@fault("CONT", "strays")
def cont_one_byte_too_many(dst: Tensor, src: Tensor) -> None:
    """CONT that writes one byte after its output."""
    OWN["CONT"].define(dst, src)
    Memory(dst.end, 1).bytes()[...] ^= 0xFF


@fault("CONT", "strays")
def cont_one_row_too_many(dst: Tensor, src: Tensor) -> None:
    """CONT that writes one row too many."""
    OWN["CONT"].define(dst, src)
    Memory(dst.end, dst.nb[1]).bytes()[...] ^= 0xFF


@fault("CONT", "ends", failure=("SIGABRT",), rounded=False)
def cont_frees_its_output(dst: Tensor, src: Tensor) -> None:
    """CONT that frees memory which is not its own."""
    OWN["CONT"].define(dst, src)
    ctypes.CDLL(None).free(ctypes.c_void_p(dst.address + 16))


@fault("CONT", "ends", failure=("ValueError: no rows today",), rounded=False)
def cont_raises(dst: Tensor, src: Tensor) -> None:
    """CONT that raises an exception."""
    raise ValueError("no rows today")
