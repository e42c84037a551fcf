"""The verdict on a candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from . import attention, functions, hyper, images, movers, products, recurrent, rotations, sums
from .bounded import LARGE16, LARGE32, TINY16, TINY32, U16, U32, UBF16, B
from .tensors import PLAIN, Given, Node, UnknownError

OPS = {
    **movers.OPS, **functions.OPS, **sums.OPS, **products.OPS, **attention.OPS, **rotations.OPS, **recurrent.OPS,
    **images.OPS, **hyper.OPS,
}  # fmt: skip
_MASKS = {"SOFT_MAX": 1, "FLASH_ATTN_EXT": 3, "LIGHTNING_INDEXER": 3}  # the source that is one
_ROUNDING = {"f32": (U32, TINY32, LARGE32), "f16": (U16, TINY16, LARGE16), "bf16": (UBF16, TINY32, LARGE32)}


@dataclass(frozen=True)
class Verdict:
    """What the second judge says.

    right  None: no opinion
    error  the largest error in units of the bound; 0 if bytes are equal, infinite if a byte must be equal and is not
    why    of an opinion, where the largest error is; else why there is none
    judged how much of dst it judged: elements with a finite bound
    row    the largest error in units of the element's bound, or of its row's median bound if that is larger
    """

    right: bool | None
    error: float = 0.0
    why: str = ""
    judged: float = 1.0
    row: float = 0.0


class Judge:
    """Judges results of one node, which it computes once.

    ggml  what ggml's CPU made of the node, if known: blocks of a quantised dst may be equal to it
    """

    def __init__(self, node: Node, ggml: bytes | None = None) -> None:
        self._node = node
        self._ggml = None if ggml is None else replace(node.dst, data=ggml)

    @cached_property
    def _found(self) -> movers.Result | str:
        if self._node.op not in OPS:
            return f"no opinion on {self._node.op}"
        try:
            found = OPS[self._node.op](self._node)
            if isinstance(found, B | tuple) and (place := _not_finite(self._node)) is not None:
                return f"NaN or infinity in source {place}"
        except UnknownError as error:
            return str(error)
        return found

    def verdict(self, candidate: bytes) -> Verdict:
        """Judges dst's bytes after the node ran, as many as node.dst.data."""
        dst, found = self._node.dst, self._found
        if isinstance(found, str):
            return Verdict(None, why=found, judged=0.0)
        result = replace(dst, data=candidate)
        try:
            if (outside := _outside(dst, candidate)) is not None:
                return Verdict(False, np.inf, f"byte {outside}, outside of dst's elements, changed", row=np.inf)
            if isinstance(found, np.ndarray):
                return _bytes(found, result)
            if dst.quantised and self._ggml is not None and np.array_equal(self._ggml.raw, result.raw):
                return Verdict(True)
            if isinstance(found, B | tuple):
                ways = found if isinstance(found, tuple) else (found,)
                return _blocks(ways[0], result, self._ggml) if dst.quantised else _values(ways, result)
            return _verdict(found(result))
        except UnknownError as error:
            return Verdict(None, why=str(error), judged=0.0)


def judge(node: Node, candidate: bytes, ggml: bytes | None = None) -> Verdict:
    """The verdict on one result, as of `Judge`."""
    return Judge(node, ggml).verdict(candidate)


def _not_finite(node: Node) -> int | None:
    """The first source that holds NaN or infinity; of masks -inf is a number."""
    for place, x in enumerate(node.src):
        if x is None or x.exact.dtype.kind != "f":
            continue
        good = np.isfinite(x.exact) | ((x.exact == -np.inf) & (place == _MASKS.get(node.op)))
        if not good.all():
            return place
    return None


def _outside(dst: Given, candidate: bytes) -> int | None:
    """The first byte between dst's elements that is not as it was before."""
    if len(candidate) != len(dst.data):
        return min(len(candidate), len(dst.data))
    before, after = (np.frombuffer(x, np.uint8) for x in (dst.data, candidate))
    changed = np.flatnonzero(before != after)
    if not changed.size or dst.spans.size == len(candidate):
        return None
    inside = np.zeros(len(candidate), bool)
    np.lib.stride_tricks.as_strided(inside, dst.spans.shape, dst.spans.strides)[...] = True
    out = changed[~inside[changed]]
    return int(out[0]) if out.size else None


