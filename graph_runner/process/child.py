"""Runs untrusted kernels in a child process, so that the node is known at which the process ended or hung.

The child reads a pickled job from its standard input and sends its results through a pipe. Before the device computes a
node, and before each call into a device, the child writes that down in shared memory: the trail. Results that are not
yet sent are in shared memory too.
"""

from __future__ import annotations

import gc
import io
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING, Any, Protocol

from graph_runner.base.errors import EndedElsewhereError, InternalError, LimitError
from graph_runner.base.limits import Outside
from graph_runner.process.start import started

if TYPE_CHECKING:
    from ggml_backend_npu import Node

_TRAIL_BYTES = 1 << 16
_UNSENT_BYTES = 1 << 18
_UNSENT = 0.1  # seconds after which what was found is sent
_SIZE = struct.Struct("<q")
_HEAD = struct.Struct("<qq")  # nanoseconds of the monotonic clock, bytes of what follows
_CALL = _TRAIL_BYTES // 2  # where the trail has the call
_POLL = 0.2  # seconds
_MESSAGE, _RESULT, _ERROR, _INTERNAL, _ENDED = range(5)


@dataclass(frozen=True)
class Footprint:
    """What the device computes: how ("isolated", "own", "fused N" for N nodes as one operator), and the node."""

    how: str
    step: int
    place: int
    op: str
    name: str
    types: str
    ne: tuple[int, int, int, int]

    @staticmethod
    def of(data: bytes) -> Footprint:
        """Reads what a trail has: text, each field ended by a zero byte."""
        how, step, place, op, name, types, ne, _ = data.decode(errors="replace").split("\0", 7)
        first, second, third, fourth = map(int, ne.strip("()").split(","))
        return Footprint(how, int(step), int(place), op, name, types, (first, second, third, fourth))


class EndedError(Exception):
    """The child ended or hung before it was done.

    reason  "ended by SIGSEGV", "ended the process with exit code 3", "was not done after 60 s (--node-timeout)"
    call    the device's call that did not return: "XNPU0: copy_in of 4096 bytes"; "" if it was in none
    at      what the device was computing; None if it was not computing
    last    what it had computed last, or None
    """

    def __init__(self, reason: str, call: str, at: Footprint | None, last: Footprint | None) -> None:
        super().__init__(reason)
        self.reason, self.call, self.at, self.last = reason, call, at, last


