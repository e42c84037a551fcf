"""token_shift: RWKV-7's interpolation of each token with the one before it, with several factors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ggml_backend_npu.registry.entry import Call
from quant.kernels.jit import (
    array_at,
    compiled,
    inlined,
    round_half_even,
    stream,
    stream_ends,
    truncate_to_int32,
)
from quant.kernels.late import types
from quant.kernels.records import record_at
from quant.kernels.threads import Job, Work
from quant.runs import CACHED, CODES, F32, narrow_run, widen_run

_TILE = 512  # columns in work at a time
_I8 = -1  # code of int8, which has a scale
_BYTES = {"f32": 4, "f16": 2, "i8": 1}


def _code(type: str) -> int:
    return _I8 if type == "i8" else CODES[type]


@inlined
def _floats(code, scale, src, count, work):
    """Address of `count` float32 that equal the elements at src: src itself, or work."""
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


class Rows(NamedTuple):
    """An `SequenceRows` as the kernel reads it. element: bytes of one element."""

    code: int
    element: int
    scale: np.float32
    address: int
    nb1: int
    nb2: int


_NO_ROWS = Rows(0, 0, np.float32(0), 0, 0, 0)


class Shift(NamedTuple):
    """n_rows rows of a sequence, of `width` elements.

    first       the row before the first row of each sequence, not int8; at address 0: the one that `before` has
    before      the address of the row before x's first one, as if it were a row of x
    mu          n rows
    dst         the address of n addresses, one per output; their rows are dst_nb1 and dst_nb2 bytes apart
    dst_scales  the address of n float32
    """

    x: Rows
    first: Rows
    before: int
    mu: Rows
    dst: int
    dst_nb1: int
    dst_nb2: int
    dst_scales: int
    n: int
    width: int
    n_rows: int


@inlined
def _row_before(of, row, sequence):
    """The code, the bytes of an element, and the address of the row before a row of a sequence."""
    if row == 0 and of.first.address != 0:
        return of.first.code, of.first.element, of.first.address + sequence * of.first.nb2
    return of.x.code, of.x.element, of.before + row * of.x.nb1 + sequence * of.x.nb2


@compiled
def shift(p, begin, end, w0):
    """A unit is one row of one sequence: dst[i] = x + (the row before x - x) * mu[i] for each of n.

    Three tiles of float32 are at w0: of x, of the row before, and of mu and then of the output.
    """
    of = record_at(p, Shift)
    n, width, n_rows, dst_scales = of.n, of.width, of.n_rows, of.dst_scales
    code, element, scale, mu = of.x.code, of.x.element, of.x.scale, of.mu
    streamed = code == F32 and 4 * n * width * n_rows > CACHED
    w1, w2 = w0 + 4 * _TILE, w0 + 8 * _TILE
    for index in range(begin, end):
        row, sequence = index % n_rows, index // n_rows
        x_row = of.x.address + row * of.x.nb1 + sequence * of.x.nb2
        previous_code, previous_element, previous_row = _row_before(of, row, sequence)
        to_row = row * of.dst_nb1 + sequence * of.dst_nb2
        for column in range(0, width, _TILE):
            count = min(_TILE, width - column)
            now = array_at(_floats(code, scale, x_row + column * element, count, w0), types.float32, count)
            at = previous_row + column * previous_element
            then = array_at(_floats(previous_code, scale, at, count, w1), types.float32, count)
            for i in range(n):
                at = mu.address + i * mu.nb1 + column * mu.element
                weight = array_at(_floats(mu.code, mu.scale, at, count, w2), types.float32, count)
                to = array_at(of.dst, types.int64, n)[i] + to_row + column * element
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
    return 0


@dataclass(frozen=True)
class SequenceRows:
    """Rows of a sequence, without gaps in them: type f32, f16 or i8, address, bytes from row to row and from sequence
    to sequence, and for i8 the scale."""

    type: str
    address: int
    nb1: int
    nb2: int
    scale: float = 1.0

    @property
    def rows(self) -> Rows:
        """As the kernel reads it."""
        return Rows(_code(self.type), _BYTES[self.type], np.float32(self.scale), self.address, self.nb1, self.nb2)


def bind_token_shift(
    x: SequenceRows,
    before: int,
    mu: SequenceRows,
    outputs: Sequence[int],
    out: SequenceRows,
    *,
    ne: tuple[int, int, int],
    first: SequenceRows | None = None,
    scales: Sequence[float] | None = None,
) -> Call:
    """The call that fills each output with x + (previous row - x) * its row of mu.

    before   address of the row before x's first one, followed by rows as x's are
    outputs  address of each output; its layout is `out`
    ne       elements of a row, rows of a sequence, sequences
    first    the row before the first row of each sequence, instead of the one at `before`
    scales   of each output, for type i8
    """
    width, n_rows, n_sequences = ne
    to = np.array(outputs, np.int64)
    out_scales = np.array(scales if scales is not None else [1.0] * len(to), np.float32)
    of = Shift(
        x=x.rows,
        first=_NO_ROWS if first is None else first.rows,
        before=before,
        mu=mu.rows,
        dst=to.ctypes.data,
        dst_nb1=out.nb1,
        dst_nb2=out.nb2,
        dst_scales=out_scales.ctypes.data,
        n=len(to),
        width=width,
        n_rows=n_rows,
    )
    n_bytes = width * n_rows * n_sequences * len(to) * _BYTES[x.type]
    return Job(Work(shift, of, n_rows * n_sequences, n_bytes, scratch=3 * 4 * _TILE, keep=(to, out_scales)))
