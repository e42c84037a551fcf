"""Work with kernels that are not trusted, in a process of its own: what it was at when it ended or hung is known.

The child reads a pickled job from its standard input, and sends what it finds through a pipe. Before the device
computes a node, the child writes down which in a page of memory that both have: the trail.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

from ggml_backend_npu.ir import Dims, Node
from graph_runner.errors import InternalError

_TRAIL_BYTES = 1 << 16
_HEAD = struct.Struct("<qqq")  # how many were begun, nanoseconds of the monotonic clock, bytes of what follows
_POLL = 0.2  # seconds
_CHILD = "from graph_runner.child import main; main()"
_MESSAGE, _RESULT, _ERROR, _INTERNAL = range(4)


@dataclass(frozen=True)
class Footprint:
    """What the device computes: how ("isolated", "own", "fused N" of N nodes as one), and the node."""

    how: str
    step: int
    place: int
    op: str
    name: str
    types: str
    ne: Dims


class EndedError(Exception):
    """The child ended, or stood still, before it was done.

    reason   "ended by SIGSEGV", "exit code 3", "was not done after 60 s"
    at       what the device was computing; None where it was not
    last     what it had computed last, or None
    """

    def __init__(self, reason: str, at: Footprint | None, last: Footprint | None) -> None:
        super().__init__(reason)
        self.reason, self.at, self.last = reason, at, last


class Trail:
    """The page of memory: written by the child, read by the parent."""

    def __init__(self, file: IO[bytes]) -> None:
        file.truncate(_TRAIL_BYTES)
        self._page = mmap.mmap(file.fileno(), _TRAIL_BYTES)
        self._begun = 0

    def about_to(self, how: str, step: int, place: int, node: Node | None) -> None:
        """The device is about to compute a node; how is "" where it has."""
        from graph_runner.results import types_of

        self._begun += 1
        data = b""
        if how and node is not None:
            data = pickle.dumps(Footprint(how, step, place, node.op, node.name, types_of(node), node.dst.ne))
            self._page[_HEAD.size : _HEAD.size + len(data)] = data
        self._page[: _HEAD.size] = _HEAD.pack(self._begun, time.monotonic_ns(), len(data))

    def is_moving(self) -> None:
        """What is being computed has come further: its kernel is being compiled."""
        begun, _, size = _HEAD.unpack(self._page[: _HEAD.size])
        self._page[: _HEAD.size] = _HEAD.pack(begun, time.monotonic_ns(), size)

    def read(self) -> tuple[int, float, Footprint | None]:
        """How many were begun, for how many seconds that is so, and what is being computed."""
        begun, at, size = _HEAD.unpack(self._page[: _HEAD.size])
        data = self._page[_HEAD.size : _HEAD.size + size]
        now = begun, (time.monotonic_ns() - at) / 1e9
        return *now, pickle.loads(data) if size else None

    def last(self) -> Footprint | None:
        """What was computed last."""
        with suppress(Exception):
            found = pickle.loads(self._page[_HEAD.size :])
            return found if isinstance(found, Footprint) else None
        return None


class Job(Protocol):
    """What a child does; it is pickled."""

    def __call__(self, send: Callable[[object], None], trail: Trail) -> object:
        """Does it, sending what the parent's `receive` is to be called with. Returns the result."""


def run(job: Job, *, receive: Callable[[Any], None], node_timeout: float) -> Any:
    """Does a job in a child. Returns its result, and raises what it raises.

    receive       called with what the job sends
    node_timeout  seconds that the device may take for one node

    Raises EndedError where the child ends before it is done or a node takes too long; InternalError, with the child's
    traceback, for an error that is nobody's mistake. An interrupt ends the child.
    """
    with tempfile.TemporaryFile() as file:
        trail = Trail(file)
        ours, theirs = os.pipe()
        line = [sys.executable, "-c", _CHILD, str(theirs), str(file.fileno())]
        child = subprocess.Popen(
            line, stdin=subprocess.PIPE, pass_fds=(theirs, file.fileno()), start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        os.close(theirs)
        assert child.stdin is not None
        with Connection(ours, writable=False) as pipe:
            try:
                with suppress(BrokenPipeError):
                    pickle.dump(job, child.stdin)
                    child.stdin.close()
                return _received(child, pipe, trail, receive, node_timeout)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _received(
    child: subprocess.Popen[bytes], pipe: Connection, trail: Trail, receive: Callable[[Any], None], timeout: float
) -> Any:
    while True:
        if not pipe.poll(_POLL):
            _, seconds, at = trail.read()
            if at is not None and seconds > timeout:
                raise EndedError(f"was not done after {timeout:g} s (--node-timeout)", at, at)
            continue
        try:
            kind, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        if kind == _MESSAGE:
            receive(value)
        elif kind == _RESULT:
            return value
        elif kind == _ERROR:
            raise value
        else:
            raise InternalError(value)
    code = child.wait()
    reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended the process with exit code {code}"
    raise EndedError(reason, trail.read()[2], trail.last())


def main() -> None:
    """The child."""
    from ggml_backend_npu.abi.guard import end_with_parent
    from quant.jit import while_compiling

    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_parent, page = map(int, sys.argv[1:])
    pipe = Connection(to_parent, readable=False)

    def send(kind: int, value: object) -> None:
        pipe.send_bytes(pickle.dumps((kind, value), pickle.HIGHEST_PROTOCOL))

    with os.fdopen(page, "r+b") as file:
        trail = Trail(file)
        while_compiling(trail.is_moving)
        job = pickle.load(sys.stdin.buffer)
        try:
            send(_RESULT, job(lambda value: send(_MESSAGE, value), trail))
        except Exception as error:
            told = type(error).__module__.partition(".")[0] in ("graph_runner", "ggml_backend_npu", "quant")
            send(_ERROR if told else _INTERNAL, error if told else traceback.format_exc())
        sys.stdout.flush()
        pipe.close()
        os._exit(0)  # what kernels left running, and what they damaged, is of no interest any more