class Trail:
    """Shared memory: the child writes it, the parent reads it. A `Watcher` of calls."""

    def __init__(self, file: IO[bytes]) -> None:
        file.truncate(_TRAIL_BYTES + _UNSENT_BYTES)
        self._page = mmap.mmap(file.fileno(), _TRAIL_BYTES)
        self.unsent = mmap.mmap(file.fileno(), _UNSENT_BYTES, offset=_TRAIL_BYTES)
        self._lock = threading.Lock()
        self._calls: dict[int, list[tuple[str, int]]] = {}  # that have begun, with the time, by thread

    def about_to(self, how: str, step: int, place: int, node: Node | None) -> None:
        """Called before the device computes a node, and with how "" after it has."""
        from graph_runner.judging.results import types_of

        data = ""
        if how and node is not None:
            data = f"{how}\0{step}\0{place}\0{node.op}\0{node.name}\0{types_of(node)}\0{node.dst.ne}\0"
        self._write(0, time.monotonic_ns(), data.encode(errors="replace"))

    def begins(self, what: str) -> None:
        """Called before a call into a device."""
        with self._lock:
            self._calls.setdefault(threading.get_ident(), []).append((what, time.monotonic_ns()))
            self._write_call()

    def ends(self) -> None:
        """Called after the last call that has begun in this thread and not ended."""
        with self._lock:
            begun = self._calls[threading.get_ident()]
            begun.pop()
            if not begun:
                del self._calls[threading.get_ident()]
            self._write_call()

    def _write_call(self) -> None:
        """Writes the last call of the thread that has been in calls for longest."""
        what, began = next(iter(self._calls.values()))[-1] if self._calls else ("", 0)
        self._write(_CALL, began, what.encode()[: _CALL - _HEAD.size])

    def _write(self, place: int, began: int, data: bytes) -> None:
        if data:
            self._page[place + _HEAD.size : place + _HEAD.size + len(data)] = data
        self._page[place : place + _HEAD.size] = _HEAD.pack(began, len(data))

    def is_moving(self) -> None:
        """Restarts the clocks of the current node and of all calls: a kernel is being compiled."""
        now = time.monotonic_ns()
        _, size = _HEAD.unpack(self._page[: _HEAD.size])
        self._page[: _HEAD.size] = _HEAD.pack(now, size)
        with self._lock:
            self._calls = {thread: [(what, now) for what, _ in begun] for thread, begun in self._calls.items()}
            self._write_call()

    def seconds(self) -> float:
        """Returns for how long the device has been at what it is at: a node, or a call that is none of a node's."""
        heads = [_HEAD.unpack(self._page[place : place + _HEAD.size]) for place in (0, _CALL)]
        return max((time.monotonic_ns() - began) / 1e9 if size else 0.0 for began, size in heads)

    def at(self) -> Footprint | None:
        """Returns what is being computed, or None."""
        data = self._read(0)
        return Footprint.of(data) if data else None

    def call(self) -> str:
        """Returns the call that has not returned; "" if there is none."""
        return self._read(_CALL).decode(errors="replace")

    def _read(self, place: int) -> bytes:
        _, size = _HEAD.unpack(self._page[place : place + _HEAD.size])
        return self._page[place + _HEAD.size : place + _HEAD.size + size]

    def last(self) -> Footprint | None:
        """Returns what was computed last, or None."""
        data = self._page[_HEAD.size : _CALL]
        return Footprint.of(data) if data[0] else None


class _Mail:
    """Messages from the child. Many are sent at once, since each wakes the parent while the device is waiting for a
    processor. Messages that wait are in shared memory, so that the parent finds them if the child ends."""

    def __init__(self, pipe: Connection, trail: Trail) -> None:
        self._pipe, self._unsent = pipe, trail.unsent
        self._end, self._sent = _SIZE.size, time.monotonic()

    def add(self, value: object) -> None:
        """Adds a message."""
        data = pickle.dumps((_MESSAGE, value), pickle.HIGHEST_PROTOCOL)
        if self._end + len(data) > _UNSENT_BYTES:
            self._send()
        if self._end + len(data) > _UNSENT_BYTES:
            self._pipe.send_bytes(data)
            return
        self._unsent[self._end : self._end + len(data)] = data
        self._end += len(data)
        self._unsent[: _SIZE.size] = _SIZE.pack(self._end - _SIZE.size)
        if time.monotonic() - self._sent > _UNSENT:
            self._send()

    def last(self, kind: int, value: object) -> None:
        """Sends the waiting messages, then the last one."""
        self._send()
        self._pipe.send_bytes(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))

    def _send(self) -> None:
        data = _unsent(self._unsent)
        self._unsent[: _SIZE.size] = _SIZE.pack(0)
        self._end, self._sent = _SIZE.size, time.monotonic()
        if data:
            self._pipe.send_bytes(data)


def _unsent(memory: mmap.mmap) -> bytes:
    (size,) = _SIZE.unpack(memory[: _SIZE.size])
    return memory[_SIZE.size : _SIZE.size + size]


def _messages(data: bytes) -> Iterator[tuple[int, Any]]:
    stream = io.BytesIO(data)
    while stream.tell() < len(data):
        yield pickle.load(stream)


class Job(Protocol):
    """The work of a child; it is pickled."""

    def __call__(self, send: Callable[[object], None], trail: Trail) -> object:
        """Does the work and returns the result. What it passes to `send` goes to the parent's `receive`."""


