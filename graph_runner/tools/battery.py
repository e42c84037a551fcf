"""A battery for the memory of a device, by the calls of ggml's that llama.cpp makes.

Buffers have twins on the host, which say what they are to hold. Everything is done twice: first as llama.cpp does it,
then with every call checked (`ggml_backend_npu.device.checked`), which names the method that errs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggml_backend_npu import AnyBackend
from ggml_backend_npu.device.backend import checks_of
from ggml_backend_npu.device.device import QueuedDevice
from ggml_backend_npu.device.faults import MemoryFault, differing
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.transfers import Allocation, Piece, Transfers
from ggml_backend_npu.registry.entry import KernelError

Bytes = NDArray[np.uint8]
SIZES = (
    *(1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 1000, 4095, 4096, 4097),
    *(65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5),
)
_OFFSETS = 0, 1, 3, 64, 100, 192
_MARGIN = 256
_BIG = (2 << 30) + 1
_N_MIXED = 400  # calls of the mixed run


@dataclass
class BatteryResult:
    """What a battery has found on one device.

    device    its name
    n_checks  comparisons that were made
    faults    those that failed; calls that raised among them
    left_out  what was not tried, with the reason
    """

    device: str
    n_checks: int = 0
    faults: list[MemoryFault] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    kept: list[Bytes] = field(default_factory=list, repr=False)  # arrays that a queue may still write to, if it errs

    def take(self, again: BatteryResult, named: list[MemoryFault]) -> None:
        """Takes what was found with every call checked: what the checks named takes the place of what was found
        without."""
        self.n_checks += again.n_checks
        raised = [fault for fault in self.faults if fault.what.startswith("raised: ")]
        self.faults = [*named, *raised] if named else self.faults or again.faults


@dataclass
class _Twin:
    """A buffer, the number that messages have for it, and the bytes that it is to hold."""

    number: int
    allocation: Allocation
    held: Bytes

    @property
    def whole(self) -> Piece:
        return self.allocation.piece()


class Battery:
    """The checks of one device's memory.

    others  ggml_backends of other devices of the same kind
    """

    def __init__(self, transfers: Transfers, others: list[Transfers], result: BatteryResult) -> None:
        self._ggml, self._others, self._result = transfers, others, result
        self._random = np.random.default_rng(0)
        self._n = 0
        self._doing = ""

    def run(self, *, big: bool) -> None:
        """Runs every check; those of 2 GiB and a byte only if `big`."""
        checks = [self._every_size, self._parts, self._fills, self._rows, self._neighbours, self._copies, self._reuse]
        checks += [self._several_buffers, self._mixed]
        checks += [self._queue, self._late_reads, self._mixed_queue] if self._ggml.is_queued else []
        checks += [self._events, self._two_backends] if self._ggml.has_events else []
        for check in [*checks, *([self._two_gibibytes] if big else [])]:
            self._doing = check.__name__.strip("_").replace("_", " ")
            try:
                with self._ggml.calling():
                    check()
            except KernelError as error:
                self._found("alloc", None, 0, 0, str(error))
            self._ask()
        if not self._ggml.has_2d:
            self._result.left_out.append("rows in 2-d: this ggml has no ggml_backend_tensor_set_2d")
        if not self._ggml.is_queued:
            self._result.left_out.append("async calls and events: the device is no QueuedDevice")

    # twins

    def _twin(self, size: int) -> _Twin:
        """A new buffer that holds random bytes."""
        self._n += 1
        twin = _Twin(self._n, self._ggml.allocate(size), self._bytes(size))
        self._ggml.set(twin.whole, 0, twin.held)
        return twin

    def _bytes(self, size: int) -> Bytes:
        return self._random.integers(0, 256, size, np.uint8)

    def _free(self, *twins: _Twin) -> None:
        for twin in twins:
            self._ggml.free(twin.allocation)

    def _set(self, twin: _Twin, offset: int, data: Bytes) -> None:
        self._ggml.set(twin.whole, offset, data)
        twin.held[offset : offset + data.size] = data

    def _holds(self, method: str, twin: _Twin, offset: int = 0, size: int | None = None) -> None:
        """Compares bytes of a buffer with its twin's: all of them, if no offset is given."""
        size = twin.held.size - offset if size is None else size
        found = self._ggml.get(twin.whole, offset, size)
        self._compare(method, twin, offset, twin.held[offset : offset + size], found)

    def _compare(self, method: str, twin: _Twin, offset: int, wanted: Bytes, found: Bytes) -> None:
        self._result.n_checks += 1
        if not np.array_equal(wanted, found):
            self._found(method, twin, offset, wanted.size, differing(wanted.reshape(-1), found.reshape(-1), offset))

    def _found(self, method: str, twin: _Twin | None, offset: int, size: int, what: str) -> None:
        buffer = f"buffer {twin.number} of {twin.held.size:,} bytes" if twin is not None else ""
        self._result.faults.append(MemoryFault(method, buffer, offset, size, what, self._doing))

    def _ask(self) -> None:
        """A fault, if a call of the device has raised."""
        if (why := self._ggml.failed()) is not None:
            call = why.removeprefix(f"{self._result.device}: ").replace(":", " ").split()[0]
            self._found(call if hasattr(QueuedDevice, call) else "a call", None, 0, 0, f"raised: {why}")

    # copies that are done when they return

    def _every_size(self) -> None:
        for size in SIZES:
            twin = self._twin(size + _MARGIN)
            self._holds("copy_in or copy_out", twin)
            for offset in _OFFSETS if size < 1 << 20 else _OFFSETS[1::3]:
                self._set(twin, offset, self._bytes(size))
                self._holds("copy_in or copy_out", twin, offset, size)
            self._holds("copy_in", twin)
            self._free(twin)

    def _parts(self) -> None:
        twin = self._twin(70001)
        for size in SIZES:
            for offset in _OFFSETS:
                if offset + size <= twin.held.size:
                    self._holds("copy_out", twin, offset, size)
                    self._holds("copy_out", twin, twin.held.size - size, size)
        self._free(twin)

    def _fills(self) -> None:
        for size in SIZES:
            twin = self._twin(size + _MARGIN)
            for value, offset in (0xA5, 1), (0, 64), (0xFF, 100):
                self._ggml.memset(twin.whole, offset, size, value)
                twin.held[offset : offset + size] = value
                self._holds("fill", twin)
            twin.allocation.clear(size % 256)
            twin.held[:] = size % 256
            self._holds("fill", twin)
            self._free(twin)

    def _rows(self) -> None:
        if not self._ggml.has_2d:
            return
        for n, size, stride, offset in (1, 5, 9, 0), (7, 33, 64, 3), (16, 64, 64, 1), (31, 100, 257, 64):
            twin, rows = self._twin(offset + n * stride + 11), self._bytes(n * size).reshape(n, size)
            self._ggml.set_rows(twin.whole, offset, rows, stride)
            for i, row in enumerate(rows):
                twin.held[offset + i * stride : offset + i * stride + size] = row
            self._holds("copy_in", twin)
            self._compare("copy_out", twin, offset, rows, self._ggml.get_rows(twin.whole, offset, (n, size), stride))
            self._free(twin)

    def _neighbours(self) -> None:
        """Tensors side by side in one buffer, and spans that overlap: the last call that sets a byte decides."""
        twin = self._twin(8192)
        for offset in range(0, 8192, 64):
            piece, data = twin.allocation.piece(offset, 64 - offset // 64 % 3), self._bytes(61)
            self._ggml.set(piece, 0, data)
            twin.held[offset : offset + 61] = data
        self._holds("copy_in", twin)
        for offset in range(0, 8000, 37):
            self._set(twin, offset, self._bytes(150))
        self._ggml.memset(twin.whole, 1001, 77, 0x33)
        twin.held[1001:1078] = 0x33
        self._set(twin, 1040, self._bytes(99))
        self._holds("copy_in", twin)
        self._free(twin)

    def _copies(self) -> None:
        for size in (1, 63, 64, 65, 1000, 4097, 65537):
            first, second = self._twin(size + _MARGIN), self._twin(size + _MARGIN)
            for begin, at in (0, 0), (64, 128), (192, 64):
                self._ggml.copy(first.allocation.piece(begin, size), second.allocation.piece(at, size))
                second.held[at : at + size] = first.held[begin : begin + size]
                self._holds("copy", second)
                self._holds("copy", first)
            there = self._ggml.allocate(size, on_host=True)
            self._ggml.copy(first.allocation.piece(64, size), there.piece())
            found = self._ggml.get(there.piece(), 0, size)
            self._compare("copy_out", first, 64, first.held[64 : 64 + size], found)
            self._ggml.set(there.piece(), 0, self._bytes(size))
            self._ggml.copy(there.piece(), second.allocation.piece(128, size))
            second.held[128 : 128 + size] = self._ggml.get(there.piece(), 0, size)
            self._holds("copy_in", second)
            self._ggml.free(there)
            self._free(first, second)

    # buffers

    def _several_buffers(self) -> None:
        twins = [self._twin(int(size)) for size in (1, 64, 4096, 4096, 65537, 100, 4096, 1 << 20)]
        for twin in twins:
            self._holds("alloc", twin)
        self._free(*twins)

    def _reuse(self) -> None:
        """What is freed is used again, and what is in use is not."""
        twins = [self._twin(4096) for _ in range(6)]
        for turn in range(24):
            gone = twins.pop(int(self._random.integers(len(twins))))
            self._free(gone)
            twins.append(self._twin(int(self._random.choice([64, 4096, 4097, 100_000]))))
            for twin in twins if turn % 4 == 3 else twins[-2:]:
                self._holds("alloc or free", twin)
        self._free(*twins)

    def _mixed(self) -> None:
        """Many calls in any order: what errs seldom."""
        twins = [self._twin(size) for size in (1000, 4097, 20000, 70001)]
        for _ in range(_N_MIXED):
            twin = twins[int(self._random.integers(len(twins)))]
            offset, size = self._span(twin)
            what = int(self._random.integers(8))
            if what < 3:
                self._set(twin, offset, self._bytes(size))
                self._holds("copy_in or copy_out", twin, offset, size)
            elif what == 3:
                self._ggml.memset(twin.whole, offset, size, 0x77)
                twin.held[offset : offset + size] = 0x77
            elif what == 4:
                other = next(each for each in twins if each is not twin)
                size = min(size, other.held.size)
                self._ggml.copy(twin.allocation.piece(offset, size), other.allocation.piece(0, size))
                other.held[:size] = twin.held[offset : offset + size]
            else:
                self._holds("copy_out", twin, offset, size)
        for twin in twins:
            self._holds("copy_in", twin)
        self._free(*twins)

    def _span(self, twin: _Twin) -> tuple[int, int]:
        offset = int(self._random.integers(twin.held.size))
        return offset, int(self._random.integers(1, twin.held.size - offset + 1))

    # copies in a queue

    def _set_later(self, twin: _Twin, offset: int, data: Bytes) -> None:
        self._result.kept.append(data)
        self._ggml.set_async(twin.whole, offset, data)

    def _get_later(self, twin: _Twin, offset: int, size: int) -> Bytes:
        self._result.kept.append(np.full(size, 0xEE, np.uint8))
        self._ggml.get_async(twin.whole, offset, self._result.kept[-1])
        return self._result.kept[-1]

    def _queue(self) -> None:
        """What is queued is done in order, and is done when `synchronize` returns."""
        for size in (1, 65, 4097, 1 << 20):
            first, second = self._twin(size + _MARGIN), self._twin(size + _MARGIN)
            one, two = self._bytes(size), self._bytes(size)
            self._set_later(first, 3, one)
            self._ggml.copy_async(first.allocation.piece(3, size), second.allocation.piece(64, size))
            self._set_later(first, 3, two)
            out, last = self._get_later(second, 64, size), self._get_later(first, 3, size)
            self._ggml.synchronize()
            self._compare("copy_async or copy_out_async", second, 64, one, out)
            self._compare("copy_in_async or copy_out_async", first, 3, two, last)
            first.held[3 : 3 + size], second.held[64 : 64 + size] = two, one
            self._holds("copy_in_async or synchronize", first)
            self._holds("copy_async or synchronize", second)
            self._free(first, second)

    def _late_reads(self) -> None:
        """The host's arrays are the host's again after `synchronize`."""
        twin = self._twin(1 << 20)
        for _ in range(8):
            data = self._bytes(twin.held.size)
            twin.held[:] = data
            self._set_later(twin, 0, data)
            self._ggml.synchronize()
            data[:] = 0
            self._holds("copy_in_async or synchronize", twin)
        self._free(twin)

    def _mixed_queue(self) -> None:
        twins = [self._twin(4097), self._twin(20000)]
        for _ in range(_N_MIXED // 8):
            read: list[tuple[_Twin, int, Bytes, Bytes]] = []
            for _ in range(8):
                twin = twins[int(self._random.integers(2))]
                offset, size = self._span(twin)
                if self._random.random() < 0.5:
                    data = self._bytes(size)
                    self._set_later(twin, offset, data)
                    twin.held[offset : offset + size] = data
                else:
                    wanted = twin.held[offset : offset + size].copy()
                    read.append((twin, offset, wanted, self._get_later(twin, offset, size)))
            self._ggml.synchronize()
            for twin, offset, wanted, found in read:
                self._compare("copy_in_async or copy_out_async", twin, offset, wanted, found)
            for twin in twins:
                self._holds("copy_in_async or synchronize", twin)
        self._free(*twins)

    def _events(self) -> None:
        """What was queued before an event is done when the event has happened."""
        twin = self._twin(1 << 18)
        for _ in range(6):
            data = self._bytes(twin.held.size)
            self._set_later(twin, 0, data)
            event = self._ggml.record()
            self._ggml.wait_for(event)
            twin.held[:] = data
            self._holds("record or wait_for", twin)
            self._ggml.forget(event)
        self._ggml.synchronize()
        self._free(twin)

    def _two_backends(self) -> None:
        """A second ggml_backend of the device, and one of each other device, wait for the first."""
        with self._ggml.another() as same:
            for other in (same, *self._others):
                source, size = self._twin(70001), 70001
                target = other.allocate(size)
                for _ in range(4):
                    data = self._bytes(size)
                    self._set_later(source, 0, data)
                    event = self._ggml.record()
                    other.wait(event)
                    self._ggml.copy_async(source.whole, target.piece(), other)
                    self._result.kept.append(out := np.full(size, 0xEE, np.uint8))
                    other.get_async(target.piece(), 0, out)
                    other.synchronize()
                    source.held[:] = data
                    self._compare("copy_async, record or wait", source, 0, data, out)
                    self._ggml.synchronize()
                    self._ggml.forget(event)
                other.free(target)
                self._free(source)

    # large buffers

    def _two_gibibytes(self) -> None:
        self._n += 1
        allocation = self._ggml.allocate(_BIG)
        twin = _Twin(self._n, allocation, np.broadcast_to(np.uint8(7), _BIG))
        allocation.clear(7)
        for offset in _around(_BIG):
            size = min(4097, _BIG - offset)
            self._compare("fill", twin, offset, twin.held[offset : offset + size], self._get(twin, offset, size))
        for offset in _around(_BIG):
            data = self._bytes(min(4097, _BIG - offset))
            self._ggml.set(twin.whole, offset, data)
            self._compare("copy_in or copy_out", twin, offset, data, self._get(twin, offset, data.size))
        self._ggml.free(allocation)

    def _get(self, twin: _Twin, offset: int, size: int) -> Bytes:
        return self._ggml.get(twin.whole, offset, size)


def _around(size: int) -> Iterator[int]:
    """Offsets where 31 and 32 bits end, and the end."""
    yield from (0, 1 << 30, (1 << 31) - 4097, size - 4097, size - 1)


def run_battery(ggml: Ggml, backends: Sequence[AnyBackend], seen: Callable[[str], object]) -> list[BatteryResult]:
    """Runs the battery on each of some devices of a kind. Returns what was found on each.

    seen  called with what is being done

    Raises KernelError for a device that has no memory of its own, and DeviceError for one that cannot be opened.
    """
    found = []
    for backend in backends:
        others = [each for each in backends if each is not backend]
        result = BatteryResult(backend.name)
        big = _has_room(backend, result)
        seen(f"{backend.name}: as llama.cpp does it")
        _run(ggml, backend, others, result, big=big)
        checked = backend.like()
        if (checks := checks_of(checked)) is not None:
            seen(f"{backend.name}: every call checked")
            checks.when = ""
            again = BatteryResult(backend.name)
            _run(ggml, checked, others, again, big=False)
            result.take(again, checks.faults)
        found.append(result)
    return found


def _run(ggml: Ggml, backend: AnyBackend, others: list[AnyBackend], result: BatteryResult, *, big: bool) -> None:
    with ExitStack() as stack:
        first, *rest = [stack.enter_context(Transfers(Plugin(ggml, each))) for each in (backend, *others)]
        Battery(first, rest, result).run(big=big)


def _has_room(backend: AnyBackend, result: BatteryResult) -> bool:
    """Whether the device and this machine have the memory for the largest buffer."""
    memory = backend.memory()
    fits = memory is None or (memory.limit >= _BIG and (memory.largest or _BIG) >= _BIG)
    if fits and _available() >= 4 * _BIG:
        return True
    why = "this machine has no memory for it" if fits else "the device's memory is smaller"
    result.left_out.append(f"a buffer of 2 GiB and 1 byte: {why}")
    return False


def _available() -> int:
    """Bytes of memory that this machine may still give; 0 if it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
