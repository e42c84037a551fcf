"""Limits for a user's input, known before llama.cpp is loaded."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from quant.kernels.processor import processors

MOST_TIMES = 10_000  # that something is repeated
MOST_CELLS = 1 << 24  # llama.cpp takes minutes to refuse a context of many more
MOST_THREADS = 4 * processors()  # beyond that they only wait for each other; llama.cpp has no bound and crashes


def free_memory() -> int | None:
    """Returns the bytes of memory that the system has left for processes; None if it does not tell."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None
