"""The command ggml-npu, one module per command. `app` finds them; `options` and `common` hold what they share."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from graph_runner.cli.codes import CLOSED_PIPE, INTERRUPTED

try:
    from graph_runner.base.endings import ends_when_told
    from graph_runner.process.start import ahead
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)


def main() -> None:
    """Runs the command. Exit codes: 2 with one line on stderr for bad input or something missing on this machine, 3 for
    a bug of this project, 130 after Ctrl-C, 141 if nobody reads the output; others are those of the commands."""
    _open_what_is_closed()
    try:
        with ends_when_told():
            code = _flushed(_run())
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _open_what_is_closed() -> None:
    """Opens each standard stream that the caller has closed as one that reads and writes nothing, so that no other file
    gets its number."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _run() -> int:
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    ahead()
    try:
        from graph_runner.cli.app import application

        app = application(sys.argv[1:])
        return int(app(prog_name="ggml-npu", standalone_mode=False) or 0)  # what it refuses is told as the rest is
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return CLOSED_PIPE
    except BaseException as error:
        from graph_runner.cli.failures import told

        return told(error)


def _flushed(code: int) -> int:
    """Returns the exit code of a command after its output has been written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        if isinstance(error, BrokenPipeError):
            return code or CLOSED_PIPE
        if code:
            return code
        with suppress(OSError):
            print(f"ggml-npu: stdout: {error.strerror}", file=sys.stderr)
        return 2
    return code
