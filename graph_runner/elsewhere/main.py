"""The other process: it starts, loads the ggml of its build, and answers what it is asked."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from quant.errors import UserError


def main() -> None:
    """Runs the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ggml_backend_npu.ggml.guard import end_with_parent

    end_with_parent()
    number, fd = map(int, sys.argv[1:3])
    connection = Connection(number)
    with suppress(EOFError, OSError):  # nobody asks any more
        _serve(connection, fd)
    sys.stdout.flush()
    os._exit(0)


def _serve(connection: Connection, fd: int) -> None:
    from graph_runner.elsewhere.layout import Say
    from quant.kernels.jit import while_compiling

    while_compiling(lambda: connection.send((Say.BUSY, None)))
    try:
        from graph_runner.elsewhere.desk import Desk  # late: it needs llama.cpp
    except UserError as error:
        connection.recv()
        connection.send((Say.RAISES, error))
        return
    Desk(connection, fd).serve()
