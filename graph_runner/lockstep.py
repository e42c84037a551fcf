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
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from greenlet import getcurrent, greenlet

import ggml_backend_npu
from ggml_backend_npu import OPS
from ggml_backend_npu.abi import convert, lib
from ggml_backend_npu.abi.guard import INTERRUPTS
from ggml_backend_npu.device import DEVICE
from ggml_backend_npu.registry import Op
from graph_runner.session import Session, SessionError

_ENDED = 1 << 62


@dataclass(frozen=True)
class Side:
    """Who computes a run.

    name    of a ggml device: "CPU", "NPU", ...
    ops     kernels of the NPU, and a number that tells them from others
    fusion  "on" or "off", of the NPU
    """

    name: str
    ops: tuple[dict[str, Op], int]
    fusion: str = "on"

    @property
    def is_npu(self) -> bool:
        return self.name == "NPU"

    def begin_turn(self) -> None:
        """Makes the process's one NPU this side's."""
        if OPS.version == self.ops[1] and DEVICE.fusion == self.fusion and self._is_active():
            return
        if ggml_backend_npu.register.cache_info().currsize:
            ggml_backend_npu.register().active = self.is_npu
        OPS.use(*self.ops)
        DEVICE.fusion = self.fusion

    def _is_active(self) -> bool:
        registered = ggml_backend_npu.register.cache_info().currsize
        return not registered or ggml_backend_npu.register().active == self.is_npu

    def halt(self, reason: str | None) -> None:
        """The NPU fails with this reason, if any, instead of computing anything more."""
        if self.is_npu:
            ggml_backend_npu.register().halted = reason


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

    judge    what looks on
    stopped  why the device's run came to an end before the reference's, or None
    """

    def __init__(
        self,
        reference: Side,
        device: Side,
        judge: Onlooker,
    ) -> None:
        self.reference = _Runner(self, reference)
        self.device = _Runner(self, device)
        self._judge = judge
        self.stopped: str | None = None
        self._failed = False

    def decode(self, reference: Session, device: Session, tokens: list[int]) -> None:
        """Runs tokens through both, or through the reference alone where the device has stopped."""
        self.reference.place = self.device.place = -1
        self._failed = False
        self._main, self._other = getcurrent(), greenlet(partial(self._decode_device, device, tokens))
        with _handlers_of_interrupts_stay():
            try:
                self.reference.side.begin_turn()
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
        self.device.side.halt(None)
        self.device.side.begin_turn()

    def _decode_device(self, device: Session, tokens: list[int]) -> None:
        self.device.side.begin_turn()
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
        self.reference.side.begin_turn()

    def wants(self, runner: _Runner, address: int) -> bool:
        """A runner is about to compute a node."""
        if self._failed:
            raise SessionError("the other run has failed")
        if not convert.computes(convert.op_name(lib.ggml(), address)):
            return False
        runner.place += 1
        if runner is self.device:
            return self._judge.own_before(address, runner.place)
        with self._as_device():
            self._judge.before(address, runner.place)
        return True

    def done(self, runner: _Runner, address: int) -> None:
        """A runner has computed a node."""
        runner.address = address
        if runner is self.device:
            self._judge.own_after()
            self._main.switch()
            self.device.side.begin_turn()
            return
        with self._as_device():
            reason = self._judge.between()
        while self.device.place < runner.place:
            self.device.side.halt(reason)
            self._let_device_go_on()
        same = self.device.place == runner.place
        with self._as_device():
            self._judge.after(address, runner.place, self.device.address if same else None)

    @contextmanager
    def _as_device(self) -> Iterator[None]:
        """Nodes are computed again by the device, in the reference's turn."""
        if not self.reference.side.is_npu:  # it leaves the kernels as they are
            yield
            return
        self.device.side.begin_turn()
        yield
        self.reference.side.begin_turn()


class _Runner:
    """The observer of one run: its place among the nodes that compute something, and the node that it is behind."""

    def __init__(self, lockstep: Lockstep, side: Side) -> None:
        self._lockstep = lockstep
        self.side = side
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
