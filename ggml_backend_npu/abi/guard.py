"""An exception never crosses into C: it becomes a callback's failure value and one line on stderr. Ctrl-C waits until C
returns; what runs Python for long within C is stopped for it."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import Any, TypeVar

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Failures:
    """message  of the last exception that a callback turned into a failure, or None
    printed  whether such a message goes to stderr at once: not while a caller is going to raise it
    interrupted  whether it was a KeyboardInterrupt that `interrupts_wait` is to raise again
    """

    message: str | None = None
    printed: bool = True
    interrupted: bool = False


def guarded(failure: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of callbacks: an exception becomes `failure`, and its message the one kept in `Failures.message`."""

    def guard(callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def call(*arguments: Any) -> Any:
            try:
                return callback(*arguments)
            except BaseException as error:
                with suppress(BaseException):  # what an error says of itself, and stderr, may fail too
                    _tell(error)
            return failure

        return call

    return guard


def _tell(error: BaseException) -> None:
    Failures.message = type(error).__name__
    Failures.interrupted = Failures.interrupted or isinstance(error, KeyboardInterrupt)
    Failures.message = " ".join(str(error).split()) or Failures.message
    if Failures.printed:
        print(f"ggml-npu: {Failures.message}", file=sys.stderr)


def end_with_parent() -> None:
    """Has this process killed when its parent ends, where the system can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_stopped: set[CodeType] = set()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def stopped_by_interrupts(callback: _Function) -> _Function:
    """Decorator of a callback that may run for long, and that turns an exception into a failure: Ctrl-C is raised in
    it."""
    _stopped.add(callback.__code__)
    return callback


def _runs_what_is_stopped(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code in _stopped:
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C, and SIGTERM and SIGHUP where somebody handles them, are handled when the context ends: raised in any
    callback, C would not notice. A callback that is `stopped_by_interrupts` ends with a KeyboardInterrupt at once."""
    Failures.interrupted = False
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
        if Failures.interrupted:
            raise KeyboardInterrupt
