"""Block layout <-> device layout, which q8_0 and q4_0 have: all quants first, then all scales, as an NPU needs them.

ggml keeps a scale inside each block of 32. A device keeps the quants of a row together, and one float16 scale for each
group of G elements: the `scale` and `antiquantGroupSize` of aclnn calls. Both directions either are lossless or raise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quant.blocks import Compiled, compiled_types, split
from quant.codec import Bytes, codec, plain_array, type_of

_BLOCK = 32


class DeviceLayout(NamedTuple):
    """Quants and scales of rows of n elements, apart from each other.

    quants  q8_0: int8 (..., n); q4_0: uint8 (..., n / 2), two's complement int4, low nibble = even element
    scales  float16 (..., n / group size)
    """

    quants: NDArray[np.int8] | Bytes
    scales: NDArray[np.float16]


def to_device(blocks: Bytes, type: str, group_size: int = _BLOCK) -> DeviceLayout:
    """Blocks (..., n / 32 * block bytes) of q8_0 or q4_0 -> device layout.

    group_size  elements that share a scale; divides n; 0 = one scale for a whole row

    Raises ValueError if a group spans blocks of different scales, for other types, and for a group size that does
    not divide n.
    """
    kind = _checked(type)
    blocks = np.ascontiguousarray(plain_array("blocks", blocks))
    if blocks.dtype != np.uint8 or blocks.ndim == 0 or blocks.shape[-1] % kind.block_bytes:
        raise ValueError(
            f"blocks of shape {blocks.shape}: rows must be whole {type} blocks of {kind.block_bytes} bytes"
        )
    lead, n = blocks.shape[:-1], blocks.shape[-1] // kind.block_bytes * _BLOCK
    halves, quants = split(blocks.reshape(-1, kind.block_bytes), 2, kind.block_bytes - 2)
    scales = _regroup(halves.view(np.uint16).reshape(*lead, n // _BLOCK), n, _BLOCK, group_size)
    return DeviceLayout(kind.pack(quants).reshape(*lead, n // _BLOCK * kind.run.payload), scales.view(np.float16))


def to_blocks(device: DeviceLayout, type: str, group_size: int = _BLOCK) -> Bytes:
    """Device layout -> blocks: the inverse of `to_device`, with the same group size. Raises ValueError as `to_device`
    does, and if quants and scales do not fit each other; TypeError for anything that is not a DeviceLayout."""
    kind = _checked(type)
    if not isinstance(device, DeviceLayout):
        raise TypeError(f"device of type {type_of(device)}: must be a DeviceLayout")
    quants: NDArray[Any] = np.ascontiguousarray(plain_array("quants", device.quants))
    if quants.dtype.itemsize != 1 or quants.ndim == 0:
        raise ValueError(f"quants of dtype {quants.dtype} and shape {quants.shape}: must be rows of bytes")
    scales = np.ascontiguousarray(plain_array("scales", device.scales), dtype=np.float16)
    if scales.shape[:-1] != quants.shape[:-1] or scales.ndim != quants.ndim:
        raise ValueError(f"scales of shape {scales.shape}: must have the rows of quants, {quants.shape[:-1]}")
    lead, n = quants.shape[:-1], quants.shape[-1] * _BLOCK // kind.run.payload
    if quants.shape[-1] % kind.run.payload:
        raise ValueError(f"quants of {n} elements a row: must be a multiple of {_BLOCK}")
    halves = _regroup(scales.view(np.uint16), n, group_size, _BLOCK).reshape(-1, 1)
    payload = kind.unpack(quants.reshape(-1, kind.run.payload))
    return np.hstack([halves.view(np.uint8), payload]).reshape(*lead, n // _BLOCK * kind.block_bytes)


def _checked(type: str) -> Compiled:
    if type not in compiled_types():
        raise ValueError(f"type {type!r} has no device layout; {' and '.join(compiled_types())} have")
    kind = codec(type)
    assert isinstance(kind, Compiled)
    return kind


def _regroup(scales: NDArray[np.uint16], n: int, old: int, new: int) -> NDArray[np.uint16]:
    """Scales of groups of `old` elements -> scales of groups of `new` elements; 0 means the whole row."""
    for size in (old, new):
        if not isinstance(size, int | np.integer):
            raise TypeError(f"group size {size!r}: must be an integer")
    old, new = old or n, new or n
    for size in (old, new):
        if size < 0 or (n and n % size):
            raise ValueError(f"group size {size} does not divide the row's {n} elements")
    if scales.shape[-1] * old != n:
        raise ValueError(f"scales of {scales.shape[-1]} groups a row: {n} elements in groups of {old} have {n // old}")
    if old == new or n == 0:
        return scales
    step = int(np.gcd(old, new))
    fine = np.repeat(scales, old // step, axis=-1)
    groups = fine.reshape(*fine.shape[:-1], n // new, new // step)
    if (groups != groups[..., :1]).any():
        row, group = (int(i[0]) for i in np.nonzero((groups != groups[..., :1]).any(-1).reshape(-1, n // new)))
        raise ValueError(f"group size {new}: group {group} of row {row} has more than one scale")
    return np.ascontiguousarray(groups[..., 0])
