"""Starts the processes of `child`. That of a command can be started before this process has imported the command, so
that both import at the same time."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import IO

from graph_runner.base.python import environment, python

DIFF, REPLAY = "graph_runner.diff.run", "graph_runner.trace"  # the modules that children of these commands import

_CHILD = "from graph_runner.process.child import main; main()"
_STANDARD = (1, 2)  # streams that a child has from this process
_OF_COMMANDS = {"diff": DIFF, "replay": REPLAY}
_WITHOUT = {"-h", "--help", "--in-process"}  # of which a command needs no child


def _inherits() -> object:
    """Returns what a child has from this process."""
    streams = []
    for stream in _STANDARD:
        with suppress(OSError):
            about = os.fstat(stream)
            streams.append((stream, about.st_dev, about.st_ino))
    return environment(), streams


class Started:
    """A process that imports a module and waits for a job.

    process  its standard input takes the job
    file     memory that both processes have; closed by who takes it
    pipe     a file descriptor, on which the process sends; closed by who takes it
    inherits  what it has from this process

    Raises OSError if there can be no process.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self.inherits = _inherits()
        self.file: IO[bytes] = os.fdopen(os.memfd_create("ggml-npu"), "r+b")  # on no disk, which could be full
        self.pipe, theirs = os.pipe()
        try:
            self.process = subprocess.Popen(
                python("-c", _CHILD, str(theirs), str(self.file.fileno()), module), env=environment(),
                stdin=subprocess.PIPE, pass_fds=(theirs, self.file.fileno()), start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._close()
            raise
        finally:
            os.close(theirs)

    def end(self) -> None:
        """Ends the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def give_up(self) -> None:
        """Ends the process, which nobody has taken."""
        self.end()
        self._close()

    def _close(self) -> None:
        self.file.close()
        os.close(self.pipe)


_ahead: list[Started] = []


def ahead() -> None:
    """Starts the child process of the command that this process was called for, if that has one. If it cannot be
    started, the command will say so when it needs it."""
    module = _OF_COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if module is not None and _WITHOUT.isdisjoint(sys.argv):
        with suppress(OSError):
            _ahead.append(Started(module))
            atexit.register(_give_up_all)


def _give_up_all() -> None:
    while _ahead:
        _ahead.pop().give_up()


def started(module: str) -> Started:
    """Returns a process that imports a module: that which was started ahead, if it has what a new one would have."""
    if _ahead and (_ahead[0].module, _ahead[0].inherits) == (module, _inherits()):
        return _ahead.pop()
    _give_up_all()
    return Started(module)
