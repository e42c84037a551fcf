"""token_shift: RWKV-7's interpolation of each token with the one before it, several times at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import types

from ggml_backend_npu.registry import Call
from quant.kernels.jit import (
    array_at,
    bits_float,
    compiled,
    inlined,
    keep,
    parameters,
    round_half_even,
    stream,
    stream_ends,
    truncate_to_int32,
    values,
)
from quant.kernels.threads import Job, Work
from quant.runs import CACHED, CODES, F32, narrow_run, widen_run

_TILE = 512  # columns in work at a time
_I8 = -1  # code of int8, which has a scale
_BYTES = {"f32": 4, "f16": 2, "i8": 1}


def _code(type: str) -> int:
    return _I8 if type == "i8" else CODES[type]


@inlined
def _floats(code, scale, src, count, work):
    """Where `count` float32 are that equal the elements at src: there, or in work."""
    if code == F32:
        return src
    if code == _I8:
        q = array_at(src, types.int8, count)
        x = array_at(work, types.float32, count)
        for i in range(count):
            x[i] = types.float32(q[i]) * scale
    else:
        widen_run(code, src, 2, work, count)
    return work


@inlined
def _quantize(x, scale, dst, count):
    """`count` float32 at x as int8 at dst: nearest, ties to even, saturated; NaN becomes 0."""
    row = array_at(x, types.float32, count)
    q = array_at(dst, types.int8, count)
    for i in range(count):
        code = round_half_even(row[i] / scale)
        code = min(max(code, types.float32(-128)), types.float32(127)) if code == code else types.float32(0)
        q[i] = types.int8(truncate_to_int32(code))


@compiled
def shift(p, begin, end):
    """Rows [begin, end) of all sequences: dst[i] = x + (the row before x - x) * mu[i] for each of n."""
    (
        code, element, scale_bits, x, x_nb1, x_nb2, first_code, first, first_nb, before,
        mu_code, mu_element, mu_scale_bits, mu, mu_nb, dst, dst_nb1, dst_nb2, dst_scales, n, width, n_rows,
    ) = values(p, 22)  # fmt: skip
    scale, mu_scale = bits_float(types.uint32(scale_bits)), bits_float(types.uint32(mu_scale_bits))
    streamed = code == F32 and 4 * n * width * n_rows > CACHED
    work = np.empty(3 * _TILE, np.float32)
    w0 = types.int64(work.ctypes.data)
    w1, w2 = w0 + 4 * _TILE, w0 + 8 * _TILE
    for index in range(begin, end):
        row, sequence = index % n_rows, index // n_rows
        x_row = x + row * x_nb1 + sequence * x_nb2
        at_first = row == 0 and first != 0
        previous_code = first_code if at_first else code
        previous_row = first + sequence * first_nb if at_first else before + row * x_nb1 + sequence * x_nb2
        previous_element = 4 if previous_code == F32 else element if previous_code == code else 2
        for column in range(0, width, _TILE):
            count = min(_TILE, width - column)
            now = array_at(_floats(code, scale, x_row + column * element, count, w0), types.float32, count)
            at = previous_row + column * previous_element
            then = array_at(_floats(previous_code, scale, at, count, w1), types.float32, count)
            for i in range(n):
                at = mu + i * mu_nb + column * mu_element
                weight = array_at(_floats(mu_code, mu_scale, at, count, w2), types.float32, count)
                to = array_at(dst, types.int64, n)[i] + row * dst_nb1 + sequence * dst_nb2 + column * element
                y = array_at(w2 if code != F32 or streamed else to, types.float32, count)
                for j in range(count):
                    y[j] = (then[j] - now[j]) * weight[j] + now[j]
                if streamed:
                    stream(w2, to, 4 * count)
                elif code == _I8:
                    _quantize(w2, array_at(dst_scales, types.float32, n)[i], to, count)
                elif code != F32:
                    narrow_run(w2, code, to, element, count)
    if streamed:
        stream_ends()
    keep(work)
    return 0


@dataclass(frozen=True)
class Operand:
    """Rows of a sequence, without gaps in them: type f32, f16 or i8, address, bytes from row to row and from sequence
    to sequence, and of i8 the scale."""

    type: str
    address: int
    nb1: int
    nb2: int
    scale: float = 1.0


def shifted(
    x: Operand,
    before: int,
    mu: Operand,
    outputs: Sequence[int],
    out: Operand,
    *,
    ne: tuple[int, int, int],
    first: Operand | None = None,
    scales: Sequence[float] | None = None,
) -> Call:
    """The call that fills each output with x + (previous row - x) * its row of mu.

    before   where the row before x's first one would be: rows follow as those of x do
    outputs  address of each output, which lies as `out` says
    ne       elements of a row, rows of a sequence, sequences
    first    what is before the first row of each sequence, instead of what lies at `before`
    scales   of each output, of type i8
    """
    width, n_rows, n_sequences = ne
    to = np.array(outputs, np.int64)
    out_scales = np.array(scales if scales is not None else [1.0] * len(to), np.float32)
    p = parameters(
        _code(x.type), _BYTES[x.type], np.float32(x.scale), x.address, x.nb1, x.nb2,
        F32 if first is None else _code(first.type), 0 if first is None else first.address,
        0 if first is None else first.nb2, before,
        _code(mu.type), _BYTES[mu.type], np.float32(mu.scale), mu.address, mu.nb1,
        to.ctypes.data, out.nb1, out.nb2, out_scales.ctypes.data, len(to), width, n_rows,
    )  # fmt: skip
    n_bytes = width * n_rows * n_sequences * len(to) * _BYTES[x.type]
    return Job(Work(shift, p, n_rows * n_sequences, n_bytes, keep=(to, out_scales)))
