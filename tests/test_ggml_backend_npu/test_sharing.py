"""Tensors that share memory: which are one group, and what a copy of a group holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ir.sharing import sharing


def test_tensors_that_overlap_are_one_group() -> None:
    whole = Tensor.of(np.arange(64, dtype=np.float32))
    parts = [replace(whole, ne=(16, 1, 1, 1), offset=4 * begin) for begin in (0, 8, 40)]
    groups = [*sharing(parts)]
    assert [[*group.tensors] for group in groups] == [parts[:2], parts[2:]]
    assert [(group.begin - whole.address, group.size) for group in groups] == [(0, 96), (160, 64)]
    assert groups[0].held().bytes().view(np.float32).tolist() == [*range(24)]


def test_one_tensor_bridges_two() -> None:
    whole = Tensor.of(np.arange(64, dtype=np.float32))
    parts = [replace(whole, ne=(16, 1, 1, 1), offset=4 * begin) for begin in (0, 32, 12, 24)]
    (group,) = sharing(parts)
    assert (group.begin, group.size) == (whole.address, 4 * 48)
