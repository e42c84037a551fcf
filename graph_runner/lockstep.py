"""Two runs of one model, node by node in step: while one computes a node, the other waits behind the same one.

They are two greenlets of one thread, that switch to each other within llama.cpp's callbacks: both results of a node are
there at the same time, and nothing has to be kept of a whole graph. (Two threads would do, but take longer: they wake
each other at every node, and each has workers of its own that spin.)
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

from ggml_backend_npu.abi import convert, lib
from ggml_backend_npu.abi.guard import INTERRUPTS
from ggml_backend_npu.abi.plugin import Plugin
from graph_runner.session import Session, SessionError

_ENDED = 1 << 62


@contextmanager
def _handlers_of_interrupts_stay() -> Iterator[None]:
    """Both runs put handlers in place, and take them back in the order in which they end."""
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
    """What is told of each node of both runs, by address and place among the step's nodes."""

    def before(self, address: int, place: int) -> None:
        """The reference is about to compute a node."""

    def between(self) -> str | None:
        """The reference has computed it, and the device has not. Returns why the device must not, or None."""

    def own_before(self, address: int, place: int) -> bool:
        """The device's run has come to a node. Returns whether it is to run now, with those before it that were not."""

    def own_after(self) -> None:
        """The device has computed the nodes up to the last one that it has come to."""

    def after(self, address: int, place: int, own: int | None) -> None:
        """Both have computed a node: the reference's address, and the device's, or None where the device has computed
        it together with nodes behind it, or has stopped."""


class Lockstep:
    """The observers of both runs, and what makes them wait for each other.

    npu      the device, where it is ours: it fails where the judge says that it must not compute
    judge    what looks on
    stopped  why the device's run came to an end before the reference's, or None
    """

    def __init__(
        self,
        npu: Plugin | None,
        judge: Onlooker,
    ) -> None:
        self.reference, self.device = _Runner(self), _Runner(self)
        self._npu, self._judge = npu, judge
        self.stopped: str | None = None
        self._failed = False

    def decode(self, reference: Session, device: Session, tokens: list[int]) -> None:
        """Runs tokens through both, or through the reference alone where the device has stopped."""
        self.reference.place = self.device.place = -1
        self._failed = False
        self._main, self._other = getcurrent(), greenlet(partial(self._decode_device, device, tokens))
        with _handlers_of_interrupts_stay():
            try:
                reference.decode(tokens)
            except BaseException:
                self._failed = True
                raise
            finally:
                while self.device.place != _ENDED:
                    self._let_device_go_on()

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._halt(None)

    def _decode_device(self, device: Session, tokens: list[int]) -> None:
        try:
            if not self._failed and self.stopped is None:
                device.decode(tokens)
        except SessionError as error:
            self.stopped = str(error)
        finally:
            self.device.place = _ENDED

    def _let_device_go_on(self) -> None:
        """Until it has computed a node that it computes alone, or the last one."""
        self._other.switch()

    def _halt(self, reason: str | None) -> None:
        if self._npu is not None:
            self._npu.halted = reason

    def wants(self, runner: _Runner, address: int) -> bool:
        """A runner is about to compute a node."""
        if self._failed:
            raise SessionError("the other run has failed")
        if not convert.computes(convert.op_name(lib.ggml(), address)):
            return False
        runner.place += 1
        if runner is self.device:
            return self._judge.own_before(address, runner.place)
        self._judge.before(address, runner.place)
        return True

    def done(self, runner: _Runner, address: int) -> None:
        """A runner has computed a node."""
        runner.address = address
        if runner is self.device:
            self._judge.own_after()
            self._main.switch()
            return
        reason = self._judge.between()
        while self.device.place < runner.place:
            self._halt(reason)
            self._let_device_go_on()
        same = self.device.place == runner.place
        self._judge.after(address, runner.place, self.device.address if same else None)


class _Runner:
    """The observer of one run: its place among the nodes that compute something, and the node that it is behind."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self.place = -1
        self.address = 0

    def before(self, node: int) -> bool:
        return self._lockstep.wants(self, node)

    def after(self, node: int) -> None:
        self._lockstep.done(self, node)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: Any) -> bool:
        return self is other
