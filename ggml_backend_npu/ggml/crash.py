"""Reports in one line what ends a process inside C: ggml's assertions, and signals that are crashes."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ggml_backend_npu.ggml.lib import Ggml

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)
_Abort = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


@contextmanager
def crashes_told(ggml: Ggml, end: Callable[[str], object]) -> Iterator[None]:
    """Until the context ends, `end` is called with the message of a ggml abort, or with the name of a fatal signal. It
    must end the process: there is nothing to return to."""
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    on_signal = _Handler(lambda number: _end(libc, end, signal.Signals(number).name))
    on_abort = _Abort(lambda text: _end(libc, end, _said(text)))
    abort_before = ggml.ggml_set_abort_callback(ctypes.cast(on_abort, ctypes.c_void_p))
    before = {number: libc.signal(number, ctypes.cast(on_signal, ctypes.c_void_p)) for number in _CRASHES}
    try:
        yield
    finally:
        for number, handler in before.items():
            libc.signal(number, handler)
        ggml.ggml_set_abort_callback(abort_before)


def _end(libc: ctypes.CDLL, end: Callable[[str], object], what: str) -> None:
    libc.alarm(3)  # where Python itself is what has crashed
    end(what)


def _said(text: bytes) -> str:
    """ggml's message without the folder of its source file."""
    place, _, message = text.decode(errors="replace").partition(": ")
    return f"{place.rsplit('/', 1)[-1]}: {message}"
