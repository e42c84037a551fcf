"""A device's memory, of which every call is looked at: is what was set there, is what is read always the same?

A call that errs is named: `copy_in`, if memory does not hold what was set; `copy_out`, if readings of the same bytes
differ; where only both together are seen, another method that sets bytes decides. What can be repaired is repaired, so
that kernels compute from the right bytes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ggml_backend_npu.device.device import Bytes, Device
from ggml_backend_npu.device.faults import Checks, differing
from ggml_backend_npu.device.memory import OpaqueMemory
from ggml_backend_npu.ir.buffer import Buffer

_EDGE = 64  # bytes before and after a span that a call must leave as they are
_CHUNK = 64 << 20  # bytes that are read back at once
_POISONS = 0x00, 0xFF, 0x55  # what an array holds before it is read into
_PIECES = 4096, 64, 1
_LONG = 4096  # bytes that are moved one by one, at most
PAUSE = 0.02  # seconds in which what is late comes
_TRIALS = 8
_OFTEN = 6


class CheckedMemory(OpaqueMemory):
    """An `OpaqueMemory` whose calls are checked. `checks` keeps what is found."""

    def __init__(self, device: Device, checks: Checks) -> None:
        super().__init__(device)
        self.checks = checks
        self._n_readings = 0

    # reading

    def read_into(self, buffer: Buffer, offset: int, out: Bytes) -> None:
        """Copies bytes of a buffer into an array: those that several readings agree on."""
        if not self.checks.is_on or not out.size:
            super().read_into(buffer, offset, out)
            return
        out[:] = self._agreed(buffer, offset, out.size)

    def _agreed(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        first, second = self._once(buffer, offset, size), self._in_two(buffer, offset, size)
        if np.array_equal(first, second):
            return self._copied(buffer, offset, first) if self.checks.is_careful else first
        found = [first, second, self._once(buffer, offset, size), self._in_two(buffer, offset, size)]
        found.append(self._in_small(buffer, offset, size))
        seen = Counter(each.tobytes() for each in found)
        bytes, votes = seen.most_common(1)[0]
        right = np.frombuffer(bytes, np.uint8) if votes > 1 else found[-1]
        wrong = next(each for each in found if not np.array_equal(each, right))
        what = differing(right, wrong, offset)
        self._err("copy_out", buffer, offset, size, f"{what}, but not in every reading")
        return right

    def _once(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """One reading, into an array that holds something else each time."""
        poison = _POISONS[self._n_readings % len(_POISONS)]
        self._n_readings += 1
        out = np.full(size + 2 * _EDGE, poison, np.uint8)
        super().read_into(buffer, offset, out[_EDGE : _EDGE + size])
        if (out[:_EDGE] != poison).any() or (out[_EDGE + size :] != poison).any():
            self._err("copy_out", buffer, offset, size, "writes beyond the array that it is given")
        return out[_EDGE : _EDGE + size]

    def _in_two(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        if size < 2:
            return self._once(buffer, offset, size)
        cut = 1 + 37 * self._n_readings % (size - 1)
        return np.concatenate([self._once(buffer, offset, cut), self._once(buffer, offset + cut, size - cut)])

    def _in_small(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """A reading in some 64 pieces, for small spans byte by byte."""
        step = max(1, size // 64)
        return np.concatenate([self._once(buffer, offset + at, min(step, size - at)) for at in range(0, size, step)])

    def _sure(self, buffer: Buffer, offset: int, size: int) -> Bytes:
        """Each byte as most of three readings in small pieces have it."""
        found = np.stack([self._in_small(buffer, offset, size) for _ in range(3)])
        most: Bytes = np.median(found, axis=0).astype(np.uint8)
        return most

    def _copied(self, buffer: Buffer, offset: int, seen: Bytes) -> Bytes:
        """The bytes by way of a copy that the device makes, a moment later. A fault if it shows others than `seen`."""
        time.sleep(PAUSE)
        with self._scratch(seen.size) as scratch, self._scratch(seen.size) as second:
            copied, now = self._through(buffer, offset, scratch), self._once(buffer, offset, seen.size)
            if np.array_equal(now, seen) and np.array_equal(copied, seen):
                return seen
            if np.array_equal(now, seen) and not self._copies(second, scratch, seen):
                return seen  # `copy` errs itself: what it gives says nothing
        if any(not np.array_equal(self._once(buffer, offset, seen.size), now) for _ in range(_OFTEN)):
            now = self._sure(buffer, offset, seen.size)
            what = "bytes are not the same" if np.array_equal(now, seen) else differing(now, seen, offset)
            self._err("copy_out", buffer, offset, seen.size, f"{what}, but not in every reading")
            return now
        what = differing(now if np.array_equal(copied, seen) else copied, seen, offset)
        if not np.array_equal(now, seen):
            self._err("synchronize", buffer, offset, seen.size, f"{what}; {PAUSE * 1e3:.0f} ms later they are right")
            return now
        self._err("copy_out", buffer, offset, seen.size, f"{what}: a copy within the device has these")
        return copied

    @contextmanager
    def _scratch(self, size: int) -> Iterator[Buffer]:
        """Memory of the device that nothing else knows of."""
        with self.calling("alloc", size):
            handle = self.device.alloc(size)
        try:
            yield Buffer.of(handle, size, self)
        finally:
            with self.calling("free", size):
                self.device.free(handle)

    def _through(self, buffer: Buffer, offset: int, scratch: Buffer) -> Bytes:
        """What a copy of the bytes within the device holds."""
        with self.calling("copy", scratch.size):
            self.device.copy(buffer.handle, offset, scratch.handle, 0, scratch.size)
        return self._once(scratch, 0, scratch.size)

    def _copies(self, source: Buffer, target: Buffer, seen: Bytes) -> bool:
        """Whether `copy` copies bytes that `copy_in` has set: each another than those of `seen`."""
        self._put(source, 0, ~seen)
        return np.array_equal(self._through(source, 0, target), ~seen)

    # setting

    def write(self, address: int, data: Bytes) -> None:
        """Sets the bytes at an address, and reads them back."""
        buffer, offset = self.at(address, data.size)
        self._set("copy_in", buffer, offset, data, lambda: super(CheckedMemory, self).write(address, data))

    def set(self, address: int, size: int, value: int) -> None:
        """Sets `size` bytes at an address to one value, and reads them back."""
        buffer, offset = self.at(address, size)
        wanted = np.broadcast_to(np.uint8(value), size)
        method = "fill" if self._has("fill") else "copy_in"
        self._set(method, buffer, offset, wanted, lambda: super(CheckedMemory, self).set(address, size, value))

    def copy(self, source: int, target: int, size: int) -> None:
        """Copies bytes from one address to another, and reads them back."""
        buffer, offset = self.at(target, size)
        wanted = self.read(source, size) if self.checks.is_on else np.empty(0, np.uint8)
        self._set("copy", buffer, offset, wanted, lambda: super(CheckedMemory, self).copy(source, target, size))

    def _has(self, method: str) -> bool:
        """Whether the device has a method of its own, not the one by way of the host."""
        return getattr(type(self.device), method) is not getattr(Device, method)

    def _set(self, method: str, buffer: Buffer, offset: int, wanted: Bytes, act: Callable[[], None]) -> None:
        """Does what sets a span of a buffer, and looks whether it holds what it was set to, and whether what lies
        around it is as it was."""
        self.checks.changes += 1
        if not self.checks.is_on or not wanted.size:
            act()
            return
        end = offset + wanted.size
        low, high = max(0, offset - _EDGE), min(buffer.size, end + _EDGE)
        before, behind = self._edge(buffer, low, offset), self._edge(buffer, end, high)
        act()
        if method in self.checks.late:
            time.sleep(PAUSE)
        whole = True
        for begin in range(offset, end, _CHUNK):
            last = min(end, begin + _CHUNK)
            parts = [wanted[begin - offset : last - offset]]
            parts = [before, *parts] if begin == offset else parts
            parts = [*parts, behind] if last == end else parts
            expected = np.concatenate(parts)
            at = low if begin == offset else begin
            seen = self._once(buffer, at, expected.size)
            if self.checks.errs("copy_out"):  # what it said of the bytes around before the call counts for nothing
                inner = slice(max(begin, offset) - at, last - at)
                seen, expected = seen[inner], expected[inner]
                at = begin
            if not np.array_equal(seen, expected):
                whole = self._blame(method, buffer, (offset, wanted.size), at, expected, tell=whole)

    def _edge(self, buffer: Buffer, begin: int, end: int) -> Bytes:
        return self._agreed(buffer, begin, end - begin) if end > begin else np.empty(0, np.uint8)

    def _blame(
        self, method: str, buffer: Buffer, asked: tuple[int, int], at: int, expected: Bytes, *, tell: bool
    ) -> bool:
        """Says who is wrong if memory does not seem to hold what it was set to, and repairs it. Returns False.

        asked  offset and size of the call
        at     offset of the bytes that are expected
        """
        often = [who for (erred, who), n in self.checks.blamed.items() if erred == method and n >= _OFTEN]
        who, what, is_there = self._examined(method, buffer, asked, at, expected, often[0] if often else None)
        self.checks.blamed[method, who] += 1
        if tell:
            self._err(who, buffer, *asked, what)
        if not is_there and not self._repair(buffer, at, expected):
            self._give_up(buffer, *asked)
        return False

    def _give_up(self, buffer: Buffer, offset: int, size: int) -> None:
        self.checks.unrepaired = f"{size:,} bytes at offset {offset:,} of {self.checks.name(buffer)} are wrong"

    def _examined(
        self, method: str, buffer: Buffer, asked: tuple[int, int], at: int, expected: Bytes, often: str | None
    ) -> tuple[str, str, bool]:
        """Who is wrong, what is, and whether memory holds what is expected.

        often  who was wrong before, when the same method seemed to be: then little is tried
        """
        size = expected.size
        found = [self._once(buffer, at, size), self._in_two(buffer, at, size), self._in_small(buffer, at, size)]
        wrong = next((each for each in found if not np.array_equal(each, expected)), None)
        what = "bytes are wrong" if wrong is None else differing(expected, wrong, at)
        if often is not None:
            return often, what, wrong is None
        alike = all(np.array_equal(each, found[0]) for each in found)
        time.sleep(PAUSE)
        comes = np.array_equal(self._once(buffer, at, size), expected)
        known = method in self.checks.late or (alike and wrong is not None)
        if comes and (known or self._is_late(method, buffer, asked)):
            self.checks.late.add(method)
            return method, f"returned before it was done: {what}", False
        if comes or not alike:
            return "copy_out", f"{what}, but not in every reading", False  # what trials set is there
        return self._arbiter(method, buffer, asked, at, expected), what, False

    def _is_late(self, method: str, buffer: Buffer, asked: tuple[int, int]) -> bool:
        """Whether bytes that the method sets are there a moment later, and not at once: tried with other bytes."""
        offset, size = asked[0], min(asked[1], _LONG)
        at_once = later = 0
        for turn in range(_TRIALS):
            data = np.full(size, 17 * turn + 1, np.uint8)
            self._by(method, buffer, offset, data)
            at_once += not np.array_equal(self._once(buffer, offset, size), data)
            time.sleep(PAUSE)
            later += not np.array_equal(self._once(buffer, offset, size), data)
        return at_once > 1 and later < at_once / 2

    def _by(self, method: str, buffer: Buffer, offset: int, data: Bytes) -> None:
        """Sets bytes that are all the same by a method."""
        if method == "fill":
            with self.calling("fill", data.size):
                self.device.fill(buffer.handle, offset, data.size, int(data[0]))
        else:
            self._put(buffer, offset, data)

    def _put(self, buffer: Buffer, offset: int, data: Bytes) -> None:
        with self.calling("copy_in", data.size):
            self.device.copy_in(buffer.handle, offset, data)

    def _arbiter(self, method: str, buffer: Buffer, asked: tuple[int, int], at: int, expected: Bytes) -> str:
        """Who is wrong if all readings agree on other bytes than were set: `copy_out`, if what another method sets is
        not seen either."""
        other = "copy_in" if method != "copy_in" else "fill"
        if not self._has(other):
            return f"{method} or copy_out"
        begin, end = max(asked[0], at), min(asked[0] + asked[1], at + expected.size)
        value = (int(expected[begin - at]) + 0x5A) % 256
        self._repair(buffer, at, expected)
        edges = self._once(buffer, at, expected.size)
        self._by(other, buffer, begin, np.full(end - begin, value, np.uint8))
        edges[begin - at : end - at] = value
        return method if np.array_equal(self._once(buffer, at, expected.size), edges) else "copy_out"

    def _repair(self, buffer: Buffer, offset: int, wanted: Bytes) -> bool:
        """Sets bytes again, in ever smaller pieces, until they are there. Returns whether they are."""
        for step in (max(wanted.size, 1), *_PIECES):
            if wanted.size // step > _LONG:
                break
            for at in range(0, wanted.size, step):
                self._put(buffer, offset + at, wanted[at : at + step])
            if self.checks.is_late:
                time.sleep(PAUSE)
            if np.array_equal(self._sure(buffer, offset, wanted.size), wanted):
                return True
        return False

    def _err(self, method: str, buffer: Buffer | None, offset: int, size: int, what: str) -> None:
        if buffer is None or buffer.address not in self.checks.distrusted:
            self.checks.found(method, buffer, offset, size, what)

    # buffers

    def allocate(self, size: int) -> Buffer | None:
        """A buffer of `size` bytes, of which no byte is another buffer's."""
        buffer = super().allocate(size)
        if buffer is None or not self.checks.is_on:
            return buffer
        self.checks.begins(buffer)
        if not size:
            return buffer
        self.checks.changes += 1
        tag = np.random.default_rng(self.checks.changes).integers(1, 255, min(size, 16), np.uint8)
        before, places = self._samples(buffer), _places(buffer)
        for at in places:
            self._put(buffer, at, tag)
        if self.checks.is_late:
            time.sleep(PAUSE)
        for (other, place), sample in self._samples(buffer).items():
            if np.array_equal(sample, tag) and not np.array_equal(before[other, place], tag):
                shown = f"what is set in it shows at offset {place:,} of {self.checks.name(other)}"
                self._err("alloc", buffer, 0, size, f"gives memory that is in use: {shown}")
                self.checks.unrepaired = f"{self.checks.name(buffer)} and {self.checks.name(other)} share memory"
                self._put(other, place, before[other, place])
        if self._is_short(buffer, places[-1], tag):
            self._err("alloc", buffer, 0, size, f"the bytes at offset {places[-1]:,} do not keep what they are set to")
            self.checks.distrusted.add(buffer.address)
        return buffer

    def _is_short(self, buffer: Buffer, last: int, tag: Bytes) -> bool:
        """Whether the first bytes of a buffer keep what they are set to, and the last ones do not, however they are
        set."""
        if last == 0 or np.array_equal(self._once(buffer, last, tag.size), tag):
            return False
        if np.array_equal(self._sure(buffer, last, tag.size), tag):
            return False
        self._by("fill", buffer, last, np.full(tag.size, 0xA5, np.uint8))
        keeps = (self._sure(buffer, last, tag.size) == 0xA5).all()
        return not keeps and np.array_equal(self._sure(buffer, 0, tag.size), tag)

    def release(self, buffer: Buffer) -> None:
        """Frees a buffer, and no other one."""
        self.checks.ends(buffer)
        if not self.checks.is_on:
            super().release(buffer)
            return
        self.synchronize()
        if self.checks.is_late:  # what comes late looks as if the free had set it
            super().release(buffer)
            return
        before, name = self._samples(buffer, self._agreed), self.checks.name(buffer)
        super().release(buffer)
        for (other, place), sample in self._samples(buffer).items():
            held = before[other, place]
            if self.checks.is_careful and np.array_equal(self._agreed(other, place, held.size), held):
                continue
            if np.array_equal(sample, held) or np.array_equal(self._sure(other, place, held.size), held):
                continue
            self._err("free", other, place, held.size, f"of {name}: {differing(held, sample, place)}")
            self._put(other, place, held)

    def _samples(
        self, besides: Buffer, read: Callable[[Buffer, int, int], Bytes] | None = None
    ) -> dict[tuple[Buffer, int], Bytes]:
        """Some bytes of all other buffers of the device, by buffer and offset."""
        others, read = [each for each in self.checks.live if each is not besides], read or self._once
        return {(each, at): read(each, at, min(16, each.size - at)) for each in others for at in _places(each)}


def _places(buffer: Buffer) -> list[int]:
    """Offsets of 16 bytes at the begin, in the middle and at the end of a buffer; none of an empty one."""
    return sorted({0, max(0, buffer.size // 2 - 8), max(0, buffer.size - 16)}) if buffer.size else []
