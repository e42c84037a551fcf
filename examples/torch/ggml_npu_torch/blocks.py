"""ggml's blocks in torch: decoded and encoded on the device, with the bytes of ggml's CPU.

A decoder takes bytes (..., block bytes) and gives float32 (..., block size), an encoder the other way. Each step is a
call of its own, so that nothing is fused and each is rounded as in ggml's C. A divisor is a tensor: torch multiplies by
the rounded inverse of a number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor as Array

F32, F16 = torch.float32, torch.float16


def _half(b: Array, at: int) -> Array:
    """The float16 at a byte of each block, as float32 (..., 1)."""
    return b[..., at : at + 2].view(F16).to(F32)


def _nibbles(q: Array) -> Array:
    """The low nibbles of all bytes, then the high ones."""
    return torch.cat([q & 15, q >> 4], -1)


def _with_fifth_bits(b: Array, at: int) -> Array:
    """Nibbles after the 4 bytes at `at`, which hold bit 4 of each of the 32."""
    places = torch.arange(8, dtype=torch.uint8, device=b.device)
    bits = ((b[..., at : at + 4, None] >> places) & 1).flatten(-2)
    return _nibbles(b[..., at + 4 :]) | (bits << 4)


def _decode_q4_k(b: Array) -> Array:
    low, high, last = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], -1).to(F32) * _half(b, 0)
    minima = torch.cat([high & 63, (last >> 4) | (high >> 6 << 4)], -1).to(F32) * _half(b, 2)
    q = b[..., 16:].unflatten(-1, (4, 32))
    q = torch.stack([q & 15, q >> 4], -2).flatten(-3, -2).to(F32)  # (..., 8, 32)
    return (q * scales[..., None] - minima[..., None]).flatten(-2)


def _decode_q6_k(b: Array) -> Array:
    low, high = b[..., :128].unflatten(-1, (2, 2, 32)), b[..., 128:192].unflatten(-1, (2, 1, 32))
    low = torch.cat([low & 15, low >> 4], -2)  # (..., 2, 4, 32)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device)[:, None]
    q = (low | (((high >> shifts) & 3) << 4)).to(F32) - 32
    scales = b[..., 192:208].view(torch.int8).to(F32) * _half(b, 208)
    return (q.reshape(*b.shape[:-1], 16, 16) * scales[..., None]).flatten(-2)


DECODERS: dict[str, Callable[[Array], Array]] = {
    "q8_0": lambda b: b[..., 2:].view(torch.int8).to(F32) * _half(b, 0),
    "q4_0": lambda b: (_nibbles(b[..., 2:]).to(F32) - 8) * _half(b, 0),
    "q4_1": lambda b: _nibbles(b[..., 4:]).to(F32) * _half(b, 0) + _half(b, 2),
    "q5_0": lambda b: (_with_fifth_bits(b, 2).to(F32) - 16) * _half(b, 0),
    "q5_1": lambda b: _with_fifth_bits(b, 4).to(F32) * _half(b, 0) + _half(b, 2),
    "q4_K": _decode_q4_k,
    "q6_K": _decode_q6_k,
}


def apart(b: Array, type: str) -> Array:
    """Blocks with a minimum (q4_1, q5_1): 32 elements without it, then it, which ggml's CPU multiplies with the rounded
    sum of a block of x."""
    q = _nibbles(b[..., 4:]) if type == "q4_1" else _with_fifth_bits(b, 4)
    return torch.cat([q.to(F32) * _half(b, 0), _half(b, 2)], -1)


def _bytes_of(x: Array) -> Array:
    """The float16 of each number, as 2 bytes."""
    return x.to(F16).view(torch.uint8)


def _inverse(d: Array) -> Array:
    return d.reciprocal().masked_fill(d == 0, 0)


def _quants(v: Array) -> Array:
    """C's (int8_t) v of what is at most 15: what is no number becomes 0, as the low byte of INT_MIN."""
    return v.nan_to_num(0, 0, 0).to(torch.int8).clamp(max=15).view(torch.uint8)


def _packed(q: Array) -> Array:
    return q[..., :16] | (q[..., 16:] << 4)


def _quantised(x: Array) -> tuple[Array, Array]:
    """Quants and scale of q8_0 as ggml's x86 CPU rounds: x * (127 / max |x|), half to even."""
    most = x.abs().amax(-1, keepdim=True)
    of_127 = most.new_full((), 127)
    v = x * torch.div(of_127, most).masked_fill(most == 0, 0)
    return v.round().nan_to_num(-128, -128, -128), torch.div(most, of_127)


def _encode_q8_0(x: Array) -> Array:
    q, d = _quantised(x)
    return torch.cat([_bytes_of(d), q.to(torch.int8).view(torch.uint8)], -1)


def _encode_q4_0(x: Array) -> Array:
    d = (x.gather(-1, x.abs().argmax(-1, keepdim=True)) + 0.0) / -8  # of equal ones the first; 0 is no -0
    return torch.cat([_bytes_of(d), _packed(_quants(x * _inverse(d) + 8.5))], -1)


def _encode_q4_1(x: Array) -> Array:
    least = x.gather(-1, x.argmin(-1, keepdim=True))
    d = torch.div(x.gather(-1, x.argmax(-1, keepdim=True)) - least, least.new_full((), 15))
    return torch.cat([_bytes_of(d), _bytes_of(least), _packed(_quants((x - least) * _inverse(d) + 0.5))], -1)


ENCODERS: dict[str, Callable[[Array], Array]] = {
    "q8_0": _encode_q8_0,
    "q4_0": _encode_q4_0,
    "q4_1": _encode_q4_1,
}


def _in_blocks(x: Array) -> Array:
    q, d = _quantised(x.unflatten(-1, (-1, 32)))
    return (q * d.to(F16).to(F32)).flatten(-2)


def _in_blocks_with_sums(x: Array) -> Array:
    q, d = _quantised(x.unflatten(-1, (-1, 32)))
    sums = (q.sum(-1, keepdim=True) * d).to(F16).to(F32)
    return torch.cat([q * d.to(F16).to(F32), sums], -1).flatten(-2)


def _in_blocks_of_256(x: Array) -> Array:
    x = x.unflatten(-1, (-1, 256))
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    scale = torch.div(extreme.new_full((), -127), extreme).masked_fill(extreme == 0, 0)
    return ((x * scale).round().clamp(max=127) * _inverse(scale)).flatten(-2)


# what ggml's CPU rounds x to for weights of a type
ROUNDED: dict[str, Callable[[Array], Array]] = {
    "f32": lambda x: x,
    "f16": lambda x: x.to(F16).to(F32),
    "bf16": lambda x: x.to(torch.bfloat16).to(F32),
    **dict.fromkeys(("q8_0", "q4_0", "q5_0"), _in_blocks),
    **dict.fromkeys(("q4_1", "q5_1"), _in_blocks_with_sums),
    **dict.fromkeys(("q4_K", "q6_K"), _in_blocks_of_256),
}
