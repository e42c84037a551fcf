"""Devices whose memory errs: each is a simulator with one fault, and has the methods that may be named for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ggml_backend_npu.device.sim import Simulator

Made = Callable[[], Simulator]
IN_BATTERY: dict[str, tuple[Made, set[str]]] = {}
IN_A_DIFF: dict[str, tuple[Made, set[str]]] = {}


def fault(*methods: str, battery: bool = True, diff: bool = True) -> Callable[[type[Simulator]], type[Simulator]]:
    """Adds a device whose fault is one of these methods'. Some faults show in the battery alone."""

    def add(device: type[Simulator]) -> type[Simulator]:
        name = device.__name__
        made = lambda: device(delay=getattr(device, "late", 0.0), memory=1 << 28)  # noqa: E731
        IN_BATTERY.update({name: (made, {*methods})} if battery else {})
        IN_A_DIFF.update({name: (made, {*methods})} if diff else {})
        return device

    return add


class Counts(Simulator):
    """Counts calls of a kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.n = 0

    def nth(self, every: int) -> bool:
        self.n += 1
        return self.n % every == 0


# copy_in

IN = "copy_in", "copy_in_async"


@fault(*IN)
class InShort(Simulator):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        super().copy_in(handle, offset, data[: max(1, data.size // 64 * 64)])


@fault(*IN)
class InShifted(Simulator):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        shift = 1 if offset + data.size < handle.size else 0
        super().copy_in(handle, offset + shift, data)


@fault(*IN)
class InIgnoredFarFromTheBegin(Simulator):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        if offset < 100 or data.size < 100:
            super().copy_in(handle, offset, data)


@fault(*IN)
class InSeldomIgnored(Counts):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        if not self.nth(50):
            super().copy_in(handle, offset, data)


@fault(*IN)
class InOneBitAtLoad(Counts):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        data = data.copy()
        if data.size > 4096 and self.nth(3):
            data[-2] ^= 1
        super().copy_in(handle, offset, data)


@fault(*IN)
class InLaterInTheRun(Counts):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        self.n += 1
        super().copy_in(handle, offset, data[:-1] if self.n > 150 and data.size > 16 else data)


@fault(*IN, battery=False)
class InBeyondRepair(Counts):
    """In the run, the first byte is never what it is set to."""

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        super().copy_in(handle, offset, data)
        self.n += 1
        if self.n > 600:
            handle[offset] ^= 1


@fault(*IN)
class InReordered(Counts):
    """A call is done when the next one comes."""

    kept: tuple[Any, ...] | None = None

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        if self.kept is not None:
            super().copy_in(*self.kept)
        self.kept = handle, offset, data.copy()


@fault(*IN)
class InStale(Counts):
    """Each 20th call sets what the call before set."""

    before = np.zeros(0, np.uint8)

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        given = np.resize(self.before, data.size) if self.nth(20) and self.before.size else data
        super().copy_in(handle, offset, given)
        self.before = data.copy()


@fault(*IN)
class InWritesTooMuch(Simulator):
    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        super().copy_in(handle, offset, data)
        handle[offset + data.size : offset + data.size + 4] = 0x5C


@fault(*IN)
class InLate(Simulator):
    """It is done by a thread, a little after it has returned."""

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        kept = data.copy()
        threading.Timer(2e-3, lambda: Simulator.copy_in(self, handle, offset, kept)).start()


@fault(*IN)
class InSeldomLater(Counts):
    """It is done by a thread, and each 41st call later than the checks wait for."""

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        kept, seconds = data.copy(), 0.05 if self.nth(41) else 2e-3
        threading.Timer(seconds, lambda: Simulator.copy_in(self, handle, offset, kept)).start()


# copy_out

OUT = "copy_out", "copy_out_async"


@fault(*OUT)
class OutShort(Simulator):
    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        super().copy_out(handle, offset, out[: max(1, out.size // 64 * 64)])


@fault(*OUT)
class OutShifted(Simulator):
    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        shift = 1 if offset + out.size < handle.size else 0
        super().copy_out(handle, offset + shift, out)


@fault(*OUT)
class OutIgnored(Counts):
    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        if not self.nth(30):
            super().copy_out(handle, offset, out)


@fault(*OUT)
class OutSeldomStale(Counts):
    """Each 50th call gives what an earlier one gave."""

    before = np.zeros(0, np.uint8)

    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        super().copy_out(handle, offset, out)
        if self.nth(50) and self.before.size:
            out[:] = np.resize(self.before, out.size)
        elif self.n % 7 == 0:
            self.before = out.copy()


@fault(*OUT)
class OutCachedBySpan(Simulator):
    """A span that was read before is not read again."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[Any, Any] = {}

    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        key = handle.ctypes.data, offset, out.size
        if key in self.known and out.size > 8:
            out[:] = self.known[key]
            return
        super().copy_out(handle, offset, out)
        self.known[key] = out.copy()


