"""Every argument that RBLN's operators refuse: one line, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from kit.documented import Array
from kit.scores import f32

from ggml_backend_npu.documents.rbln import (
    dynamic_flash_attn_tile,
    dynamic_load,
    dynamic_masked_softmax,
    dynamic_store,
    flash_attn_recompute,
    flash_attn_tile,
    insert,
    masked_softmax,
    nn_pad,
    softmax,
    to_dynamic_index,
    window_insert,
    window_slice,
    window_softmax,
)

X4, X5 = np.zeros((2, 6, 3, 8), np.float32), np.zeros((2, 2, 3, 3, 8), np.float32)
M4, M5 = np.ones((2, 1, 3, 8), np.float32), np.ones((2, 1, 1, 3, 8), np.float32)
S4, S5 = np.zeros((1, 6, 1, 1), np.float32), np.zeros((1, 2, 3, 1, 1), np.float32)
R4 = np.zeros((2, 6, 3, 1), np.float32)
D, U = np.zeros((4, 5), np.float32), np.zeros((4, 2), np.float32)
OUT = np.zeros((2, 6, 3, 4), np.float32)
loose_window = partial(window_softmax, window_size=5, strict=False)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "index in int64": (lambda: to_dynamic_index(np.array([1], np.int64)), "data of int64"),
    "index in float32": (lambda: to_dynamic_index(f32(1)), "data of float32"),
    "index of two": (lambda: to_dynamic_index(np.array([1, 2], np.int32)), r"data of shape \(2,\)"),
    "index of none": (lambda: to_dynamic_index(np.array([], np.int32)), r"data of shape \(0,\)"),
    "index below 0": (lambda: to_dynamic_index(np.array([-1], np.int32)), "data holds -1"),
    "index above max": (lambda: to_dynamic_index(np.array([65], np.int32), 64), "data holds 65: max is 64"),
    "max that is no number": (lambda: to_dynamic_index(np.array([65], np.int32), 1.5), "max 1.5"),  # type: ignore[arg-type]
    "load, index below 0": (lambda: dynamic_load(D, 0, -1), "index -1"),
    "load, index a float": (lambda: dynamic_load(D, 0, 1.0), "index 1.0"),
    "load, index True": (lambda: dynamic_load(D, 0, True), "index True"),
    "load, index of many floats": (lambda: dynamic_load(D, 0, np.ones((9, 99))), r"index array.*\.\.\."),
    "load, axis": (lambda: dynamic_load(D, 2, 1), "axis 2: must be from -2 to 1"),
    "load, axis below": (lambda: dynamic_load(D, -3, 1), "axis -3"),
    "load, axis a float": (lambda: dynamic_load(D, 1.0, 1), "axis 1.0"),  # type: ignore[arg-type]
    "load, index of another length": (lambda: dynamic_load(D, 1, [1, 2]), r"index of shape \(2,\)"),
    "load, index for each along axis 0": (lambda: dynamic_load(D, 0, [1, 2, 3, 4]), "along axis 0"),
    "insert, rank": (lambda: insert(D, U[0], 1, 0), r"updates of shape \(2,\)"),
    "insert, type": (lambda: insert(D, U.astype(np.float16), 1, 0), "updates of float16"),
    "insert, other axis": (lambda: insert(D, U[:3], 1, 0), r"updates of shape \(3, 2\)"),
    "insert, axis": (lambda: insert(D, U, 2, 0), "axis 2: must be from 0 to 1"),
    "insert, axis from the end": (lambda: insert(D, U, -1, 0), "axis -1: must be from 0 to 1"),
    "insert, index below 0": (lambda: insert(D, U, 1, -1), "index -1"),
    "insert, index above": (lambda: insert(D, U, 1, 6), "index 6"),
    "insert, one index above": (lambda: insert(X4, X4[:, :, :1], 2, [0, 4]), "index 4"),
    "insert, longer": (lambda: insert(U, D, 1, 0), r"updates of shape \(4, 5\)"),
    "insert, beyond the end": (lambda: insert(D, U, 1, 4), "index 4: 2 updates from there do not fit into 5"),
    "insert, at the end": (lambda: insert(D, U, 1, 5), "index 5: must be below 5"),
    "insert, above the end": (lambda: insert(D, U, 1, 6, strict=False), "index 6: must be at most 5"),
    "window_insert, rank": (lambda: window_insert(D, U[0], 1, 0), r"updates of shape \(2,\)"),
    "window_insert, type": (lambda: window_insert(D, U.astype(np.int32), 1, 0), "updates of int32"),
    "window_insert, other axis": (lambda: window_insert(D, U[:3], 1, 0), r"updates of shape \(3, 2\)"),
    "window_insert, index": (lambda: window_insert(D, U, 1, -1), "index -1"),
    "window_insert, axis": (lambda: window_insert(D, U, -1, 1), "axis -1"),
    "window_slice, shorter": (lambda: window_slice(D, 2, 1, 6), "window_size 6"),
    "window_slice, no window": (lambda: window_slice(D, 2, 1, 0), "window_size 0"),
    "window_slice, lengths": (lambda: window_slice(X4, [1, 2], 2, 3), r"index \[1, 2\]: slices of \[1, 2\] elements"),
    "window_slice, index": (lambda: window_slice(D, -2, 1, 2), "index -2"),
    "window_slice, axis": (lambda: window_slice(D, 2, 2, 2), "axis 2"),
    "window_slice, axis from the end": (lambda: window_slice(D, 2, -1, 2), "axis -1"),
    "window_slice, arguments of old": (lambda: window_slice(D, 2, 4, np.array([1], np.int32)), "axis 4"),  # type: ignore[arg-type]
    "pad, below 0": (lambda: nn_pad(D, 0, 1, (0, -1)), "pad_size -1"),
    "pad, three": (lambda: nn_pad(D, 0, 1, (0, 1, 2)), r"pad_size \(0, 1, 2\)"),
    "pad, a float": (lambda: nn_pad(D, 0, 1, 1.5), "pad_size 1.5"),
    "pad, mode": (lambda: nn_pad(D, 0, 1, 1, "wrap"), "mode 'wrap'"),
    "pad, modes": (lambda: nn_pad(D, 0, 1, 1, ["edge"]), r"mode \['edge'\]"),  # type: ignore[arg-type]
    "pad, axis": (lambda: nn_pad(D, 0, 2, 1), "axis 2"),
    "pad, reflect too far": (lambda: nn_pad(D, 0, 1, (5, 0), "reflect"), "pad_size 5"),
    "pad, reflect too far right": (lambda: nn_pad(D, 0, 1, (0, 6), "reflect"), "pad_size 6"),
    "pad, edge of nothing": (lambda: nn_pad(D[:, :0], 0, 1, 0, "edge"), "mode edge"),
    "pad, reflect of nothing": (lambda: nn_pad(D[:, :0], 0, 1, 0, "reflect"), "mode reflect"),
    **{
        f"pad, {dtype.__name__} of {value!r}": (
            partial(nn_pad, np.zeros(3, dtype), value, 0, 1),
            "value .*: must be a number",
        )
        for dtype, value in [
            *((np.float32, value) for value in (1e39, "1", None, 1j, [1, 2])),
            *((np.float16, value) for value in (65520.0, 10**400)),
            *((np.int8, value) for value in (128, 0.5, np.nan, np.inf)),
            *((np.uint8, value) for value in (-1, -1.0)),
            (np.bool_, 2),
        ]
    },
    "softmax, axis": (lambda: softmax(D, 2), "axis 2"),
    "softmax, axis below": (lambda: softmax(D, -3), "axis -3"),
    "softmax, no axis": (lambda: softmax(np.float32(1)), "axis -1"),
    "softmax, of nothing": (lambda: softmax(D[:, :0]), r"input of shape \(4, 0\)"),
    "softmax, float64": (lambda: softmax([1.0, 2.0]), "input of float64"),
    "softmax, other byte order": (lambda: softmax(D.astype(">f4")), "input of >f4"),
    "masked, axes": (lambda: masked_softmax(X4[0], M4), r"input of shape \(6, 3, 8\)"),
    "masked, int": (lambda: masked_softmax(X4.astype(np.int32), M4), "input of int32"),
    "masked, of nothing": (lambda: masked_softmax(X4[..., :0], M4[..., :0]), r"input of shape \(2, 6, 3, 0\)"),
    "masked, rank of mask": (lambda: masked_softmax(X5, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "masked, rank of mask 5": (lambda: masked_softmax(X4, M5), r"mask of shape \(2, 1, 1, 3, 8\)"),
    "masked, heads of mask": (lambda: masked_softmax(X4, X4), r"mask of shape \(2, 6, 3, 8\)"),
    "masked, group of mask": (lambda: masked_softmax(X5, X5[:, :1]), r"mask of shape \(2, 1, 3, 3, 8\)"),
    "masked, Seq of mask": (lambda: masked_softmax(X4, M4[:, :, :1]), r"mask of shape \(2, 1, 1, 8\)"),
    "masked, Channel of mask": (lambda: masked_softmax(X4, M4[..., :7]), r"mask of shape \(2, 1, 3, 7\)"),
    "masked, Nmb of mask": (lambda: masked_softmax(X4, M4[[0, 1, 1]]), r"mask of shape \(3, 1, 3, 8\)"),
    "masked, type of mask": (lambda: masked_softmax(X4, M4.astype(object)), "mask array"),
    "masked, rank of sink": (lambda: masked_softmax(X5, M5, S4), r"sink of shape \(1, 6, 1, 1\)"),
    "masked, heads of sink": (lambda: masked_softmax(X4, M4, S4[:, :1]), r"sink of shape \(1, 1, 1, 1\)"),
    "masked, group of sink": (lambda: masked_softmax(X5, M5, S5[:, :, :1]), r"sink of shape \(1, 2, 1, 1, 1\)"),
    "masked, Nmb of sink": (lambda: masked_softmax(X4, M4, S4[[0, 0]]), r"sink of shape \(2, 6, 1, 1\)"),
    "masked, type of sink": (lambda: masked_softmax(X4, M4, S4.astype(np.float64)), "sink of float64"),
    "masked, axis that is not": (lambda: masked_softmax(X4, M4, axis=4), "axis 4"),
    "dynamic, index below 0": (lambda: dynamic_masked_softmax(X4, -1), "index -1"),
    "dynamic, index above": (lambda: dynamic_masked_softmax(X4, 9), "index 9"),
    "dynamic, one index above": (lambda: dynamic_masked_softmax(X4, [8, 9]), "index 9"),
    "dynamic, index of three": (lambda: dynamic_masked_softmax(X4, [1, 2, 3]), r"index of shape \(3,\)"),
    "dynamic, index float": (lambda: dynamic_masked_softmax(X4, 2.0), "index 2.0"),
    "dynamic, mask of 4 axes": (lambda: dynamic_masked_softmax(X4, 1, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "dynamic, Channel of mask": (lambda: dynamic_masked_softmax(X4, 1, M4[:, 0, 0, 1:]), r"mask of shape \(2, 7\)"),
    "dynamic, sink": (lambda: dynamic_masked_softmax(X5, 1, None, S4), r"sink of shape \(1, 6, 1, 1\)"),
    "dynamic, axis": (lambda: dynamic_masked_softmax(X5, 1, axis=-6), "axis -6"),
    "window, none": (lambda: window_softmax(X4, 1), "window_size None"),
    "window, 0": (lambda: window_softmax(X4, 1, window_size=0), "window_size 0"),
    "window, a float": (lambda: window_softmax(X4, 1, window_size=4.0), "window_size 4.0"),  # type: ignore[arg-type]
    "window, arguments of old": (lambda: window_softmax(X4, np.array([1], np.int32), 4), "sink of int64"),
    "window, few": (lambda: window_softmax(X4, 1, window_size=4), "window_size 4"),
    "window, 64s": (lambda: window_softmax(X4, 1, window_size=129), "window_size 129"),
    "window, 128": (lambda: window_softmax(X4, 1, window_size=64), "window_size 64"),
    "window, index above": (lambda: loose_window(X4, 6), "index 6"),
    "window, index below 0": (lambda: loose_window(X4, -1), "index -1"),
    "window, too few columns": (lambda: loose_window(X4, 6, window_size=6), r"input of shape \(2, 6, 3, 8\)"),
    "window, too few for one entry": (lambda: loose_window(X4, [1, 6], window_size=6), "3 rows from index 6 on"),
    "window, pad_c": (lambda: loose_window(X4, 1, pad_c=0.5), "pad_c 0.5"),  # type: ignore[arg-type]
    "window, pad_c none": (lambda: loose_window(X4, 1, pad_c=None), "pad_c None"),  # type: ignore[arg-type]
    "window, axis": (lambda: loose_window(X4, 1, axis=4), "axis 4"),
    "window, sink": (lambda: loose_window(X4, 1, S5), r"sink of shape \(1, 2, 3, 1, 1\)"),
    "tile, mask": (lambda: flash_attn_tile(X4, M4[..., :7]), r"mask of shape \(2, 1, 3, 7\)"),
    "tile, row_max_i": (lambda: flash_attn_tile(X4, M4, R4[..., 0]), r"row_max_i of shape \(2, 6, 3\)"),
    "tile, row_max_i of 5 axes": (lambda: flash_attn_tile(X5, M5, R4), r"row_max_i of shape \(2, 6, 3, 1\)"),
    "tile, type of row_max_i": (lambda: flash_attn_tile(X4, M4, R4.astype(np.int32)), "row_max_i of int32"),
    "dynamic tile, index": (lambda: dynamic_flash_attn_tile(X4, 9), "index 9"),
    "dynamic tile, row_max_i": (lambda: dynamic_flash_attn_tile(X4, 1, X4), r"row_max_i of shape \(2, 6, 3, 8\)"),
    "dynamic tile, mask": (lambda: dynamic_flash_attn_tile(X4, 1, None, M4), r"mask of shape \(2, 1, 3, 8\)"),
    "dynamic tile, sink": (lambda: dynamic_flash_attn_tile(X4, 1, None, None, S5), r"sink of shape \(1, 2, 3, 1, 1\)"),
    "recompute, rows": (lambda: flash_attn_recompute(R4, R4[:1], R4, R4, OUT, OUT), "row_max_global of shape"),
    "recompute, sums": (lambda: flash_attn_recompute(R4, R4, OUT, R4, OUT, OUT), "row_sum_prev of shape"),
    "recompute, sums now": (lambda: flash_attn_recompute(R4, R4, R4, R4[..., 0], OUT, OUT), "row_sum_cur of shape"),
    "recompute, outs": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT, OUT[..., :3]), "attn_out_cur of shape"),
    "recompute, type": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT, OUT.astype(np.float16)), "attn_out_cur of"),
    "recompute, int": (lambda: flash_attn_recompute(R4, R4, R4, R4, OUT.astype(int), OUT), "attn_out_prev of int"),
    "recompute, one axis": (lambda: flash_attn_recompute(R4, R4, R4, R4, f32(1), f32(1)), "attn_out_prev of shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "axis", "index", "message"),
    [
        (np.ones((4, 4)), 1, 2, r"value of shape \(4, 4\)"),
        (np.ones((5, 5)), 1, 2, r"value of shape \(5, 5\)"),
        (np.ones((4, 6)), 1, None, r"value of shape \(4, 6\)"),
        (np.ones(5), 1, 2, r"value of shape \(5,\)"),
        (np.ones((4, 5), complex), 1, 2, "value of complex128"),
        (np.ones((4, 5)), 2, 2, "axis 2"),
        (np.ones((4, 5)), 1, -1, "index -1"),
        (np.ones((4, 5)), 1, [1, 2], r"index of shape \(2,\)"),
        (np.ones((4, 5)), 1, [1, 2, 3, -4], "index -4"),
        (np.ones((4, 5)), 0, [1, 2, 3, 4], "along axis 0"),
    ],
)
def test_dynamic_store_refuses_before_it_writes(value: Array, axis: int, index: Any, message: str) -> None:
    ptr = D.copy()
    with pytest.raises(ValueError, match=message):
        dynamic_store(ptr, value, axis, index)
    np.testing.assert_array_equal(ptr, D)


def test_dynamic_store_refuses_what_cannot_be_written_to() -> None:
    for ptr in ([0.0, 0.0], np.broadcast_to(f32(0, 0), (2,))):
        with pytest.raises(ValueError, match="ptr"):
            dynamic_store(ptr, f32(1, 2))  # type: ignore[arg-type]
