"""Compares two quantised outputs block by block: scales, quants, nibbles, and the rounding that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import Tensor
from quant import ROUNDINGS, Rounding, codec

Blocks = NDArray[np.uint8]

# types of which a block begins with the scale, and of which quants that are one apart are one scale apart
_SCALES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_1", "q2_0"), np.dtype(np.float16)),
    "q8_K": np.dtype(np.float32),
}


@dataclass(frozen=True)
class BlockComparison:
    """Two results of one type, compared by block. Truthy if all blocks are the same.

    n_scale, n_quants  of the blocks that differ, how many differ in the scale and how many in other bytes; None if the
              type's blocks do not begin with a scale
    off_by_one, off_by_more  quants that differ by one, and by more than one; None for types other than q8_0 and q4_0
    swapped_nibbles  whether every q4_0 block that differs is the expected one with its nibbles swapped
    rounding  which of ggml's q8_0 roundings gives the actual blocks; "simd" if it does as well as "neon", which differ
              in a few quants in a million; None if "reference" and another do, if none does, or if the source values
              are not known
    largest   for other types: the largest difference of two values, in steps if `in_steps`; None if there is no decoder
    in_steps  whether `largest` is in units of the expected block's scale
    """

    type: str
    n_blocks: int
    n_different: int
    n_scale: int | None = None
    n_quants: int | None = None
    off_by_one: int | None = None
    off_by_more: int | None = None
    swapped_nibbles: bool = False
    rounding: Rounding | None = None
    largest: float | None = None
    in_steps: bool = False

    def __bool__(self) -> bool:
        return self.n_different == 0

    def sentence(self) -> str:
        """Returns the comparison in one sentence."""
        if not self.n_different:
            return f"all {self.n_blocks} {self.type} blocks are the same"
        verb = "differs" if self.n_different == 1 else "differ"
        text = f"{self.n_different} of {self.n_blocks} {self.type} blocks {verb}"
        if self.swapped_nibbles:
            return f"{text}: the nibbles are swapped"
        details = []
        if self.n_scale is not None and self.n_quants is not None:
            details.append(f"{self.n_scale} in the scale, {self.n_quants} in the quants")
        if self.off_by_one or self.off_by_more:
            details.append(f"{self.off_by_one} quants are off by one, {self.off_by_more} by more")
        if self.largest is not None:
            details.append(f"by up to {self.largest:.3g}{' steps' if self.in_steps else ''}")
        if self.rounding is not None:
            details.append(f"they are rounded as ggml's {self.rounding} quantiser does it")
        return f"{text}: {'; '.join(details)}" if details else text


def compare_blocks(expected: Tensor, actual: Tensor, source: NDArray[np.float32] | None = None) -> BlockComparison:
    """Compares two tensors of one quantised type and ne, block by block.

    source  the values that were quantised, in the tensors' shape with axes reversed, NaN if there was no value; tells
            which q8_0 rounding was used. None if they are not known

    Raises ValueError if the two types or ne differ, if the type is not quantised, or if source has another size.
    """
    kind = codec(expected.type)
    if not kind.is_quantized or actual.type != expected.type or actual.ne != expected.ne:
        raise ValueError(
            f"expected of type {expected.type}, ne {expected.ne}, actual of type {actual.type}, ne {actual.ne}: "
            "must be of one quantised type and ne"
        )
    e, a = blocks_of(expected), blocks_of(actual)
    rounding = _rounding(a, source) if kind.name == "q8_0" and source is not None else None
    different = np.flatnonzero((e != a).any(axis=1))
    if not different.size:
        return BlockComparison(kind.name, len(e), 0, rounding=rounding)
    x, y = e[different], a[different]
    if kind.name not in _SCALES:
        largest, _ = _largest(kind.name, x, y)
        return BlockComparison(kind.name, len(e), len(x), largest=largest)
    size = _SCALES[kind.name].itemsize
    n_scale, n_quants = (int((x[:, part] != y[:, part]).any(axis=1).sum()) for part in (slice(size), slice(size, None)))
    if kind.name not in ("q8_0", "q4_0"):
        largest, in_steps = _largest(kind.name, x, y)
        return BlockComparison(
            kind.name, len(e), len(x), n_scale, n_quants, largest=largest, in_steps=in_steps
        )  # fmt: skip
    apart = np.abs(_quants(kind.name, x) - _quants(kind.name, y))
    return BlockComparison(
        kind.name,
        len(e),
        len(x),
        n_scale,
        n_quants,
        int((apart == 1).sum()),
        int((apart > 1).sum()),
        kind.name == "q4_0" and bool(np.array_equal(swapped(x), y)),
        rounding,
    )


def blocks_of(tensor: Tensor) -> Blocks:
    """Returns a quantised tensor's blocks in logical order, (n_blocks, block bytes)."""
    return np.ascontiguousarray(tensor.view()).reshape(-1, tensor.codec.block_bytes)


def swapped(blocks: Blocks) -> Blocks:
    """Returns q4_0 blocks with the two nibbles of each byte swapped."""
    quants = blocks[..., 2:]
    return np.concatenate([blocks[..., :2], (quants >> 4) | (quants << 4)], axis=-1)


def _quants(type: str, blocks: Blocks) -> NDArray[np.int16]:
    quants = np.ascontiguousarray(blocks[:, 2:])
    if type == "q8_0":
        return quants.view(np.int8).astype(np.int16)
    return np.hstack([quants & 15, quants >> 4]).astype(np.int16)


def _rounding(actual: Blocks, source: NDArray[np.float32]) -> Rounding | None:
    """Returns the rounding that gives the blocks from the values, as `BlockComparison` has it."""
    values = np.ascontiguousarray(source, np.float32).reshape(-1, codec("q8_0").block_size)
    if len(values) != len(actual):
        raise ValueError(f"source of {values.size} values: the tensor has {32 * len(actual)}")
    known = np.isfinite(values).all(axis=1)
    if not known.any():
        return None
    values, blocks = values[known], actual[known]
    found = [rounding for rounding in ROUNDINGS if np.array_equal(codec("q8_0").encode(values, rounding), blocks)]
    return None if "reference" in found[:-1] else next(iter(found), None)


def _largest(type: str, expected: Blocks, actual: Blocks) -> tuple[float | None, bool]:
    """Returns the largest difference of two values, and whether it is in steps: in scales of the expected blocks."""
    decoder = codec(type)
    with np.errstate(all="ignore"):
        try:
            x, y = (decoder.decode(np.ascontiguousarray(blocks)).astype(np.float64) for blocks in (expected, actual))
        except NotImplementedError:
            return None, False
        difference = np.abs(x - y)
        if type in _SCALES:
            scale = np.ascontiguousarray(expected[:, : _SCALES[type].itemsize]).view(_SCALES[type]).astype(np.float64)
            steps = np.where(difference == 0, 0.0, difference / np.abs(scale))
            if np.isfinite(steps).all():
                return float(steps.max()), True
        difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, difference)
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0)), False
