"""Memory between pages that must not be touched, for nodes whose kernels are not trusted."""

from __future__ import annotations

import ctypes
import mmap
from collections import defaultdict

from ggml_backend_npu.ggml.convert import same_bytes
from ggml_backend_npu.ir import Memory

MARGIN = 4096  # bytes on each side that a kernel can write to, which is detected
ALIGNMENT = 64  # a copy is as far past a multiple of this as its source is
_FENCE = 16 << 20  # bytes on each side beyond the margin: SIGSEGV
_CANARY = 0xA5
_KEPT = 64 << 20  # the most bytes of free rooms
_FAILED = ctypes.c_void_p(-1).value
_UNTOUCHED = ctypes.create_string_buffer(bytes([_CANARY]) * (2 * MARGIN + ALIGNMENT + mmap.PAGESIZE))
_UNTOUCHED_AT = ctypes.addressof(_UNTOUCHED)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_free: dict[int, list[int]] = defaultdict(list)  # addresses of rooms that nobody holds, by size


class _Room:
    """`size` bytes, whole pages, between two fences. It is free again when nobody holds it any more.

    n_free  bytes of rooms that nobody holds
    """

    n_free = 0

    def __init__(self, size: int) -> None:
        self.size = size
        if _free[size]:
            self.address = _free[size].pop()
            _Room.n_free -= size
        else:
            self.address = _reserve(size)

    def __del__(self) -> None:
        if _Room.n_free + self.size <= _KEPT:
            _free[self.size].append(self.address)
            _Room.n_free += self.size
        else:
            _libc.munmap(self.address - _FENCE, self.size + 2 * _FENCE)


def _reserve(size: int) -> int:
    whole = size + 2 * _FENCE
    start = _libc.mmap(None, whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if start == _FAILED or _libc.mprotect(start + _FENCE, size, mmap.PROT_READ | mmap.PROT_WRITE):
        raise MemoryError(f"{size} bytes between fences")
    return int(start) + _FENCE


def fenced(data: Memory, beyond: int = 0) -> tuple[Memory, int]:
    """Copies some memory to memory of its own; returns that memory, and the offset of the copy in it.

    Around the copy lie at least MARGIN bytes, which `is_damaged` checks, and beyond them a fence: touching it is a
    SIGSEGV. Raises MemoryError.

    beyond  how many bytes past a multiple of ALIGNMENT the copy begins
    """
    room = _Room(-(-(data.size + 2 * MARGIN + ALIGNMENT) // mmap.PAGESIZE) * mmap.PAGESIZE)
    last = room.size - MARGIN - data.size
    offset = last - (last - beyond) % ALIGNMENT
    ctypes.memset(room.address, _CANARY, offset)
    ctypes.memmove(room.address + offset, data.address, data.size)
    ctypes.memset(room.address + offset + data.size, _CANARY, room.size - offset - data.size)
    return Memory(room.address, room.size, owner=room), offset


def refill(memory: Memory, offset: int, data: Memory) -> None:
    """Copies some memory over what `fenced` has copied, as many bytes."""
    ctypes.memmove(memory.address + offset, data.address, data.size)


def is_damaged(memory: Memory, offset: int, size: int) -> bool:
    """Whether the margins around the `size` bytes at an offset were written to."""
    end = offset + size
    return not (_is_untouched(memory.address, offset) and _is_untouched(memory.address + end, memory.size - end))


def _is_untouched(address: int, size: int) -> bool:
    return same_bytes(address, _UNTOUCHED_AT, size)
