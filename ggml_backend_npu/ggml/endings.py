"""Calls functions when the process ends, be it Python or a program that has loaded the plugin."""

from __future__ import annotations

import atexit
import ctypes
import sys
from collections.abc import Callable

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def at_end(function: Callable[[], object]) -> None:
    """Calls a function when the process ends by itself. In a program that is not Python nobody finalises the
    interpreter, which still runs when C's own exit handlers do."""
    if sys.orig_argv:
        atexit.register(function)
        return
    handler = _Handler(lambda _: function())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(handler))  # for as long as the process lives
    ctypes.CDLL(None).__cxa_atexit(handler, None, None)
