"""What a device's memory was caught at: which method erred, in which buffer, at which bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggml_backend_npu.device.device import Bytes
from ggml_backend_npu.ir.buffer import Buffer

_MOST = 256  # faults that are kept


@dataclass(frozen=True)
class MemoryFault:
    """A call of a device that did something else to memory than it was told.

    method  of the device: "copy_in", "copy_out", "fill", "copy_in_async", "alloc", "synchronize", ...
    buffer  which one: "buffer 2 of 4,096 bytes", by the order in which they were allocated; or "" if it is about none
    offset, size  of the bytes that the call was about
    what    what is wrong: which bytes, what they hold, and what they are to hold
    when    what was being done
    """

    method: str
    buffer: str
    offset: int
    size: int
    what: str
    when: str = ""

    def __str__(self) -> str:
        of = f" of {self.size:,} bytes at offset {self.offset:,} of {self.buffer}" if self.buffer else ""
        return f"{self.method}{of}: {self.what}" + (f" ({self.when})" if self.when else "")


@dataclass
class Checks:
    """What the checks of one device's memory know and have found. All its `CheckedMemory` share one.

    faults   what was found; no more than 256
    is_on    whether calls are checked
    is_careful  whether every reading is also compared with a copy that the device itself makes, a moment later
    changes  how often memory was changed: by calls, and by programs
    when     what is being done, as faults say it
    live     buffers that are allocated
    blamed   how often who was found wrong, when a method seemed to be
    unrepaired  what memory could not be made to hold: what is computed from it now is nobody's fault but its own
    late     methods that return before they are done: what comes late looks like faults of others, which are not kept
    distrusted  addresses of buffers that are no memory: nothing more is said of them
    mark_at, marks  a handle of 8 bytes, and the last number that was queued to be set there
    """

    faults: list[MemoryFault] = field(default_factory=list)
    is_on: bool = True
    is_careful: bool = False
    changes: int = 0
    when: str = "while the model was loaded"
    live: list[Buffer] = field(default_factory=list)
    blamed: Counter[tuple[str, str]] = field(default_factory=Counter)
    unrepaired: str | None = None
    late: set[str] = field(default_factory=set)
    distrusted: set[int] = field(default_factory=set)
    mark_at: Any = None
    marks: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)  # of buffers, by address

    def begins(self, buffer: Buffer) -> None:
        """Called with each new buffer."""
        self.live.append(buffer)
        self._numbers[buffer.address] = 1 + max(self._numbers.values(), default=0)

    def ends(self, buffer: Buffer) -> None:
        """Called with each buffer that is freed."""
        if buffer in self.live:
            self.live.remove(buffer)

    @property
    def is_late(self) -> bool:
        """Whether some method returns before it is done."""
        return bool(self.late)

    def found(self, method: str, buffer: Buffer | None, offset: int, size: int, what: str) -> None:
        """Keeps a fault, but one that may be of what another method has set late."""
        if len(self.faults) < _MOST and (not self.late or method in self.late):
            self.faults.append(MemoryFault(method, self.name(buffer), offset, size, what, self.when))

    def errs(self, method: str) -> bool:
        """Whether a method was caught."""
        return any(fault.method == method for fault in self.faults)

    def name(self, buffer: Buffer | None) -> str:
        """A buffer, as faults name it."""
        return "" if buffer is None else f"buffer {self._numbers.get(buffer.address, 0)} of {buffer.size:,} bytes"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Until the context ends, nothing is checked."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    @contextmanager
    def carefully(self) -> Iterator[None]:
        """Until the context ends, `is_careful`."""
        self.is_careful = True
        try:
            yield
        finally:
            self.is_careful = False


def differing(wanted: Bytes, found: Bytes, offset: int) -> str:
    """Which bytes of a span differ, in a few words.

    offset  of the span in its buffer
    """
    at = np.flatnonzero(wanted != found)
    first = int(at[0])
    which = "1 byte is" if at.size == 1 else f"{at.size:,} bytes are"
    end = "" if at.size == 1 else f" to {offset + int(at[-1]):,}"
    return f"{which} wrong, at offset {offset + first:,}{end}: {found[first]:#04x}, not {wanted[first]:#04x}"
