"""float32 functions of the C library that ggml calls, rounded as it rounds: for definitions, one number at a time."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def function(name: str, n: int = 1) -> Callable[..., float]:
    """A function of n floats, by its C name."""
    found = getattr(ctypes.CDLL("ucrtbase" if os.name == "nt" else None), name)
    found.argtypes, found.restype = [ctypes.c_float] * n, ctypes.c_float
    called: Callable[..., float] = found
    return called
