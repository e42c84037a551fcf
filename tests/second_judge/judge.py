"""The verdict on a candidate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from . import attention, functions, hyper, images, movers, products, recurrent, rotations, sums
from .bounded import LARGE16, LARGE32, TINY16, TINY32, U16, U32, UBF16, B
from .tensors import PLAIN, Given, Node, UnknownError

OPS = {
    **movers.OPS, **functions.OPS, **sums.OPS, **products.OPS, **attention.OPS, **rotations.OPS, **recurrent.OPS,
    **images.OPS, **hyper.OPS,
}  # fmt: skip
_ROUNDING = {"f32": (U32, TINY32, LARGE32), "f16": (U16, TINY16, LARGE16), "bf16": (UBF16, TINY32, LARGE32)}


@dataclass(frozen=True)
class Verdict:
    """What the second judge says.

    right  None: no opinion
    error  the largest error in units of the bound; 0 if bytes are equal, infinite if a byte must be equal and is not
    why    of an opinion, where the largest error is; else why there is none
    judged how much of dst it judged: elements with a finite bound
    """

    right: bool | None
    error: float = 0.0
    why: str = ""
    judged: float = 1.0


def judge(node: Node, candidate: bytes, ggml: bytes | None = None) -> Verdict:
    """Judges a result.

    candidate  dst's bytes after the node ran, as many as node.dst.data
    ggml       what ggml's CPU made of the node, if known: a quantised dst may be equal to it
    """
    if node.op not in OPS:
        return Verdict(None, why=f"no opinion on {node.op}")
    result = replace(node.dst, data=candidate)
    try:
        if (outside := _outside(node.dst, candidate)) is not None:
            return Verdict(False, np.inf, f"byte {outside}, outside of dst's elements, changed")
        found = OPS[node.op](node)
        if isinstance(found, np.ndarray):
            return _bytes(found, result)
        if callable(found):
            return _verdict(found(result))
        if result.quantised:
            return _blocks(found, result, None if ggml is None else replace(node.dst, data=ggml))
        return _values(found, result)
    except UnknownError as error:
        return Verdict(None, why=str(error))


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
    return Verdict(False, np.inf, f"{int(differ.sum())} elements or blocks differ, the first at {where[::-1]}")


def _values(found: B, result: Given) -> Verdict:
    if result.type not in _ROUNDING:
        raise UnknownError(f"dst {result.type}")
    if result.type != "f32":  # of f32 the last operation rounded
        found = found.rounded(*_ROUNDING[result.type])
    shaped = B(np.broadcast_to(found.v, result.shape), np.broadcast_to(found.e, result.shape))
    return _verdict(_units(shaped, result.exact))


def _units(found: B, actual: np.ndarray) -> np.ndarray:
    """Each element's error in units of its bound; NaN where nothing is known."""
    with np.errstate(all="ignore"):
        known = np.isfinite(found.v) & np.isfinite(found.e)
        off = np.abs(actual - found.v)
        units = np.where(off == 0, 0.0, off / np.maximum(found.e, 1e-300))
        units = np.where(np.isnan(actual), np.inf, units)
    return np.where(known, units, np.nan)


def _blocks(found: B, result: Given, ggml: Given | None) -> Verdict:
    """A result in blocks: ggml's bytes, or each value within a step of its block."""
    if ggml is not None and np.array_equal(ggml.raw, result.raw):
        return Verdict(True)
    step = movers.step(result.type, found.v)
    return _verdict(_units(found.with_error(step), result.exact))


def _verdict(units: np.ndarray) -> Verdict:
    known = ~np.isnan(units)
    if not units.size:
        return Verdict(True, why="empty")
    if not known.any():
        return Verdict(None, why="nothing is known of any element", judged=0.0)
    worst = float(units[known].max())
    place = np.unravel_index(int(np.nanargmax(np.where(known, units, -1))), units.shape)
    at = tuple(int(i) for i in reversed(place))
    return Verdict(worst <= 1, worst, f"at {at}", float(known.mean()))


__all__ = ["OPS", "PLAIN", "Verdict", "judge"]
