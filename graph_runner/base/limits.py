"""Limits: for a user's input, known before llama.cpp is loaded; and of the machine, which end what is right as well as
what is wrong."""

from __future__ import annotations

import re
import resource
import signal
from contextlib import suppress
from pathlib import Path

from graph_runner.base.errors import LimitError
from quant.kernels.processor import processors

MOST_TIMES = 10_000  # that something is repeated
MOST_SEQUENCES = 256  # of a context: LLAMA_MAX_SEQ
MOST_DRAFTED = 64  # tokens of a step besides the next one
MOST_CELLS = 1 << 24  # llama.cpp takes minutes to refuse a context of many more
MOST_THREADS = 4 * processors()  # beyond that they only wait for each other; llama.cpp has no bound and crashes


def free_memory() -> int | None:
    """Returns the bytes of memory that the system has left for processes; None if it does not tell."""
    with suppress(OSError):
        found = re.search(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


_OF_MEMORY = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}


def refuse_where_memory_is_limited(error: BaseException | None) -> None:
    """Raises LimitError for an error for want of memory, if it is a limit of the process that there is no more."""
    while error is not None:
        if isinstance(error, MemoryError):
            for option, limit in _OF_MEMORY.items():
                size = resource.getrlimit(limit)[0]
                if size != resource.RLIM_INFINITY:
                    raise LimitError(f"no more memory: ulimit {option} {size >> 10} (KiB): {error}") from error
        error = error.__cause__


class Outside:
    """What may end a child process though nothing is wrong with it, from the time that this object is made."""

    def __init__(self) -> None:
        self._killed, self._seconds = _killed_for_memory(), _seconds_of_children()

    def refuse(self, ended_by: int) -> None:
        """Raises LimitError if the machine has sent the signal that ended a child, which has been waited for."""
        seconds = min((each for each in resource.getrlimit(resource.RLIMIT_CPU) if each >= 0), default=None)
        used = _seconds_of_children() - self._seconds
        # the kernel counts a limit by ticks, and rusage by the clock: on a busy machine the two are apart
        is_late = seconds is not None and used > seconds / 2
        if ended_by == signal.SIGXCPU or (ended_by == signal.SIGKILL and is_late):
            raise LimitError(f"no more CPU time: ulimit -t {seconds} (s)")
        if ended_by == signal.SIGKILL and _killed_for_memory() > self._killed:
            raise LimitError("no more memory: the system has killed a process of this command")


def _seconds_of_children() -> float:
    """Returns the CPU time of the child processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _killed_for_memory() -> int:
    """Returns how many processes Linux has killed to get memory; 0 where that is not known."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
