"""The output files of commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from graph_runner.errors import BadInputError
from graph_runner.files import STDOUT, write_file


@dataclass
class _Alone:
    """What is to be on stdout, and whether stdout and stderr are the same terminal or file."""

    on_stderr: bool
    texts: list[str] = field(default_factory=list)


_alone: ContextVar[_Alone | None] = ContextVar("the output that has stdout for itself", default=None)


@contextmanager
def stdout_for(files: Collection[str | None]) -> Iterator[None]:
    """If one of the output files is stdout, gives it stdout for itself: whatever else is printed in the context, by a
    user's kernels too, goes to stderr."""
    if STDOUT not in files:
        yield
        return
    stream, alone = sys.stdout, _Alone(_is_one(sys.stdout, sys.stderr))
    stream.flush()
    ours = os.dup(1)
    os.dup2(2, 1)  # of C, and of children
    before = _alone.set(alone)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _alone.reset(before)
        os.dup2(ours, 1)
        os.close(ours)
        stream.writelines(alone.texts)


def _is_one(a: TextIO, b: TextIO) -> bool:
    try:
        return os.path.sameopenfile(a.fileno(), b.fileno())
    except (OSError, ValueError):
        return False


def stdout_is_taken() -> tuple[bool, bool]:
    """Returns whether an output file has stdout for itself, and whether that is where stderr goes."""
    alone = _alone.get()
    return alone is not None, alone is not None and alone.on_stderr


def json_text(data: Any) -> str:
    """Returns data as standard JSON."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write(option: str, file: str, text: str) -> None:
    """Writes the output file of an option; - is stdout."""
    alone = _alone.get()
    if file == STDOUT and alone is not None:
        alone.texts.append(text)
    else:
        save(option, file, text.encode())


def save(option: str, file: str, data: bytes) -> None:
    """Writes a file whole or not at all. Raises BadInputError if it cannot be written."""
    try:
        write_file(Path(file), data)
    except OSError as error:
        raise BadInputError(f"{option} {file!r}: {error.strerror}") from None
