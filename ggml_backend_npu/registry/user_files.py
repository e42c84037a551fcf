"""A user's Python files: they are programs, and run as such."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FrameType
from typing import NoReturn

from ggml_backend_npu.ggml import modes


class _Uncached(SourceFileLoader):
    """Compiles a file each time: bytecode kept beside it would be stale after two edits within one second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


class FileError(Exception):
    """A user's Python file failed: the message is the line, if it is known, and what was raised there."""


def run_file(path: Path, name: str) -> None:
    """Runs a Python file as the module `name`. It can import other files of its folder.

    Raises FileError for whatever it raises, and if it would end the process; KeyboardInterrupt only for Ctrl-C.
    """
    loader = _Uncached(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # dataclasses look up their module
    before = modes.modes()
    with _interrupts() as caught:
        try:
            with _lives_on():
                loader.exec_module(module)
        except BaseException as error:
            if caught and isinstance(error, KeyboardInterrupt):
                raise
            text = error.msg if isinstance(error, SyntaxError) else error
            raise FileError(f"{_line_in(path, error)}: {type(error).__name__}: {text}") from None
        finally:
            modes.put_back(before)  # a library that it loads may have changed them


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yields a list that has an entry when there was a Ctrl-C: a file may raise KeyboardInterrupt by itself."""
    caught: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield caught
        return

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        before(number, frame)

    signal.signal(signal.SIGINT, catch)
    try:
        yield caught
    finally:
        if signal.getsignal(signal.SIGINT) is catch:  # the file may have set its own
            signal.signal(signal.SIGINT, before)


@contextmanager
def _lives_on() -> Iterator[None]:
    """Has os._exit and os.abort raise SystemExit in this process, not in those that it forks, until the context
    ends."""
    process = os.getpid()
    ends: dict[str, Callable[..., NoReturn]] = {"_exit": os._exit, "abort": os.abort}

    def instead(name: str) -> Callable[..., NoReturn]:
        def end(*arguments: int) -> NoReturn:
            if os.getpid() == process and getattr(os, name) is end:
                raise SystemExit(f"os.{name}({', '.join(map(str, arguments))})")
            ends[name](*arguments)

        return end

    for name in ends:
        setattr(os, name, instead(name))
    try:
        yield
    finally:
        for name, end in ends.items():
            setattr(os, name, end)


def _line_in(path: Path, error: BaseException) -> str:
    """Where in the file an error was raised: " line 7", or an empty string."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" line {lines[-1]}" if lines else ""
