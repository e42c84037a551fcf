"""A process that has the ggml of another build, as the process that started it sees it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from mmap import mmap
from multiprocessing.connection import Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ggml_backend_npu import KernelError, Memory, Node
from ggml_backend_npu.ggml.convert import Read, Storage
from ggml_backend_npu.ir.sharing import span
from ggml_backend_npu.registry.calls import Watched
from graph_runner.base.builds import About, Build
from graph_runner.base.errors import BadInputError, EndedElsewhereError, InternalError, LimitError, SessionError
from graph_runner.base.limits import Outside
from graph_runner.base.python import python
from graph_runner.base.settings import Settings
from graph_runner.elsewhere.layout import Form, Handed, Say, SeenNode, SeenStorage
from graph_runner.elsewhere.reach import Reach
from graph_runner.run.session import Observer
from quant.errors import UserError

_MAIN = "from graph_runner.elsewhere.main import main; main()"
_SHARED = 1 << 24  # bytes of the memory that both processes have, at first
_PATIENCE = 2.0  # seconds that the other process has to end by itself


class Other:
    """A process with the ggml of another build. A context manager, which ends it. Everything asked of it may raise
    EndedElsewhereError.

    name     what it is called
    repacks  whether its CPU computes with weights in an order of its own
    threads  of its CPU

    Raises UserError of a build that cannot be loaded.
    """

    def __init__(self, name: str, build: Build, *, repacks: bool, threads: int) -> None:
        self.name, self._outside, self._forms = name, Outside(), dict[Form, int]()
        self._nodes: dict[int, Read] = {}  # of its run, by number
        self._at: dict[int, Read] = {}  # the same, by address, as the run came to them last
        self._last: Node | None = None  # that it was to compute
        self._connection, theirs = Pipe()
        self._fd = os.memfd_create("ggml-npu-elsewhere")
        self._grow(_SHARED)
        passed = theirs.fileno(), self._fd
        self._process = subprocess.Popen(
            python("-c", _MAIN, *map(str, passed)), env=build.environment(), stdin=subprocess.DEVNULL, pass_fds=passed
        )
        theirs.close()
        try:
            self.about: About = self._begun(repacks, threads)
            self.reach = Reach(self._process.pid)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Other:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reach.close()
        self._end()

    def _begun(self, repacks: bool, threads: int) -> About:
        try:
            found: About = self.ask("begin", repacks, threads)
        except UserError as error:
            raise BadInputError(f"{self.name}: {error}") from None
        return found

    def _end(self) -> None:
        self._connection.close()  # then it ends
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)

    # what is asked of it

    def ask(self, what: str, *arguments: object, observer: Observer | None = None) -> Any:
        """Has it do something and returns the result, or raises its error.

        observer  sees the nodes of the run that this makes
        """
        takes_long = what in ("open", "session") and observer is None  # as long as the model takes
        wait = nullcontext if takes_long else self._watched
        self._send(Say.ASK, (what, arguments))
        while True:
            with wait():
                kind, value = self._received()
            if kind is Say.BUSY:
                continue
            if kind is Say.DONE:
                return value
            if kind is Say.RAISES:
                raise SessionError(f"{self.name}: {value}") if isinstance(value, SessionError) else value
            if kind is Say.BROKEN:
                raise InternalError(value)
            assert observer is not None
            try:
                go = self._observe(observer, kind, value)
            except BaseException:
                while kind in (Say.BEFORE, Say.AFTER):  # llama.cpp may come to more nodes before it stops
                    self._send(Say.STOP, None)
                    kind, _ = self._received()
                raise
            self._send(Say.GO, go)

    def _watched(self) -> Watched:
        return Watched(f"the process of {self.name}")

    def _observe(self, observer: Observer, kind: Say, value: Any) -> bool:
        if kind is Say.AFTER:
            observer.after(value)
            return True
        number, node = value
        if node is not None:
            self._nodes[number] = self._read(node)
        read = self._nodes[number]
        self._at[read.address], self._last = read, read.node
        return observer.before(read.address)

    def _send(self, kind: Say, value: object) -> None:
        try:
            self._connection.send((kind, value))
        except OSError:
            raise self._ended() from None

    def _received(self) -> tuple[Say, Any]:
        try:
            found: tuple[Say, Any] = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        return found

    def _ended(self) -> EndedElsewhereError:
        code = self._process.wait()
        limit = ""
        try:
            self._outside.refuse(-code)
        except LimitError as error:
            limit = str(error)
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        at = f" at {self._last}" if self._last is not None else ""
        return EndedElsewhereError(f"the process of {self.name}", how, at, limit)

    # nodes that it computes

    def refusal(self, node: Node) -> str | None:
        """Returns why its CPU does not take a node; None if it does."""
        handed = Handed.of(node)
        self._put(handed)
        found: str | None = self.ask("refusal", handed.form)
        return found

    def compute(self, node: Node) -> None:
        """Computes a node into the memory of its output. Raises KernelError if it refuses it, fails, or writes
        elsewhere."""
        self.bound(node)()

    def bound(self, node: Node) -> Callable[[], None]:
        """Returns a call that computes a node, as often as it is wanted."""
        return partial(self._compute, node, Handed.of(node))

    def _compute(self, node: Node, handed: Handed) -> None:
        self._put(handed)
        number, form = self._forms.get(handed.form), None
        if number is None:
            number, form = len(self._forms), handed.form
            self._forms[form] = number
        self._last = node
        failure = self.ask("compute", number, form)
        if failure:
            raise KernelError(f"{node}: {failure}")
        dst = span(node.dst)
        at = handed.form.dst.begin + handed.form.dst.offset
        dst.bytes()[:] = Memory(self._base + at, dst.size).bytes()

    def _put(self, handed: Handed) -> None:
        """Copies what a node's tensors hold to the shared memory."""
        if handed.size > self._size:
            self._grow(max(handed.size, 2 * self._size))
            self._forms.clear()
            self.ask("map")
        for group, at in handed.parts:
            Memory(self._base + at, group.size).bytes()[:] = group.held().bytes()

    def _grow(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._shared, self._size = mmap(self._fd, size), size
        self._base = Memory.of(np.frombuffer(self._shared, np.uint8)).address

    # its run

    def open(self, model: Path, settings: Settings, *, observed: bool) -> Any:
        """Opens a session on a model. Returns what is known of it."""
        return self.ask("open", model, settings, observed)

    def close(self) -> None:
        """Closes the session, if the process has not ended."""
        self._nodes.clear()
        self._at.clear()
        with suppress(EndedElsewhereError):
            self.ask("close")

    def read(self, address: int) -> Read:
        """Returns the node of its run whose tensor is at an address there."""
        return self._at[address]

    def _read(self, seen: SeenNode) -> Read:
        of_src = tuple(None if each is None else self._storage(each) for each in seen.of_src)
        src = (
            None if each is None or of is None else each.within(of.tensor.buffer)
            for each, of in zip(seen.src, of_src, strict=True)
        )  # fmt: skip
        of_dst = self._storage(seen.of_dst)
        node = Node(seen.op, seen.dst.within(of_dst.tensor.buffer), tuple(src), seen.params)
        return Read(seen.address, node, seen.roots, seen.view_source, of_dst, of_src)

    def _storage(self, seen: SeenStorage) -> Storage:
        tensor = seen.tensor.within(self.reach.buffer(seen.place))
        return Storage(seen.address, tensor, seen.place.handle, seen.is_set, seen.is_weight, seen.is_leaf)