class Child:
    """A process that does one job."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, trail: Trail) -> None:
        self._process, self._pipe, self._trail = process, pipe, trail
        self._outside = Outside()

    def run(self, job: Job, *, receive: Callable[[Any], None], node_timeout: float) -> Any:
        """Does the job. Returns its result, or raises its error.

        receive  called with each value that the job sends
        node_timeout  seconds that the device may take for one node, and for one call of a method of it

        Raises EndedError if the child ends before it is done or one of these takes too long; InternalError, with the
        child's traceback, for an error that is not one of this project's own exceptions; LimitError if the machine has
        ended the child.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(job, self._process.stdin)
            self._process.stdin.close()
        while (data := self._received(node_timeout)) is not None:
            for kind, value in _messages(data):
                if kind == _MESSAGE:
                    receive(value)
                elif kind == _RESULT:
                    return value
                elif kind == _ENDED:
                    raise self._ended_elsewhere(value)
                elif kind == _ERROR:
                    raise value
                else:
                    raise InternalError(value)
        at, last, call, reason = self._trail.at(), self._trail.last(), "", self._reason()
        if reason is None:
            reason, call = f"was not done after {node_timeout:g} s (--node-timeout)", self._trail.call()
        for _, value in _messages(_unsent(self._trail.unsent)):
            receive(value)
        raise EndedError(reason, call, at, last)

    def _ended_elsewhere(self, error: EndedElsewhereError) -> EndedError | LimitError:
        """Returns the error for the end of the process of a side."""
        if error.limit:
            return LimitError(error.limit)
        return EndedError(error.how, error.who, self._trail.at(), self._trail.last())

    def _received(self, node_timeout: float) -> bytes | None:
        """Returns the child's next data; None if it has ended, or a node or a call takes too long."""
        while not self._pipe.poll(_POLL):
            if self._trail.seconds() > node_timeout:
                return None
        try:
            return self._pipe.recv_bytes()
        except EOFError:
            self._process.wait()
            return None

    def _reason(self) -> str | None:
        """Returns why the child has ended; None if it has not. Raises LimitError if the machine has ended it."""
        code = self._process.poll()
        if code is None:
            return None
        self._outside.refuse(-code)
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended the process with exit code {code}"


@contextmanager
def begun(module: str) -> Iterator[Child]:
    """Yields a child process that imports a module while the parent prepares a job. The process ends with the
    context."""
    process = started(module)
    with process.file as file, Connection(process.pipe, writable=False) as pipe:
        try:
            yield Child(process.process, pipe, Trail(file))
        finally:
            process.end()


def main() -> None:
    """Runs the child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ggml_backend_npu.ggml.guard import end_with_parent

    end_with_parent()
    to_parent, page = map(int, sys.argv[1:3])
    pipe = Connection(to_parent, readable=False)
    with os.fdopen(page, "r+b") as file:
        trail = Trail(file)
        mail = _Mail(pipe, trail)
        try:
            import_module(sys.argv[3])
            from threadpoolctl import threadpool_limits

            from ggml_backend_npu.ops.kernels import strided
            from ggml_backend_npu.registry.calls import watched_by
            from quant.kernels.jit import while_compiling

            watched_by(trail)
            while_compiling(trail.is_moving)
            threadpool_limits(1, "blas")  # NumPy's own: threads that spin after a product take the cores from ggml's
            strided.make_ready()  # each job needs them, and the parent is not done importing
            gc.freeze()  # what was loaded stays, and results of nodes make no cycles
            gc.set_threshold(200_000, 20, 20)
            try:
                job = pickle.load(sys.stdin.buffer)
            except EOFError:  # the parent has no job
                os._exit(0)
            mail.last(_RESULT, job(mail.add, trail))
        except EndedElsewhereError as error:
            mail.last(_ENDED, error)
        except Exception as error:
            told = type(error).__module__.partition(".")[0] in ("graph_runner", "ggml_backend_npu", "quant")
            mail.last(_ERROR if told else _INTERNAL, error if told else traceback.format_exc())
        sys.stdout.flush()
        pipe.close()
        os._exit(0)  # what kernels left running, and what they damaged, is of no interest any more
