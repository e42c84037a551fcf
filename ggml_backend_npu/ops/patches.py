"""SET and PAD: a tensor put into a part of another one. Byte for byte what ggml's CPU backend writes."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import strided
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows, other_ne
from ggml_backend_npu.registry import Call, op
from quant.threads import Job


def _part(dst: Tensor, b: Tensor, params: bytes) -> tuple[Tensor, bool]:
    """The part of dst that b is put into; whether the rest of dst is there already."""
    nb1, nb2, nb3, offset, in_place = struct.unpack_from("5i", params)
    return replace(dst, ne=b.ne, nb=(dst.nb[0], nb1, nb2, nb3), offset=dst.offset + offset), bool(in_place)


def _refuse_set(dst: Tensor, a: Tensor, b: Tensor, params: bytes) -> str | None:
    part, _ = _part(dst, b, params)
    if part.offset < dst.offset or min(part.nb) < 0 or part.end > dst.end:
        return f"src1 of ne {b.ne} at {part.offset - dst.offset}, nb {part.nb}, is not inside dst of {dst.nbytes} bytes"
    return other_ne(src0=a, dst=dst) or gaps(src0=a, dst=dst) or gaps_in_rows(src1=b)


@op("SET", types=[(type, type, type) for type in ("f32", "i32")], refuse=_refuse_set, optional=True)
def set_part(dst: Tensor, a: Tensor, b: Tensor, params: bytes) -> None:
    """dst = a, with b at an offset and strides in bytes that params say, (nb1, nb2, nb3, offset, in place).

    In place dst is a already. Equals ggml_compute_forward_set.
    """
    part, in_place = _part(dst, b, params)
    added = b.view().copy()
    if not in_place:
        dst.view()[...] = a.view()
    part.view()[...] = added


@set_part.compiled
def _set_part(dst: Tensor, a: Tensor, b: Tensor, params: bytes) -> Call | None:
    if b.overlaps(dst):
        return None
    part, in_place = _part(dst, b, params)
    moves = [strided.mover(part, b)] if in_place else [strided.mover(dst, a), strided.mover(part, b)]
    return Job(*(work for move in moves if move is not None for work in move.works))


def _pads(params: bytes) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """In front of and behind each dimension; whether they hold what comes around again."""
    *sizes, circular = struct.unpack_from("9i", params)
    return tuple(sizes[::2]), tuple(sizes[1::2]), bool(circular)


def _refuse_pad(dst: Tensor, x: Tensor, params: bytes) -> str | None:
    before, behind, circular = _pads(params)
    if dst.ne != tuple(n + left + right for n, left, right in zip(x.ne, before, behind, strict=True)):
        return f"x of ne {x.ne}, {before} before and {behind} behind, does not fit dst of ne {dst.ne}"
    if circular and not x.n_elements:
        return f"x of ne {x.ne} comes around"
    return gaps(dst=dst)


@op("PAD", types=[("f32", "f32")], refuse=_refuse_pad, optional=True)
def pad(dst: Tensor, x: Tensor, params: bytes) -> None:
    """dst = x with as many zeros before and behind it in each dimension as params say; none but fewer of x, below 0.

    params: (before, behind) of each dimension, and whether x comes around again instead of zeros. Equals
    ggml_compute_forward_pad.
    """
    before, _, circular = _pads(params)
    places = [np.arange(n) - left for n, left in zip(dst.ne[::-1], before[::-1], strict=True)]
    sizes = x.ne[::-1]
    if circular:
        dst.view()[...] = x.view()[np.ix_(*(place % n for place, n in zip(places, sizes, strict=True)))]
        return
    inside = [(place >= 0) & (place < n) for place, n in zip(places, sizes, strict=True)]
    dst.view()[...] = 0
    taken = x.view()[np.ix_(*(place[kept] for place, kept in zip(places, inside, strict=True)))]
    dst.view()[np.ix_(*inside)] = taken
