"""SET and PAD: a tensor put into a part of another one. Byte for byte what ggml's CPU backend writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ggml_backend_npu.ir import Tensor
from ggml_backend_npu.ops import strided
from ggml_backend_npu.ops.shapes import gaps, gaps_in_rows, other_ne
from ggml_backend_npu.params import Params, i32
from ggml_backend_npu.registry import Call, op
from quant.kernels.threads import Job


@dataclass(frozen=True)
class SetPart(Params):
    """op_params of SET, in bytes: ggml_set_impl. inplace: the rest of dst is there already."""

    nb1: i32
    nb2: i32
    nb3: i32
    offset: i32
    inplace: i32


@dataclass(frozen=True)
class Pad(Params):
    """op_params of PAD: how many elements to the left and right in each dimension; ggml_pad_ext.

    circular  they hold what comes around again
    """

    lp0: i32
    rp0: i32
    lp1: i32
    rp1: i32
    lp2: i32
    rp2: i32
    lp3: i32
    rp3: i32
    circular: i32

    @property
    def before(self) -> tuple[int, int, int, int]:
        """Of ne[0], ne[1], ne[2], ne[3]."""
        return self.lp0, self.lp1, self.lp2, self.lp3

    @property
    def behind(self) -> tuple[int, int, int, int]:
        """Of ne[0], ne[1], ne[2], ne[3]."""
        return self.rp0, self.rp1, self.rp2, self.rp3


def _part(dst: Tensor, b: Tensor, params: SetPart) -> Tensor:
    """The part of dst that b is put into."""
    nb = dst.nb[0], params.nb1, params.nb2, params.nb3
    return replace(dst, ne=b.ne, nb=nb, offset=dst.offset + params.offset)


def _refuse_set(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> str | None:
    part = _part(dst, b, params)
    if part.offset < dst.offset or min(part.nb) < 0 or part.end > dst.end:
        return f"src1 of ne {b.ne} at {part.offset - dst.offset}, nb {part.nb}, is not inside dst of {dst.nbytes} bytes"
    return other_ne(src0=a, dst=dst) or gaps(src0=a, dst=dst) or gaps_in_rows(src1=b)


@op("SET", types=[(type, type, type) for type in ("f32", "i32")], refuse=_refuse_set, optional=True, params=SetPart)
def set_part(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> None:
    """dst = a, with b at an offset and strides.

    In place dst is a already. Equals ggml_compute_forward_set.
    """
    added = b.view().copy()
    if not params.inplace:
        dst.view()[...] = a.view()
    _part(dst, b, params).view()[...] = added


@set_part.compiled
def _set_part(dst: Tensor, a: Tensor, b: Tensor, params: SetPart) -> Call | None:
    if b.overlaps(dst):
        return None
    part = _part(dst, b, params)
    moves = [strided.mover(part, b)] if params.inplace else [strided.mover(dst, a), strided.mover(part, b)]
    return Job(*(work for move in moves if move is not None for work in move.works))


def _refuse_pad(dst: Tensor, x: Tensor, params: Pad) -> str | None:
    before, behind = params.before, params.behind
    if dst.ne != tuple(n + left + right for n, left, right in zip(x.ne, before, behind, strict=True)):
        return f"x of ne {x.ne}, {before} before and {behind} behind, does not fit dst of ne {dst.ne}"
    if params.circular and not x.n_elements:
        return f"x of ne {x.ne} comes around"
    return gaps(dst=dst)


@op("PAD", types=[("f32", "f32")], refuse=_refuse_pad, optional=True, params=Pad)
def pad(dst: Tensor, x: Tensor, params: Pad) -> None:
    """dst = x with zeros before and behind it in each dimension, or x again; none but fewer of x, below 0.

    Equals ggml_compute_forward_pad.
    """
    places = [np.arange(n) - left for n, left in zip(dst.ne[::-1], params.before[::-1], strict=True)]
    sizes = x.ne[::-1]
    if params.circular:
        dst.view()[...] = x.view()[np.ix_(*(place % n for place, n in zip(places, sizes, strict=True)))]
        return
    inside = [(place >= 0) & (place < n) for place, n in zip(places, sizes, strict=True)]
    dst.view()[...] = 0
    taken = x.view()[np.ix_(*(place[kept] for place, kept in zip(places, inside, strict=True)))]
    dst.view()[np.ix_(*inside)] = taken
