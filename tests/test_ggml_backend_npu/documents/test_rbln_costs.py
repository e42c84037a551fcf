"""What RBLN's operators take beside their outputs: no mask and no score is copied."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
from kit.documented import F16, F32
from kit.scores import LAYOUTS, drawn, marks

from ggml_backend_npu.documents.rbln import (
    dynamic_flash_attn_tile,
    dynamic_load,
    dynamic_masked_softmax,
    flash_attn_recompute,
    flash_attn_tile,
    insert,
    masked_softmax,
    nn_pad,
    softmax,
    window_insert,
    window_slice,
    window_softmax,
)


def taken(call: Callable[[], Any]) -> tuple[int, int]:
    """(bytes of what a call gives, bytes that it takes beside them)"""
    call()  # what is compiled or imported at a first call
    tracemalloc.start()
    try:
        result = call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    outputs = result if isinstance(result, tuple) else (result,)
    n_bytes = sum(output.nbytes for output in outputs)
    return n_bytes, peak - n_bytes


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_mask_and_no_score_is_copied(layout: str, dtype: Any) -> None:
    """A view of which an axis runs backwards is copied once; nothing else is."""
    rng = np.random.default_rng(0)
    shape = (2, 3, 4, 32, 160)
    x, sink = LAYOUTS[layout](drawn(shape, rng, dtype)), drawn((1, 3, 4, 1, 1), rng)
    mask = LAYOUTS[layout](marks((2, 1, 1, 32, 160), rng, F32))
    size = prod(shape) * dtype.itemsize
    before = drawn((*shape[:-1], 1), rng)
    out = LAYOUTS[layout](drawn(shape, rng, dtype))
    index = np.array([7, 128], np.int32)
    calls: dict[str, Callable[[], Any]] = {
        "softmax": lambda: softmax(x),
        "softmax along axis 1": lambda: softmax(x, 1),
        "masked_softmax": lambda: masked_softmax(x, mask, sink),
        "dynamic_masked_softmax": lambda: dynamic_masked_softmax(x, index, np.ones((1, 160), np.bool_), sink),
        "window_softmax": lambda: window_softmax(x, index, sink, 128),
        "flash_attn_tile": lambda: flash_attn_tile(x, mask, before),
        "dynamic_flash_attn_tile": lambda: dynamic_flash_attn_tile(x, index, before, None, sink),
        "flash_attn_recompute": lambda: flash_attn_recompute(before, before, before, before, out, out),
    }
    for name, call in calls.items():
        n_bytes, beside = taken(call)
        assert n_bytes >= size, name
        recompute = name == "flash_attn_recompute"
        few = 160_000 if recompute else 16_384  # factors of rows, and NumPy's buffers
        assert beside <= few + (size if layout == "reversed" and not recompute else 0), name


def test_what_moves_takes_no_more_than_its_output() -> None:
    data = np.ones((2, 4, 256, 96), np.float32).swapaxes(1, 2).swapaxes(1, 2)
    new = data[:, :, :64]
    for call in (
        lambda: insert(data, new, 2, 40),
        lambda: window_insert(data, new, 2, 40),
        lambda: window_slice(data, 200, 2, 192),
        lambda: dynamic_load(data, 2, 100),
        lambda: nn_pad(data, 0.0, 2, (0, 63)),
        lambda: nn_pad(data, 0.0, 2, (3, 63), "reflect"),
    ):
        n_bytes, beside = taken(call)
        assert beside <= n_bytes / 2
