"""token_shift of the RWKV and Ascend document: RWKV-7's time-mixing shift, the lerp of six projections at once.

Where the document contradicts itself: rwkvag has 6 rows (its docstring says 5), and ht is always [B, 1, C]. h0 may be
[B, C], as its code views it. Its int8 has no meaning without scales, which it does not name: here they are arguments.

Its table gives x and rwkvag their types independently: all nine pairs are supported. An operand is first converted to
float32, without rounding for float32 and float16, and with one rounding, of quant times scale, for int8; SUB, MUL and
ADD round to float32 each. Where x is not float32, the sum is rounded once more to x's type, to nearest, ties to even;
overflow gives infinity in float16, and -128 or 127 in int8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ggml_backend_npu.documents import run
from ggml_backend_npu.ops.token_shift import SequenceRows, bind_token_shift

Array = NDArray[Any]

_TYPES = {"float32": "f32", "float16": "f16", "int8": "i8"}
_NAMES = ("xr", "xw", "xk", "xv", "xa", "xg", "ht")


def token_shift(
    x: Array,
    rwkvag: Array,
    h0: Array,
    *,
    x_scale: float | None = None,
    mu_scale: float | None = None,
    out_scale: ArrayLike | None = None,
    out: Sequence[Array] | None = None,
) -> tuple[Array, ...]:
    """(xr, xw, xk, xv, xa, xg, ht): each token's interpolation with the one before it, x + (previous - x) * rwkvag[i].

    x       [B, T, C] float32, float16 or int8; any strides from row to row
    rwkvag  [6, 1, 1, C] or [6, C], float32, float16 or int8 whatever x is, in the order r, w, k, v, a, g
    h0      [B, 1, C] or [B, C], float32 or float16: the row before the first token of each sequence
    x_scale, mu_scale, out_scale  the value of one step of an int8 x, rwkvag and output; out_scale one for all or six.
            Outputs are rounded to nearest, ties to even, and saturate
    out     seven arrays to write into, of the shapes and dtypes below; ht may be h0 itself, viewed so

    The outputs are [B, T, C] of x's dtype; ht is [B, 1, C] of h0's: the last token, dequantised where x is int8, to be
    used as the next h0. A sequence in chunks gives the bits of one call. Computed in float32, in the order of ggml's
    SUB, MUL and ADD, and rounded once. NaN and infinity propagate; NaN as int8 is 0. Without sequences or columns
    nothing is done. Raises ValueError, before anything is written, for any other shape, dtype or scale.
    """
    batch, n_tokens, width = _checked(x, rwkvag, h0)
    h0 = h0[:, None] if h0.ndim == 2 else h0
    quantized = x.dtype == np.int8
    scales = _checked_scales(x_scale, mu_scale, out_scale, quantized=quantized, mu_quantized=rwkvag.dtype == np.int8)
    if out is None:
        mixed = np.empty((6, batch, n_tokens, width), x.dtype)
        out = (*mixed, np.empty((batch, 1, width), h0.dtype))
    outputs = _checked_outputs(out, x, h0, rwkvag)
    if x.size:
        rows, mu, before = (_rows(array) for array in (x, rwkvag.reshape(6, 1, width), h0))
        first = outputs[0]
        call = bind_token_shift(
            _sequence_rows(rows, scales[0]),
            _address(rows) - rows.strides[1],
            SequenceRows(_TYPES[mu.dtype.name], _address(mu), mu.strides[0], 0, scales[1]),
            [_address(output) for output in outputs[:6]],
            _sequence_rows(first),
            ne=(width, n_tokens, batch),
            first=_sequence_rows(before),
            scales=scales[2:],
        )
        run(call)
        last = x[:, -1:]
        with np.errstate(over="ignore"):
            outputs[6][...] = last * np.float32(scales[0]) if quantized else last
    return outputs


def _checked(x: Array, rwkvag: Array, h0: Array) -> tuple[int, int, int]:
    for name, array in (("x", x), ("rwkvag", rwkvag), ("h0", h0)):
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is {type(array).__name__}: must be an array")
    if x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"x of shape {x.shape}: must be [B, T, C] with T of 1 or more")
    batch, n_tokens, width = x.shape
    if rwkvag.shape not in ((6, 1, 1, width), (6, width)):
        raise ValueError(f"rwkvag of shape {rwkvag.shape}: must be [6, 1, 1, {width}] or [6, {width}]")
    if h0.shape not in ((batch, 1, width), (batch, width)):
        raise ValueError(f"h0 of shape {h0.shape}: must be [{batch}, 1, {width}] or [{batch}, {width}]")
    if x.dtype.name not in _TYPES or not x.dtype.isnative:
        raise ValueError(f"x of dtype {x.dtype}: must be float32, float16 or int8")
    if rwkvag.dtype.name not in _TYPES or not rwkvag.dtype.isnative:
        raise ValueError(f"rwkvag of dtype {rwkvag.dtype}: must be float32, float16 or int8")
    if h0.dtype not in (np.float32, np.float16):
        raise ValueError(f"h0 of dtype {h0.dtype}: must be float32 or float16")
    return batch, n_tokens, width


def _checked_scales(
    x_scale: float | None, mu_scale: float | None, out_scale: ArrayLike | None, *, quantized: bool, mu_quantized: bool
) -> list[float]:
    """Scales of x, of rwkvag and of the six outputs; 1 where they are not int8."""
    needed = {
        "x_scale": (x_scale, quantized),
        "mu_scale": (mu_scale, mu_quantized),
        "out_scale": (out_scale, quantized),
    }
    found: list[float] = []
    for name, (value, used) in needed.items():
        if used and value is None:
            raise ValueError(f"{name} is missing: int8 has no meaning without a scale")
        if not used and value is not None:
            raise ValueError(f"{name}={value!r}: only int8 has a scale")
        n = 6 if name == "out_scale" else 1
        scales = _numbers(1.0 if value is None else value)
        if scales.shape not in ((1,), (n,)) or not all(math.isfinite(scale) and scale > 0 for scale in scales):
            raise ValueError(f"{name}={value!r}: must be {'one or six numbers' if n == 6 else 'a number'} above 0")
        found += np.broadcast_to(scales, (n,)).tolist()
    return found


def _numbers(value: ArrayLike) -> NDArray[np.float32]:
    """A number, or a list of numbers, as float32; an empty array for anything else."""
    try:
        numbers = np.atleast_1d(np.asarray(value))
    except ValueError:  # lists of unequal lengths
        return np.empty(0, np.float32)
    with np.errstate(over="ignore"):
        return numbers.astype(np.float32) if numbers.dtype.kind in "iuf" else np.empty(0, np.float32)


def _checked_outputs(out: Iterable[Array], x: Array, h0: Array, rwkvag: Array) -> tuple[Array, ...]:
    if not isinstance(out, Iterable):
        raise ValueError(f"out is {type(out).__name__}: must be {', '.join(_NAMES)}")
    out = tuple(out)
    if len(out) != 7:
        raise ValueError(f"out of {len(out)} arrays: must be {', '.join(_NAMES)}")
    for i, (name, array) in enumerate(zip(_NAMES, out, strict=True)):
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{name} is {type(array).__name__}: must be an array")
        strides = out[0].strides
        wanted = h0 if name == "ht" else x
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise ValueError(f"{name} of shape {array.shape}, {array.dtype}: must be {wanted.shape}, {wanted.dtype}")
        if not array.flags.writeable:
            raise ValueError(f"{name} is read-only: must be writable")
        if name != "ht" and array.size and (array.strides != strides or array.strides[2] != array.itemsize):
            raise ValueError(f"{name} of strides {array.strides}: must be those of xr, {strides}, without gaps in rows")
        others = {"x": x, "rwkvag": rwkvag, "h0": h0, **dict(zip(_NAMES[:i], out[:i], strict=True))}
        if name == "ht" and array.size and _address(array) == _address(h0) and array.strides[::2] == h0.strides[::2]:
            del others["h0"]
        for other, memory in others.items():
            if np.may_share_memory(array, memory, max_work=-1):  # exact: interleaved arrays share none
                raise ValueError(f"{name} lies on {other}: must have memory of its own")
    return out


def _rows(array: Array) -> Array:
    """The array without gaps in its rows: itself, or a copy where it has gaps or steps backwards."""
    whole = array.strides[-1] == array.itemsize or array.shape[-1] == 1
    return array if whole and min(array.strides) >= 0 else np.ascontiguousarray(array)


def _sequence_rows(array: Array, scale: float = 1.0) -> SequenceRows:
    return SequenceRows(_TYPES[array.dtype.name], _address(array), array.strides[1], array.strides[0], scale)


def _address(array: Array) -> int:
    address, _ = array.__array_interface__["data"]
    return int(address)
