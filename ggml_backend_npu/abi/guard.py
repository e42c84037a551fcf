"""An exception never crosses into C: it becomes a callback's failure value and one line on stderr."""

from __future__ import annotations

import _thread
import functools
import sys
from collections.abc import Callable
from typing import Any


class Failures:
    """message  of the last exception that a callback turned into a failure, or None
    printed  whether such a message goes to stderr at once: not while a caller is going to raise it
    """

    message: str | None = None
    printed: bool = True


def guarded(failure: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of callbacks: an exception becomes `failure`, kept in `Failures.message`."""

    def guard(callback: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(callback)
        def call(*arguments: Any) -> Any:
            try:
                return callback(*arguments)
            except KeyboardInterrupt:
                _thread.interrupt_main()
            except BaseException as error:
                Failures.message = " ".join(str(error).split()) or type(error).__name__
                if Failures.printed:
                    print(f"ggml-npu: {Failures.message}", file=sys.stderr)
            return failure

        return call

    return guard
