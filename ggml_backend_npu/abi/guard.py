"""An exception never crosses into C: it becomes a callback's failure value and one line on stderr."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

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


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C is raised when the context ends: raised in a callback, C would not notice."""
    Failures.interrupted = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught or Failures.interrupted:
        raise KeyboardInterrupt
