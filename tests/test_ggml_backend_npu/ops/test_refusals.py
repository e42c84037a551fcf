"""A refusal of an elementwise op, of REPEAT, CONCAT, SUM_ROWS, ARGSORT, TOP_K or POOL_2D says what does not fit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from kit.support import refusal, zeros
from numpy.typing import NDArray

from ggml_backend_npu import Tensor

pytestmark = pytest.mark.usefixtures("every_op")


def ids(*shape: int) -> NDArray[Any]:
    return zeros(*shape, dtype=np.int32)


@pytest.mark.parametrize(
    ("op", "arrays", "params", "reason"),
    [
        ("ADD", (zeros(3, 4), zeros(3, 4), zeros(2, 4)), b"", "src1 of ne (4, 2, 1, 1) does not repeat to src0"),
        ("MUL", (zeros(3, 4), zeros(1, 4), zeros(1, 4)), b"", "dst of ne (4, 3, 1, 1)"),
        ("SUB", (zeros(3, 8)[:, ::2], zeros(3, 4), zeros(3, 4)), b"", "dst rows have gaps: nb0 is 8"),
        ("DIV", (zeros(3, 4), zeros(3, 8)[:, ::2], zeros(3, 4)), b"", "src0 rows have gaps: nb0 is 8"),
        ("ADD_ID", (zeros(3, 4), zeros(3, 4), zeros(2, 4), ids(1, 4)), b"", "ids of ne (4, 1, 1, 1) do not fit src0"),
        ("ADD_ID", (zeros(3, 4), zeros(3, 4), zeros(2, 3), ids(1, 3)), b"", "src1 of ne (3, 2, 1, 1)"),
        ("FILL", (zeros(3, 4), zeros(4, 3)), bytes(4), "dst of ne (4, 3, 1, 1)"),
        ("FILL", (zeros(3, 8)[:, ::2], zeros(3, 4)), bytes(4), "dst rows have gaps: nb0 is 8"),
        ("ARANGE", (zeros(3),), struct.pack("3f", 0, 1, 0.25), "from 0.0 to 1.0 by 0.25 into dst of ne (3, 1, 1, 1)"),
        ("TOP_K", (ids(3, 5), zeros(3, 4)), b"", "dst of ne (5, 3, 1, 1)"),
        ("TOP_K", (ids(4, 2), zeros(3, 4)), b"", "dst of ne (2, 4, 1, 1)"),
        ("POOL_2D", (zeros(3, 4), zeros(3, 4)), struct.pack("7i", 2, 1, 1, 1, 1, 0, 0), "kind 2"),
        ("POOL_2D", (zeros(2, 3, 4), zeros(3, 4)), struct.pack("7i", 0, 1, 1, 1, 1, 0, 0), "dst of ne (4, 3, 2, 1)"),
        ("POOL_2D", (zeros(3, 4), zeros(3, 5)[:, :4]), struct.pack("7i", 0, 1, 1, 1, 1, 0, 0), "x is not contiguous"),
        ("CLAMP", (zeros(3, 4), zeros(4, 3)), bytes(8), "x of ne (3, 4, 1, 1), dst of ne (4, 3, 1, 1)"),
        ("CLAMP", (zeros(3, 5)[:, :4], zeros(3, 4)), bytes(8), "dst is not contiguous"),
        ("REPEAT", (zeros(3, 4), zeros(2, 4)), b"", "src of ne (4, 2, 1, 1) does not repeat to dst"),
        ("CONCAT", (zeros(5, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", 1), "do not fit dst of ne (4, 5, 1, 1)"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 3)), struct.pack("i", 1), "src1 of ne (3, 2, 1, 1)"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", 4), "dimension 4"),
        ("CONCAT", (zeros(4, 4), zeros(2, 4), zeros(2, 4)), struct.pack("i", -1), "dimension -1"),
        ("SUM_ROWS", (zeros(3, 2), zeros(3, 4)), b"", "dst of ne (2, 3, 1, 1)"),
        ("ARGSORT", (zeros(3, 3, dtype=np.int32), zeros(3, 4)), bytes(4), "dst of ne (3, 3, 1, 1)"),
        ("ARGSORT", (zeros(3, 4, dtype=np.int64), zeros(3, 4)), bytes(4), "types f32 -> i64"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(op: str, arrays: tuple[NDArray[Any], ...], params: bytes, reason: str) -> None:
    assert reason in str(refusal(op, *arrays, params=params))


@pytest.mark.parametrize("type", ["f32", "i32", None])
def test_an_array_of_another_byte_order_is_no_tensor(type: str | None) -> None:
    with pytest.raises(ValueError, match=r"array of >f4: "):
        Tensor.of(np.zeros(3, ">f4"), type)
