"""No exception crosses into C: it becomes a callback's failure value and one line on stderr. Ctrl-C waits until C
returns; Python code that runs for long inside C is stopped by it."""

from __future__ import annotations

import ctypes
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from quant.errors import say

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Failures:
    """The exceptions of one owner's callbacks, which became failure values.

    message      of the last exception, or None
    error        that exception
    printed      whether a message goes to stderr at once: not while a caller is going to raise it
    interrupted  whether it was a KeyboardInterrupt, which `interrupts_wait` raises again
    """

    message: str | None = None
    error: BaseException | None = None
    printed: bool = True
    interrupted: bool = False

    def add(self, error: BaseException) -> None:
        """Records an exception that became a failure value."""
        self.message, self.error = type(error).__name__, error
        self.interrupted = self.interrupted or isinstance(error, KeyboardInterrupt)
        self.message = " ".join(str(error).split()) or self.message
        if self.printed:
            say(self.message)

    @contextmanager
    def told_by_the_caller(self) -> Iterator[None]:
        """Clears the message; until the context ends, none is printed, as the caller of C raises it."""
        printed, self.message, self.error, self.printed = self.printed, None, None, False
        try:
            yield
        finally:
            self.printed = printed


def guarded(failure: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of callbacks, methods of a class with `failures`: on an exception the callback returns `failure`, and
    the exception is recorded there."""

    def guard(callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def call(self: Any, *arguments: Any) -> Any:
            try:
                return callback(self, *arguments)
            except BaseException as error:
                with suppress(BaseException):  # the error's text, and stderr, may fail too
                    self.failures.add(error)
            return failure

        return call

    return guard


def end_with_parent() -> None:
    """Has this process killed when its parent ends, where the system supports that (Linux, PR_SET_PDEATHSIG)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def stopped_by_interrupts(callback: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator of a callback that may run for long and turns exceptions into failures: Ctrl-C is raised in it."""

    @functools.wraps(callback)
    def stoppable(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        return callback(*arguments, **keywords)

    return stoppable


_STOPPABLE = stopped_by_interrupts(lambda: None).__code__  # the code of every function that it returns


def _runs_what_is_stopped(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _STOPPABLE:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupts_wait(failures: Failures) -> Iterator[None]:
    """Delays Ctrl-C, and SIGTERM and SIGHUP where they have a handler, until the context ends: if it were raised in any
    callback, C would not notice. A callback that is `stopped_by_interrupts` ends with a KeyboardInterrupt at once.

    failures  of the callbacks that C may call
    """
    failures.interrupted = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if _runs_what_is_stopped(frame):
            raise KeyboardInterrupt

    before = {int(number): signal.getsignal(number) for number in INTERRUPTS}
    handled = {number: handler for number, handler in before.items() if callable(handler)}
    for number in handled:
        signal.signal(number, wait)
    try:
        yield
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)
        for number in caught:
            handled[number](number, None)
        if failures.interrupted:
            raise KeyboardInterrupt
