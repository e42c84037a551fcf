"""A simulated accelerator: memory that the host cannot read, a queue that runs late, faults on purpose.

    register(Simulator("XNPU0", delay=1e-3))

This project's own kernels compute, in memory whose address only they know. Whatever is queued runs in a thread of the
device, in order, each item after a random delay; `copy_in`, `copy_out`, `copy` and `fill` do not wait for it. So a
program that reads before it has synchronised, or overwrites what a queued program has yet to read, gets wrong bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from ggml_backend_npu.backend.backend import Backend
from ggml_backend_npu.backend.options import DeviceError, Options
from ggml_backend_npu.device.device import Bytes, Program, QueuedDevice
from ggml_backend_npu.ir import Graph, Node, Tensor
from ggml_backend_npu.registry.calls import said_by
from quant.kernels.threads import POOL, Team

FAULTS = ("open", "alloc", "copy_in", "copy_out", "copy", "fill", "refusal", "compile", "run", "event", "gone")
_ALIGNMENT = 64


class Simulator(QueuedDevice):
    """A simulated device.

    delay   the most seconds that the queue waits before each thing that it does; 0: it is as fast as it can be
    faults  the probability that a call fails, by its name: see FAULTS. "run": a program fails while it runs; "event":
            an event is lost and never happens, which the device notices; "gone": the device disappears at the end of a
            program, and calls fail from then on
    seed    of delays and faults

    Raises DeviceError for a fault that does not exist.
    """

    def __init__(
        self,
        name: str = "XNPU0",
        *,
        type: Literal["gpu", "accel"] = "gpu",
        memory: int = 8 << 30,
        delay: float = 0.0,
        faults: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        unknown = sorted(set(faults or ()) - set(FAULTS))
        if unknown:
            raise DeviceError(f"fault {unknown[0]!r}: must be one of {' '.join(FAULTS)}")
        self.name, self.description, self.type, self.memory = name, "simulated accelerator", type, memory
        self.delay, self.faults = delay, dict(faults or {})
        self._backend = Backend(name, options=Options(ops="all", matmul="exact"), team=Team(0))
        self.ops = tuple(self._backend.ops)
        self.n_buffers = 0  # that are allocated now
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self._failed: str | None = None  # in the queue, since it was synchronised
        self._gone = False

    def open(self) -> None:
        """Starts the queue."""
        self._fault("open")
        with self._lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name=self.name, daemon=True)
                self._worker.start()

    def alloc(self, size: int) -> Bytes:
        """Memory of the simulation's own, aligned to 64 bytes; the handle is an array."""
        self._fault("alloc", f"{size} bytes")
        owner = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -owner.__array_interface__["data"][0] % _ALIGNMENT
        self.n_buffers += 1
        return owner[begin : begin + size]

    def free(self, handle: Bytes) -> None:
        """Waits for the queue, then gives the memory back."""
        self._wait()
        self.n_buffers -= 1

    def copy_in(self, handle: Bytes, offset: int, data: Bytes) -> None:
        """Copies bytes from the host at once."""
        self._fault("copy_in", f"{data.size} bytes")
        handle[offset : offset + data.size] = data

    def copy_out(self, handle: Bytes, offset: int, out: Bytes) -> None:
        """Copies bytes to the host at once."""
        self._fault("copy_out", f"{out.size} bytes")
        out[:] = handle[offset : offset + out.size]

    def copy(self, source: Bytes, source_offset: int, target: Bytes, target_offset: int, size: int) -> None:
        """Copies bytes from one buffer to another at once."""
        self._fault("copy", f"{size} bytes")
        target[target_offset : target_offset + size] = source[source_offset : source_offset + size]

    def fill(self, handle: Bytes, offset: int, size: int, value: int) -> None:
        """Sets bytes to one value at once."""
        self._fault("fill", f"{size} bytes")
        handle[offset : offset + size] = value

    def refusal(self, node: Node) -> str | None:
        """What this project's own backend says of the node."""
        self._fault("refusal", str(node))
        return self._backend.refusal(node)

    def compile(self, graph: Graph) -> Program:
        """A plan of this project's own backend; calling the program queues one run of it."""
        self._fault("compile", f"{len(graph.nodes)} nodes")
        plan = self._backend.plan(_moved(graph))

        def run() -> None:
            self._fault("run", f"{len(graph.nodes)} nodes")
            with POOL.working():
                plan.run()
            if self._is_to_fail("gone"):
                self._gone = True

        return lambda: self._later(run)

    def synchronize(self) -> None:
        """Waits for the queue. Raises DeviceError with what failed in it since the last time."""
        self._wait()
        failed, self._failed = self._failed, None
        if failed is not None:
            raise DeviceError(failed)

    def copy_in_async(self, handle: Bytes, offset: int, data: Bytes) -> None:
        """Queues `copy_in`."""
        self._later(lambda: self.copy_in(handle, offset, data))

    def copy_out_async(self, handle: Bytes, offset: int, out: Bytes) -> None:
        """Queues `copy_out`."""
        self._later(lambda: self.copy_out(handle, offset, out))

    def copy_async(self, source: Bytes, source_offset: int, target: Bytes, target_offset: int, size: int) -> None:
        """Queues `copy`."""
        self._later(lambda: self.copy(source, source_offset, target, target_offset, size))

    def record(self) -> threading.Event:
        """Queues an event, which the queue's thread sets."""
        event = threading.Event()

        def happens() -> None:
            self._fault("event")
            event.set()

        self._later(happens)
        return event

    def wait(self, event: Any) -> None:
        """Does nothing: in one queue, what comes after an event happens after it."""

    def wait_for(self, event: threading.Event) -> None:
        """Waits for the queue. Raises DeviceError where the event was lost."""
        self._wait()
        if not event.is_set():
            raise DeviceError("an event was lost")

    def _is_to_fail(self, call: str) -> bool:
        with self._lock:
            return call in self.faults and self._random.random() < self.faults[call]

    def _fault(self, call: str, size: str = "") -> None:
        of = f"{call} of {size}" if size else call
        if self._gone:
            raise DeviceError(f"{of}: the device is gone")
        if self._is_to_fail(call):
            raise DeviceError(f"a fault in {of}, on purpose")

    def _later(self, what: Callable[[], None]) -> None:
        if self._worker is None:
            raise DeviceError("the device is not open")
        self._queue.put(what)

    def _wait(self) -> None:
        """Waits until everything that is in the queue now is done."""
        done = threading.Event()
        self._later(done.set)
        done.wait()

    def _work(self) -> None:
        """The thread of the queue. After something has failed it skips what follows, until somebody synchronises."""
        while True:
            what = self._queue.get()
            if self.delay:
                time.sleep(self._random.random() * self.delay)
            is_wait = getattr(what, "__self__", None).__class__ is threading.Event
            if self._failed is not None and not is_wait:
                continue
            try:
                what()
            except Exception as error:
                self._failed = said_by(error) if not isinstance(error, DeviceError) else str(error)


def _moved(graph: Graph) -> Graph:
    """The graph over memory that only the simulation knows."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.buffer is None:
            return tensor
        return tensor.within(tensor.buffer.handle)

    return replace(
        graph,
        nodes=tuple(Node(n.op, moved(n.dst) or n.dst, tuple(map(moved, n.src)), n.params) for n in graph.nodes),
        beyond=tuple(tuple(moved(each) or each for each in tensors) for tensors in graph.beyond),
    )