def _bytes(expected: np.ndarray, result: Given) -> Verdict:
    raw = result.raw
    if expected.shape != raw.shape:
        raise UnknownError(f"bytes of shape {raw.shape}, not {expected.shape}")
    differ = (expected != raw).any(-1)
    if not differ.any():
        return Verdict(True)
    where = tuple(int(i) for i in np.argwhere(differ)[0])
    return Verdict(False, np.inf, f"{int(differ.sum())} elements or blocks differ, first {where[::-1]}", row=np.inf)


def _values(ways: tuple[B, ...], result: Given) -> Verdict:
    """By the way of computing it that it is nearest to, the same for all elements."""
    if result.type not in _ROUNDING:
        raise UnknownError(f"dst {result.type}")
    with np.errstate(all="ignore"):
        if result.type != "f32":  # of f32 the last operation rounded
            ways = tuple(found.rounded(*_ROUNDING[result.type]) for found in ways)
        ways = tuple(B(*(np.broadcast_to(t, result.shape) for t in (found.v, found.e + TINY32))) for found in ways)
        most = np.max([found.e for found in ways], 0)
    verdicts = []
    for found in ways:
        row = _units(B(found.v, _of_rows(found.v, most)), result.exact)
        row = np.nan_to_num(row, nan=0.0, posinf=np.inf).max(initial=0.0)
        verdicts.append(replace(_verdict(_units(found, result.exact)), row=float(row)))
    best = min(verdicts, key=lambda verdict: (verdict.right is None, verdict.error))
    return replace(best, row=min(verdict.row for verdict in verdicts))


def _of_rows(v: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Bounds in the scale of the row: at least the median bound, and a rounding of the median value, of its elements
    that are not exactly 0."""
    least = np.maximum(np.where(np.isfinite(e), e, 0.0), U32 * np.where(np.isfinite(v), np.abs(v), 0.0))
    if not least.size:
        return e
    falling, n = -np.sort(-least, -1), (least > TINY32).sum(-1, keepdims=True)
    middle = [np.take_along_axis(falling, place, -1) for place in (np.maximum(n - 1, 0) // 2, n // 2)]
    return np.where(np.isfinite(e), np.maximum(least, (middle[0] + middle[1]) / 2), np.inf)


def _units(found: B, actual: np.ndarray) -> np.ndarray:
    """Each element's error in units of its bound; NaN where nothing is known."""
    with np.errstate(all="ignore"):
        known = (np.isfinite(found.v) & np.isfinite(found.e)) | (found.v == -np.inf)  # which masks hold
        off = np.abs(actual - found.v)
        units = np.where((off == 0) | (actual == found.v), 0.0, off / np.maximum(found.e, 1e-300))
        units = np.where(np.isnan(units), np.inf, units)
    return np.where(known, units, np.nan)


def _blocks(found: B, result: Given, ggml: Given | None) -> Verdict:
    """A result in blocks: each value within a step of its block, or the block is ggml's."""
    units = _units(found.with_error(movers.step(result.type, found.v)), result.exact)
    if ggml is not None:
        same = (ggml.raw == result.raw).all(-1)
        units[np.repeat(same, units.shape[-1] // same.shape[-1], -1)] = 0
    return _verdict(units)


def _verdict(units: np.ndarray) -> Verdict:
    known = ~np.isnan(units)
    if not units.size:
        return Verdict(True, why="empty")
    if not known.any():
        return Verdict(None, why="nothing is known of any element", judged=0.0)
    worst = float(units[known].max())
    place = np.unravel_index(int(np.nanargmax(np.where(known, units, -1))), units.shape)
    at = tuple(int(i) for i in reversed(place))
    return Verdict(worst <= 1, worst, f"at {at}", float(known.mean()), worst)


__all__ = ["OPS", "PLAIN", "Verdict", "judge"]