@fault(*OUT)
class OutOfUnalignedOffsets(Simulator):
    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        super().copy_out(handle, offset // 4 * 4, out)


@fault(*OUT)
class OutLastByteInTheRun(Counts):
    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        super().copy_out(handle, offset, out)
        self.n += 1
        if self.n > 400 and out.size > 16 and self.n % 3 == 0:
            out[-1] ^= 0x80


@fault("copy_out", battery=False)
class OutStaleAfterPrograms(Simulator):
    """The host has a copy of each buffer, which programs do not change."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.known: dict[int, Any] = {}

    def alloc(self, size: int) -> Any:
        handle = super().alloc(size)
        self.known.pop(handle.ctypes.data, None)
        return handle

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        super().copy_in(handle, offset, data)
        self.known[handle.ctypes.data] = handle.copy()

    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        super().fill(handle, offset, size, value)
        self.known[handle.ctypes.data] = handle.copy()

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        super().copy(source, source_offset, target, target_offset, size)
        self.known[target.ctypes.data] = target.copy()

    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        super().copy_out(self.known.get(handle.ctypes.data, handle), offset, out)


# fill


@fault("fill")
class FillIgnored(Simulator):
    def alloc(self, size: int) -> Any:
        handle = super().alloc(size)
        handle[:] = np.random.default_rng(size).integers(0, 60, size, np.uint8)
        return handle

    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        pass


@fault("fill")
class FillShort(Simulator):
    def alloc(self, size: int) -> Any:
        handle = super().alloc(size)
        handle[:] = 0x3C
        return handle

    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        super().fill(handle, offset, size - size // 9, value)


@fault("fill")
class FillOfAnotherValue(Simulator):
    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        super().fill(handle, offset, size, value | 1)


@fault("fill", diff=False)
class FillShifted(Simulator):
    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        super().fill(handle, max(0, offset - 1), size, value)


@fault("fill", diff=False)
class FillSeldomIgnored(Counts):
    def fill(self, handle: Any, offset: int, size: int, value: int) -> None:
        if not self.nth(20):
            super().fill(handle, offset, size, value)


# copy


@fault("copy", "copy_async", diff=False)
class CopyShort(Simulator):
    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        super().copy(source, source_offset, target, target_offset, max(1, size // 16 * 16))


@fault("copy", "copy_async", diff=False)
class CopyIgnoresTheSourcesOffset(Simulator):
    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        super().copy(source, 0, target, target_offset, size)


@fault("copy", "copy_async", diff=False)
class CopySeldomIgnored(Counts):
    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        if not self.nth(10):
            super().copy(source, source_offset, target, target_offset, size)


# the queue


@fault("copy_in_async", diff=False)
class QueuedInIgnored(Counts):
    def copy_in_async(self, handle: Any, offset: int, data: Any) -> None:
        if data.size == 8 or not self.nth(9):
            super().copy_in_async(handle, offset, data)


@fault("copy_in_async", diff=False)
class QueuedInOutOfOrder(Simulator):
    late = 1e-3

    def copy_in_async(self, handle: Any, offset: int, data: Any) -> None:
        if data.size == 8:
            super().copy_in_async(handle, offset, data)
        else:
            self.copy_in(handle, offset, data)


@fault("copy_in_async", diff=False)
class QueuedInShort(Simulator):
    def copy_in_async(self, handle: Any, offset: int, data: Any) -> None:
        super().copy_in_async(handle, offset, data[: max(1, data.size // 8 * 8)])


@fault("copy_out_async", diff=False)
class QueuedOutIgnored(Counts):
    def copy_out_async(self, handle: Any, offset: int, out: Any) -> None:
        if not self.nth(7):
            super().copy_out_async(handle, offset, out)


@fault("copy_out_async", diff=False)
class QueuedOutTooEarly(Simulator):
    late = 1e-3

    def copy_out_async(self, handle: Any, offset: int, out: Any) -> None:
        self.copy_out(handle, offset, out)


@fault("copy_async", diff=False)
class QueuedCopyIgnored(Simulator):
    def copy_async(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        pass


@fault("copy_async", diff=False)
class QueuedCopyTooEarly(Simulator):
    late = 1e-3

    def copy_async(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        self.copy(source, source_offset, target, target_offset, size)


@fault("synchronize")
class DoesNotWait(Simulator):
    late = 3e-3

    def synchronize(self) -> None:
        pass


@fault("synchronize")
class SeldomDoesNotWait(Counts):
    late = 3e-3

    def synchronize(self) -> None:
        if not self.nth(12):
            super().synchronize()


@fault("wait_for", diff=False)
class EventsAreNotWaitedFor(Simulator):
    late = 3e-3

    def wait_for(self, event: Any) -> None:
        pass


@fault("record", "wait_for", diff=False)
class EventsHappenTooEarly(Simulator):
    late = 3e-3

    def record(self) -> Any:
        event = threading.Event()
        event.set()
        return event

    def wait_for(self, event: Any) -> None:
        event.wait()


# buffers


class Pool(Simulator):
    """Keeps freed memory for the next buffer of the same size."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept: dict[int, Any] = {}

    def free(self, handle: Any) -> None:
        super().free(handle)
        self.kept[handle.size] = handle


@fault("alloc", diff=False)
class AllocGivesTheSameTwice(Pool):
    """What it has given out of its pool stays there."""

    def alloc(self, size: int) -> Any:
        found = self.kept.get(size)
        return super().alloc(size) if found is None else found


@fault("alloc")
class AllocSharesPages(Simulator):
    """Small buffers of one size are the same memory."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: dict[int, Any] = {}

    def alloc(self, size: int) -> Any:
        handle = self.given.get(size)
        self.given[size] = handle = super().alloc(size) if handle is None or size < 64 else handle
        return handle


@fault("alloc")
class AllocIsShort(Simulator):
    """Buffers are whole pages, and what is beyond is dropped."""

    def alloc(self, size: int) -> Any:
        return super().alloc(size)[: size // 512 * 512 or size]

    def copy_in(self, handle: Any, offset: int, data: Any) -> None:
        n = max(0, min(data.size, handle.size - offset))
        super().copy_in(handle, offset, data[:n])

    def copy_out(self, handle: Any, offset: int, out: Any) -> None:
        n = max(0, min(out.size, handle.size - offset))
        super().copy_out(handle, offset, out[:n])
        out[n:] = 0

    def copy(self, source: Any, source_offset: int, target: Any, target_offset: int, size: int) -> None:
        data = np.zeros(size, np.uint8)
        self.copy_out(source, source_offset, data)
        self.copy_in(target, target_offset, data)


@fault("free")
class FreeClearsTheLastBuffer(Simulator):
    """It clears memory that another buffer has."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.given: list[Any] = []

    def alloc(self, size: int) -> Any:
        self.given.append(super().alloc(size))
        return self.given[-1]

    def free(self, handle: Any) -> None:
        super().free(handle)
        self.given = [each for each in self.given if each is not handle]
        others = [each for each in self.given if each.size > 64]
        if others:
            others[0][:32] = 0xD7
