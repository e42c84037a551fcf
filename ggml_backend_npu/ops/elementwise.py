"""Element by element: SCALE. Byte for byte what ggml's CPU backend writes on a processor with fused multiply-add."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops.movers import convert, raw
from ggml_backend_npu.registry import op


def _fused_multiply_add(x: NDArray[np.float32], scale: np.float32, bias: np.float32) -> NDArray[np.float32]:
    """x * scale + bias, rounded once.

    float64 holds the product exactly. Its sum with bias is rounded to odd, which a second rounding to float32 does not
    show (Boldo and Melquiond, "When double rounding is odd").
    """
    product, addend = x * np.float64(scale), np.float64(bias)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = total.view(np.int64) % 2 == 0
    towards = np.where(np.isfinite(error) & (error != 0) & even, np.copysign(np.inf, error), total)
    return np.nextafter(total, towards).astype(np.float32)


def _refuse_scale(dst: Tensor, x: Tensor, params: bytes) -> str | None:
    for role, tensor in (("src", x), ("dst", dst)):
        if not tensor.is_contiguous():
            return f"{role} is not contiguous: nb {tensor.nb}"
    return f"src of ne {x.ne}, dst of ne {dst.ne}" if x.ne != dst.ne else None


@op("SCALE", types=[("f32", "f32"), ("bf16", "bf16")], refuse=_refuse_scale)
def scale(dst: Tensor, x: Tensor, params: bytes) -> None:
    """dst = x * scale + bias, which params begin with; dst may be x. Equals ggml_compute_forward_scale.

    There, a float32 without a bias is a product alone; a bfloat16 always has its bias added, be it 0.
    """
    factor, bias = (np.float32(value) for value in struct.unpack_from("2f", params))
    values = convert(raw(x), x.type, "f32")
    with np.errstate(all="ignore"):
        product_alone = x.type == "f32" and bias == 0
        scaled = values * factor if product_alone else _fused_multiply_add(values, factor, bias)
    raw(dst)[...] = convert(scaled, "f32", dst.type)
