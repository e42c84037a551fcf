"""CPY, CONCAT and SET_ROWS."""

from __future__ import annotations

import itertools
import os

import numpy as np
from kit.museum import exhibit

from ggml_backend_npu import Memory, Tensor
from ggml_backend_npu.ops import OWN
from ggml_backend_npu.ops.movers import Concat

CALLS = itertools.count(1)


@exhibit(
    "ggml-org/ggml 1497", "CUDA", "CPY", outcome="missed", model="mamba",
    why="No node of llama.cpp's graphs copies into rows with gaps. ggml's own cases do: `ggml-npu test` finds it.",
)  # fmt: skip
def cpy_into_gaps(dst: Tensor, src: Tensor) -> None:
    """A transposed copy wrote its destination without gaps, whatever its strides. A cache was corrupted."""
    if dst.is_contiguous() or src.type != dst.type:
        OWN["CPY"].define(dst, src)
    else:
        flat = np.ascontiguousarray(src.view()).reshape(-1).view(np.uint8)
        Memory(dst.address, flat.size).bytes()[...] = flat


@exhibit("ggml-org/llama.cpp 26509", "CUDA", "SET_ROWS", says="does not write row|does not write rows")
def set_rows_loses_neighbours(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """Rows of one F16 were corrupted, others in each run: a model said nothing but "<". Here one row is lost at each
    fifth call."""
    lost = int(ids.view().reshape(-1)[-1])
    before = dst.view()[:, :, lost].copy()
    OWN["SET_ROWS"].define(dst, src, ids)
    if src.ne[0] == 1 and next(CALLS) % 5 == 0:
        dst.view()[:, :, lost] = before


@exhibit("ggml-org/llama.cpp 25530", "CUDA", "CONCAT", says="SIGABRT", model="mamba")
def concat_aborts(dst: Tensor, a: Tensor, b: Tensor, params: Concat) -> None:
    """A source with gaps failed an assertion, and the process ended."""
    if not b.is_contiguous():
        os.abort()
    OWN["CONCAT"].define(dst, a, b, params=params)
