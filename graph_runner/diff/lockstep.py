"""Two runs of one model in step, node by node: while one computes a node, the other waits after the same node.

They are two greenlets of one thread that switch to each other within llama.cpp's callbacks. So both results of a node
exist at the same time, and no copy of a whole graph is needed. (Two threads would work but take longer: they wake each
other at every node, and each has its own workers that spin.)
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

from ggml_backend_npu.ggml import convert, lib
from ggml_backend_npu.ggml.guard import INTERRUPTS
from graph_runner.base.limits import refuse_where_memory_is_limited
from graph_runner.diff.side import Side
from graph_runner.elsewhere.session import AnySession
from graph_runner.run.session import Session, SessionError

Batch = list[list[int]]  # tokens of each sequence

_ENDED = 1 << 62


@contextmanager
def _handlers_of_interrupts_stay() -> Iterator[None]:
    """Restores signal handlers at the end: both runs install handlers, and remove them in the order in which they
    end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


class Onlooker(Protocol):
    """Is told of each node of both runs, by address and by place among the step's nodes."""

    def before(self, address: int, place: int) -> None:
        """Called before the reference computes a node."""

    def partner(self, place: int) -> int | None:
        """Returns the place of the same node in the device's graph of the step; None if that has no such node."""

    def between(self) -> str | None:
        """Called after the reference and before the device computes a node. Returns why the device must not compute it,
        or None."""

    def own_passes(self, address: int) -> None:
        """Called when the device's run has come to a node that computes nothing."""

    def own_before(self, address: int, place: int) -> bool:
        """Called when the device's run has come to a node. Returns whether to run it now, with those before it that
        have not run."""

    def own_after(self) -> None:
        """Called after the device has computed the nodes up to the last one that it came to."""

    def own_ended(self) -> None:
        """Called after the device has computed all nodes of a graph."""

    def ended(self) -> None:
        """Called after the reference has computed all nodes of a graph."""

    def after(self, address: int, place: int) -> None:
        """Called after both have computed a node, or after the reference has if the device's run has stopped.

        address  of the reference's tensor
        """


class Lockstep:
    """The observers of both runs, which make them wait for each other.

    device   fails if the judge says that it must not compute
    judge    is told of each node
    stopped  why the device's run ended before the reference's, or None
    """

    def __init__(self, device: Side, judge: Onlooker) -> None:
        self.reference, self.device = _Runner(self), _Runner(self)
        self._side, self._judge = device, judge
        self.stopped: str | None = None
        self._failed = False

    def decode(self, reference: Session, device: AnySession, tokens: Batch) -> None:
        """Runs tokens of each sequence through both sessions; through the reference alone if the device has stopped."""
        self.reference.place = self.device.place = -1
        self._failed = False
        self._main, self._other = getcurrent(), greenlet(partial(self._decode_device, device, tokens))
        with _handlers_of_interrupts_stay():
            try:
                for part in reference.parts(*tokens):
                    reference.decode(*part)
                    self._judge.ended()
            except BaseException:
                self._failed = True
                raise
            finally:
                while self.device.place != _ENDED:
                    self._let_device_go_on()

    def __enter__(self) -> Lockstep:
        self._side.watch(watched=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt(None)
        self._side.watch(watched=False)

    def _decode_device(self, device: AnySession, tokens: Batch) -> None:
        try:
            if not self._failed and self.stopped is None:
                for part in device.parts(*tokens):
                    device.decode(*part)
                    self._judge.own_ended()
        except SessionError as error:
            refuse_where_memory_is_limited(error)
            self.stopped = str(error)
        finally:
            self.device.place = _ENDED

    def _let_device_go_on(self) -> None:
        """Lets the device run until it has computed a node that it computes alone, or the last one."""
        self._other.switch()

    def _halt(self, reason: str | None) -> None:
        self._side.halt(reason)

    def wants(self, runner: _Runner, address: int) -> bool:
        """Called before a run computes a node. Returns whether to observe the node."""
        if self._failed:
            raise SessionError("the other run has failed")
        if runner is self.device:
            if not self._side.computes(address):
                self._judge.own_passes(address)
                return False
            runner.place += 1
            with self._side.at_rest():
                return self._judge.own_before(address, runner.place)
        if not convert.computes(convert.op_name(lib.ggml(), address)):
            return False
        runner.place += 1
        self._judge.before(address, runner.place)
        return True

    def done(self, runner: _Runner, address: int) -> None:
        """Called after a run has computed a node."""
        if runner is self.device:
            with self._side.at_rest():  # until it goes on
                self._judge.own_after()
                self._main.switch()
            return
        reason, partner = self._judge.between(), self._judge.partner(runner.place)
        while partner is not None and self.device.place < partner:
            self._halt(reason)
            self._let_device_go_on()
        self._judge.after(address, runner.place)


class _Runner:
    """The observer of one run: its place among the nodes that compute something."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self.place = -1

    def before(self, node: int) -> bool:
        return self._lockstep.wants(self, node)

    def after(self, node: int) -> None:
        self._lockstep.done(self, node)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: Any) -> bool:
        return self is other
