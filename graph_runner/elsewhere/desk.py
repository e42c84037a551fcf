"""The work of the other process: nodes that it computes, and a run of a model."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ggml_backend_npu import KernelError, Node
from ggml_backend_npu.ggml import convert, lib, llama
from ggml_backend_npu.ggml.convert import Read
from ggml_backend_npu.ggml.lib import Ggml
from ggml_backend_npu.ggml.node_reader import Reader
from ggml_backend_npu.ir.sharing import span
from ggml_backend_npu.ops.kernels import strided
from ggml_backend_npu.plugin.repacking import Repacking
from ggml_backend_npu.plugin.replica import Replica
from ggml_backend_npu.registry.calls import UserCode
from graph_runner.base.builds import About
from graph_runner.base.errors import SessionError
from graph_runner.base.settings import Settings
from graph_runner.elsewhere.fits import refuse_other_structs
from graph_runner.elsewhere.layout import Form, Place, Say, SeenNode
from graph_runner.hazards.recording import Recording
from graph_runner.judging.copies import Layout
from graph_runner.run.session import Session

_STOPPED = "the other run has stopped"


class _Known(NamedTuple):
    """A node over shared memory, and how copies of it lie."""

    node: Node
    layout: Layout


class Desk:
    """Answers what it is asked, one message after another.

    fd  of the shared memory
    """

    def __init__(self, connection: Connection, fd: int) -> None:
        self._connection, self._fd = connection, fd
        self._known: dict[int, _Known] = {}
        self._opened = ExitStack()
        self.recording: Recording | None = None
        self._ggml: Ggml
        self._replica: Replica
        self._session: Session
        self._map()

    def serve(self) -> bool:
        """Answers until a run that waits at a node may go on. Returns whether it is to observe that. Raises EOFError
        when nobody asks any more, and SessionError if the run is to fail."""
        while True:
            kind, value = self._connection.recv()
            if kind is Say.GO:
                return bool(value)
            if kind is Say.STOP:
                raise SessionError(_STOPPED)
            self._answer(*value)

    def say(self, kind: Say, value: object) -> None:
        """Sends a message."""
        self._connection.send((kind, value))

    def _answer(self, what: str, arguments: tuple[Any, ...]) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "begin": self._begin, "map": self._map, "refusal": self._refusal, "compute": self._compute,
            "open": self._open, "close": self._opened.close, "session": self._of_session, "order": self._order,
        }  # fmt: skip
        try:
            self.say(Say.DONE, answers[what](*arguments))
        except EOFError:
            raise
        except Exception as error:
            told = type(error).__module__.partition(".")[0] in ("graph_runner", "ggml_backend_npu", "quant")
            self.say(Say.RAISES if told else Say.BROKEN, error if told else traceback.format_exc())

    # nodes

    def _begin(self, repacks: bool, threads: int) -> About:
        """Loads ggml. Returns what it is."""
        refuse_other_structs(llama.functions())
        self._ggml = lib.ggml()
        self._replica = (Repacking if repacks else Replica)(self._ggml, "CPU", threads=threads)
        strided.make_ready()
        return About.of_this_process(self._ggml)

    def _map(self) -> None:
        """Maps the shared memory, which may have grown; nodes over it are forgotten."""
        self._known.clear()
        self._shared = np.frombuffer(mmap(self._fd, os.fstat(self._fd).st_size), np.uint8)
        self._base = self._shared.__array_interface__["data"][0]

    def _refusal(self, form: Form) -> str | None:
        """Returns why ggml's CPU does not take a node."""
        return self._replica.refusal(form.node(self._base))

    def _compute(self, number: int, form: Form | None) -> str:
        """Computes a node between fences, from what the shared memory holds, into that. Returns why it could not, or
        "".

        form  of a node that has a new number
        """
        if form is not None:
            node = form.node(self._base)
            self._known[number] = _Known(node, Layout(node, blanks=False))
        node, layout = self._known[number]
        copied = layout.copied()
        try:
            with UserCode():
                self._replica.compute(copied.node)
        except KernelError as error:
            return str(error)
        changed = copied.changed()
        if changed:
            return f"changes {' and '.join(f'src{index}' for index in changed)}, which it is only to read"
        if copied.outside():
            return "writes outside its output"
        span(node.dst).bytes()[:] = span(copied.node.dst).bytes()
        return ""

    # a run

    def _open(self, model: Path, settings: Settings, observed: bool) -> tuple[str, frozenset[str]]:
        """Opens a session. Returns its description and what it lacks.

        observed  whether nodes are told
        """
        observer = _Teller(self, self._ggml) if observed else None
        self._session = self._opened.enter_context(Session(model, settings, observer=observer, counts_nodes=False))
        return self._session.description, self._session.lacks

    def _of_session(self, name: str, *arguments: Any) -> Any:
        """Returns what the session has by a name; if that is a method, what it returns."""
        found = getattr(self._session, name)
        given = found(*arguments) if callable(found) else found
        return [*given] if name == "parts" else given

    def _order(self, name: str, *arguments: Any) -> Any:
        """Begins to record the order of the run, calls a method of the recording, or ends it with its graphs."""
        if name == "begin":
            self.recording = Recording(self._ggml)
        elif name == "graphs" and self.recording is not None:
            graphs, self.recording = self.recording.graphs, None
            return graphs
        elif self.recording is not None:
            getattr(self.recording, name)(*arguments)
        return None


class _Teller:
    """An observer that tells the other process of each node that computes something, and waits before and after it."""

    def __init__(self, desk: Desk, ggml: Ggml) -> None:
        self._desk, self._ggml, self._reader = desk, ggml, Reader(ggml)
        self._numbers: dict[Read, int] = {}

    def before(self, address: int) -> bool:

        read = self._reader(address)
        if self._desk.recording is not None:
            self._desk.recording.add(read)
        if not convert.computes(read.node.op):
            return False
        number, node = self._numbers.get(read), None
        if number is None:
            number, node = len(self._numbers), SeenNode.of(read, self._place)
            self._numbers[read] = number
        self._desk.say(Say.BEFORE, (number, node))
        return self._desk.serve()

    def after(self, address: int) -> None:
        self._desk.say(Say.AFTER, address)
        self._desk.serve()

    def _place(self, buffer: int) -> Place:

        if not buffer:
            return Place(0, 0, 0, True)
        ggml = self._ggml
        base, size = ggml.ggml_backend_buffer_get_base(buffer) or 0, ggml.ggml_backend_buffer_get_size(buffer)
        return Place(buffer, int(base), int(size), bool(ggml.ggml_backend_buffer_is_host(buffer)))
