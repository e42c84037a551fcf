"""Cleanup when the process ends, in whatever way: files half written, temporary folders, child processes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

PATIENCE = 1.5  # seconds that an interrupted process has to end by itself

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_open: dict[int, Callable[[], object]] = {}
_commands: list[None] = []  # one for each `ends_when_told` that is open


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` at the end of the context, or in `undo_all` if the process ends before."""
    number = id(undo)
    _open[number] = undo
    try:
        yield
    finally:
        if _open.pop(number, None) is not None:
            undo()


def undo_all() -> None:
    """Calls every pending `undo`, the last one first: for a process that ends without leaving its contexts."""
    while _open:
        _, undo = _open.popitem()
        with suppress(Exception):
            undo()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields a folder that is deleted at the end of the context. Raises BadInputError if there can be none."""
    from quant import folders  # late: a command is to end when told before numba is imported

    with ExitStack() as stack:
        try:
            folder = stack.enter_context(folders.temporary_folder())
        except OSError as error:
            from graph_runner.base.errors import BadInputError  # late: as above

            raise BadInputError(f"TMPDIR: {error.strerror}") from None
        stack.enter_context(undone(partial(shutil.rmtree, folder, ignore_errors=True)))
        yield folder


@contextmanager
def ends_when_told(patience: float = PATIENCE) -> Iterator[None]:
    """Makes SIGTERM and SIGHUP leave contexts as Ctrl-C does. If the process does not end within `patience` seconds
    after one of the three signals, or a second one comes, it is ended at once, with exit code 128 plus the signal's
    number.

    For the main thread of a command.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: handler for number in _STOPS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    told_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in before:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _leave)
    watch = threading.Thread(target=_watch, args=(reader, patience), daemon=True, name="npu-signals")
    watch.start()
    _commands.append(None)
    try:
        yield
    finally:
        _commands.pop()
        signal.set_wakeup_fd(told_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writer, b"\0")
        watch.join()
        os.close(reader)
        os.close(writer)


def process_is_ours() -> bool:
    """Whether the process is a command of this project, and not a program that uses it as a library."""
    return bool(_commands)


def end_process(code: int, said: str = "") -> None:
    """Ends the process at once, after the pending cleanup, with a line on stderr if `said` is given."""
    if said:
        with suppress(OSError):
            os.write(2, f"{said}\n".encode(errors="replace"))
    undo_all()
    os._exit(code)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _watch(reader: int, patience: float) -> None:
    """Waits for the bytes that C's signal handler writes, whatever the main thread is doing."""
    while (number := os.read(reader, 1)[0]) not in _STOPS:
        if number == 0:
            return
    if select.select([reader], [], [], patience)[0] and os.read(reader, 1)[0] == 0:
        return
    end_process(128 + number)
