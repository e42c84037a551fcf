"""The checks of a queue: copies of a `QueuedDevice` in its queue, events, and whether `synchronize` waits.

What is queued is checked by what is queued after it: a reading of the bytes that a copy has just set. So the order of
the queue is what is tested, and nothing waits that would not have waited.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ggml_backend_npu.device.checked import PAUSE, CheckedMemory
from ggml_backend_npu.device.device import Bytes, QueuedDevice
from ggml_backend_npu.device.faults import Checks, differing
from ggml_backend_npu.device.memory import OpaqueQueue
from ggml_backend_npu.device.queue_trial import Trial
from ggml_backend_npu.ir.buffer import Buffer

_PATIENCE = 1.0  # seconds that something which was queued may come late
_TRIALS, _MOST_TRIALS = 8, 3


@dataclass(frozen=True)
class _Queued:
    """A copy in the queue.

    wanted   what it is to set; of a copy to the host: where it sets it
    seen     what a reading after it in the queue gives
    changes  `Checks.changes` when it was queued
    """

    method: str
    buffer: Buffer
    offset: int
    wanted: Bytes
    seen: Bytes
    changes: int

    def overlaps(self, other: _Queued) -> bool:
        """Whether both are about a byte."""
        end, other_end = self.offset + self.wanted.size, other.offset + other.wanted.size
        return self.buffer is other.buffer and self.offset < other_end and other.offset < end


class CheckedQueue(CheckedMemory, OpaqueQueue):
    """A `CheckedMemory` of a device with a queue."""

    def __init__(self, device: QueuedDevice, checks: Checks) -> None:
        super().__init__(device, checks)
        self._pending: list[_Queued] = []
        self._marks: list[Bytes] = []  # since it was synchronised
        self._marks_come = True
        self._culprits: list[str] = []  # that trials have found
        self._n_trials = 0
        self._events: dict[int, tuple[Any, int, int]] = {}

    # copies

    def write_later(self, address: int, data: Bytes) -> None:
        """Queues `write`, and a reading of the same bytes."""
        self.checks.changes += 1
        if not self.checks.is_on or not data.size:
            super().write_later(address, data)
            return
        wanted, seen = np.array(data), np.zeros(data.size, np.uint8)
        super().write_later(address, data)
        super().read_later(address, seen)
        self._add("copy_in_async", address, wanted, seen)

    def read_later(self, address: int, out: Bytes) -> None:
        """Queues a copy of the bytes at an address to an array, twice."""
        super().read_later(address, out)
        if self.checks.is_on and out.size:
            again = np.full(out.size, 0xFF, np.uint8)
            super().read_later(address, again)
            self._add("copy_out_async", address, out, again)

    def copy_later(self, source: int, target: int, size: int) -> None:
        """Queues `copy`, between readings of the source and of the target."""
        self.checks.changes += 1
        if not self.checks.is_on or not size:
            super().copy_later(source, target, size)
            return
        wanted, seen = np.full(size, 0, np.uint8), np.full(size, 0xFF, np.uint8)
        super().read_later(source, wanted)
        super().copy_later(source, target, size)
        super().read_later(target, seen)
        self._add("copy_async", target, wanted, seen)

    def _add(self, method: str, address: int, wanted: Bytes, seen: Bytes) -> None:
        buffer, offset = self.at(address, wanted.size)
        self._pending.append(_Queued(method, buffer, offset, wanted, seen, self.checks.changes))

    def _settle(self, count: int) -> None:
        """Looks at the first copies of the queue, which are done."""
        done, self._pending = self._pending[:count], self._pending[count:]
        set_again: list[_Queued] = []
        for each in done:
            is_last = each.changes == self.checks.changes and each.method == "copy_out_async"
            if np.array_equal(each.wanted, each.seen) and not is_last:
                continue
            now = self._agreed(each.buffer, each.offset, each.wanted.size)
            right, wrong = (now, each.wanted) if is_last else (each.wanted, each.seen)
            if np.array_equal(right, wrong) and np.array_equal(right, each.seen):
                continue
            if is_last and np.array_equal(each.wanted, each.seen) and any(map(each.overlaps, set_again)):
                each.wanted[:] = now  # it was read before that was repaired
                continue
            who = self._culprit(each, now)
            wrong = each.seen if np.array_equal(right, wrong) else wrong
            self._err(who, each.buffer, each.offset, right.size, differing(right, wrong, each.offset))
            if is_last:
                each.wanted[:] = now
            elif each.method != "copy_out_async" and not np.array_equal(now, each.wanted):
                is_last = each.changes == self.checks.changes
                set_again.append(each)
                if not (is_last and self._repair(each.buffer, each.offset, each.wanted)):
                    self._give_up(each.buffer, each.offset, right.size)

    def _culprit(self, queued: _Queued, now: Bytes) -> str:
        """Whose fault it is that a reading in the queue does not give what was queued before it: found by trials in
        memory of their own; else by what memory holds now."""
        if "copy_in" in self.checks.late:
            return "copy_in"  # what it sets comes at any time, in a trial too
        if self._n_trials < _MOST_TRIALS:
            self._n_trials += 1
            who = Trial(self._queue, queued.wanted.size, queued.offset % 64).culprit()
            self._culprits += [who] if who is not None else []
        if self._culprits:
            return Counter(self._culprits).most_common(1)[0][0]
        is_last = queued.changes == self.checks.changes
        is_there = is_last and queued.method != "copy_out_async" and np.array_equal(now, queued.wanted)
        return "copy_out_async" if is_there else queued.method

    def release(self, buffer: Buffer) -> None:
        """Frees a buffer; with the last one also what the checks have allocated."""
        super().release(buffer)
        if not self.checks.live and self.checks.mark_at is not None:
            handle, self.checks.mark_at = self.checks.mark_at, None
            with self.calling("free", 8):
                self.device.free(handle)

    # waiting

    def synchronize(self) -> None:
        """Waits until everything that the device was told to do is done, and looks whether it is."""
        if not self.checks.is_on:
            super().synchronize()
            self._pending.clear()
            return
        mark = self._mark()
        super().synchronize()
        if not self._is_there(mark):
            self._find_out("synchronize", mark, super().synchronize)
        self._settle(len(self._pending))
        self._marks.clear()

    def record(self) -> Any:
        """An event for everything that is queued now."""
        mark = self._mark() if self.checks.is_on else 0
        event = super().record()
        self._events[id(event)] = event, mark, len(self._pending)
        return event

    def wait_for(self, event: Any) -> None:
        """Returns when an event has happened, and looks whether what was queued before it is done."""
        super().wait_for(event)
        _, mark, count = self._events.get(id(event), (None, 0, 0))
        if self.checks.is_on and not self._is_there(mark):
            self._find_out(
                "wait_for", mark, lambda: super(CheckedQueue, self).wait_for(super(CheckedQueue, self).record())
            )
        if self.checks.is_on and mark:
            self._settle(count)
            self._events = {key: (each, at, max(0, n - count)) for key, (each, at, n) in self._events.items()}

    def _mark(self) -> int:
        """Queues a number that grows, which memory then holds."""
        if not self._marks_come or not self.checks.live:
            return 0
        checks = self.checks
        if checks.mark_at is None:
            with self.calling("alloc", 8):
                checks.mark_at = self.device.alloc(8)
            with self.calling("copy_in", 8):
                self.device.copy_in(checks.mark_at, 0, np.array([checks.marks], np.int64).view(np.uint8))
        checks.marks += 1
        self._marks.append(np.array([checks.marks], np.int64).view(np.uint8))
        with self.calling("copy_in_async", 8):
            self._queue.copy_in_async(checks.mark_at, 0, self._marks[-1])
        return checks.marks

    def _is_there(self, mark: int) -> bool:
        """Whether memory holds a mark, or a later one."""
        if not mark or self.checks.mark_at is None:
            return True
        out = np.zeros(8, np.uint8)
        with self.calling("copy_out", 8):
            self.device.copy_out(self.checks.mark_at, 0, out)
        return int(out.view(np.int64)[0]) >= mark

    def _find_out(self, method: str, mark: int, wait: Callable[[], None]) -> None:
        """Says who is wrong if a mark is not there after a method has waited for it."""
        stays_away = not self._is_there(mark) and not self._is_there(mark)
        began = time.monotonic()
        while not self._is_there(mark) and time.monotonic() - began < _PATIENCE:
            time.sleep(1e-3)
        took = time.monotonic() - began
        if not self._is_there(mark):
            self._marks_come = False
            self._err("copy_in_async", None, 0, 8, f"8 bytes are not there {_PATIENCE:.0f} s after {method} returned")
        elif "copy_in" in self.checks.late or not self._copies_at_once():
            self.checks.late.add("copy_in")
            self._err("copy_in", None, 0, 8, "returned before it was done: 8 bytes were not there at once")
        elif stays_away or self._returns_early(wait):
            self.checks.late.add(method)
            what = f"returned before what was queued was done, which took {max(took, 1e-4) * 1e3:.1f} ms more"
            self._err(method, None, 0, 0, what)
        else:
            self._err("copy_out", None, 0, 8, f"8 bytes were not as they were set after {method}, in one reading only")
        time.sleep(PAUSE)

    def _copies_at_once(self) -> bool:
        """Whether what `copy_in` sets is there when it returns, at least once in two times."""
        there = 0
        for _ in range(_TRIALS):
            self.checks.marks += 1
            with self.calling("copy_in", 8):
                data = np.array([self.checks.marks], np.int64).view(np.uint8)
                self.device.copy_in(self.checks.mark_at, 0, data)
            there += self._is_there(self.checks.marks)
        return there > _TRIALS // 2

    def _returns_early(self, wait: Callable[[], None]) -> bool:
        early = 0
        for _ in range(_TRIALS):
            mark = self._mark()
            wait()
            early += not self._is_there(mark)
            time.sleep(PAUSE)
        return early > 1
