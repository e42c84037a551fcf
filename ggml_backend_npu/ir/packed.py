"""Quantised tensors in the device layout: all quants of a tensor, then all its scales, at the tensor's own addresses.

ggml sees a tensor in device memory as it sees any other: as blocks, of which it sets and gets any bytes. `Packed`
translates: its callers give offsets into the blocks, and the memory holds quants and scales apart. See `quant.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quant import DeviceLayout, codec, to_blocks, to_device
from quant.blocks import compiled_types

Bytes = NDArray[np.uint8]

PACKED_TYPES = compiled_types()


@dataclass(frozen=True)
class Packed:
    """A whole tensor of n_blocks blocks in the device layout.

    address  of the tensor
    storage  the tensor's bytes in memory: quants, then scales
    """

    type: str
    address: int
    storage: Bytes = field(repr=False, compare=False)

    @property
    def size(self) -> int:
        """Its bytes, the same number in both layouts."""
        return self.storage.size

    @property
    def n_blocks(self) -> int:
        """How many blocks the tensor has."""
        return self.storage.size // codec(self.type).block_bytes

    @staticmethod
    def of(type: str, address: int, storage: Bytes) -> Packed:
        """Takes over a tensor's memory: rearranges its blocks, in place, into quants and scales."""
        packed = Packed(type, address, storage)
        packed.write(0, storage.copy())
        return packed

    def read(self, offset: int, size: int) -> Bytes:
        """A copy of `size` bytes of the tensor's blocks, from any offset on."""
        first, begin = divmod(offset, codec(self.type).block_bytes)
        last = -(-(offset + size) // codec(self.type).block_bytes)
        return self._blocks(first, last).reshape(-1)[begin : begin + size]

    def write(self, offset: int, data: Bytes) -> None:
        """Sets bytes of the tensor's blocks, at any offset; all other bytes stay."""
        block_bytes = codec(self.type).block_bytes
        first, begin = divmod(offset, block_bytes)
        last = -(-(offset + data.size) // block_bytes)
        if begin or (offset + data.size) % block_bytes:
            blocks = self._blocks(first, last).reshape(-1)
            blocks[begin : begin + data.size] = data
        else:
            blocks = data
        device = to_device(blocks.reshape(-1, block_bytes), self.type)
        quants, scales = self._parts()
        quants[first:last] = device.quants.view(np.uint8)
        scales[first:last] = device.scales.view(np.uint8)

    def _parts(self) -> tuple[Bytes, Bytes]:
        payload = self.n_blocks * (codec(self.type).block_bytes - 2)
        return self.storage[:payload].reshape(self.n_blocks, -1), self.storage[payload:].reshape(self.n_blocks, 2)

    def _blocks(self, first: int, last: int) -> Bytes:
        quants, scales = self._parts()
        device = DeviceLayout(quants[first:last], scales[first:last].view(np.float16))
        return to_blocks(device, self.type)
