"""Arguments of quant that cannot be meant: ValueError or TypeError, in a line that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import quant

VALUES = np.arange(64, dtype=np.float32)
BLOCKS = quant.quantize(VALUES, "q8_0")
DEVICE = quant.to_device(BLOCKS, "q8_0")
WIDE, ROWS = DEVICE._replace(quants=DEVICE.quants.astype(int)), DEVICE._replace(scales=DEVICE.scales[None])

WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "type of a number": (lambda: quant.quantize(VALUES, 8), TypeError, "type 8: must be the name"),  # type: ignore[arg-type]
    "type None": (lambda: quant.dequantize(BLOCKS, None), TypeError, "type None: must be"),  # type: ignore[arg-type]
    "bytes": (lambda: quant.dequantize(bytes(68), "q8_0"), TypeError, "blocks of type bytes: must be a NumPy array"),  # type: ignore[arg-type]
    "list of ints": (lambda: quant.dequantize([0] * 68, "q8_0"), TypeError, "blocks of type list"),  # type: ignore[arg-type]
    "masked blocks": (lambda: quant.dequantize(np.ma.array(BLOCKS), "q8_0"), ValueError, "blocks: a masked array"),
    "masked values": (lambda: quant.quantize(np.ma.array(VALUES), "q8_0"), ValueError, "x: a masked array"),
    "complex values": (lambda: quant.quantize(VALUES * 1j, "q8_0"), ValueError, "x of dtype complex64"),
    "complex blocks": (lambda: quant.dequantize(np.zeros(17, complex), "q8_0"), ValueError, "blocks of dtype"),
    "words": (lambda: quant.quantize(["a"] * 32, "q8_0"), ValueError, "x of dtype <U1"),  # type: ignore[arg-type]
    "objects": (lambda: quant.quantize(np.array([None] * 32), "q8_0"), ValueError, "x of dtype object"),
    "None": (lambda: quant.quantize(None, "q8_0"), TypeError, "x of type NoneType"),  # type: ignore[arg-type]
    "blocks in a list": (lambda: quant.to_device([1, 2], "q8_0"), TypeError, "blocks of type list"),  # type: ignore[arg-type]
    "a tuple": (lambda: quant.to_blocks((1, 2), "q8_0"), TypeError, "device of type tuple"),  # type: ignore[arg-type]
    "wide quants": (lambda: quant.to_blocks(WIDE, "q8_0"), ValueError, "quants of dtype int64"),
    "scales of other rows": (lambda: quant.to_blocks(ROWS, "q8_0"), ValueError, "scales of shape (1, 2)"),
    "group in words": (lambda: quant.to_device(BLOCKS, "q8_0", "32"), TypeError, "group size '32'"),  # type: ignore[arg-type]
    "group in halves": (lambda: quant.to_device(BLOCKS, "q8_0", 32.0), TypeError, "group size 32.0"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "says"), WRONG.values(), ids=WRONG)
def test_the_argument_is_named(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)) as found:
        call()
    assert "\n" not in str(found.value)


def test_numbers_in_a_list_are_values() -> None:
    assert (quant.quantize([1.0] * 32, "f16") == quant.quantize(np.ones(32), "f16")).all()  # type: ignore[arg-type]
