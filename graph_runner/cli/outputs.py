"""The output files of commands, and stdout where it is one of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from graph_runner.base.errors import BadInputError
from graph_runner.base.files import STDOUT, write_file
from graph_runner.cli.failures import told
from quant.errors import UserError

_kept: ContextVar[int | None] = ContextVar("the number of stdout, where it is for an output file alone", default=None)


def json_text(data: Any) -> str:
    """Returns data as standard JSON."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


@contextmanager
def stdout_apart() -> Iterator[None]:
    """Until the context ends stdout is for `write` alone. Whatever else is printed there, by a kernel, a device, a
    library or a child process, goes to stderr."""
    stdout = sys.stdout
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout, token = sys.stderr, _kept.set(kept)
    try:
        yield
    finally:
        sys.stdout = stdout
        _kept.reset(token)
        os.dup2(kept, 1)
        os.close(kept)


def is_seen_with_stderr() -> bool:
    """Whether an output file named - goes to the same terminal or file as stderr."""
    try:
        return os.path.sameopenfile(_kept.get() or sys.stdout.fileno(), sys.stderr.fileno())
    except (OSError, ValueError):
        return False


def write(option: str, file: str, text: str) -> None:
    """Writes the output file of an option; - is stdout. Raises OSError if stdout cannot be written, BadInputError if a
    file cannot."""
    if file != STDOUT:
        save(option, file, text.encode())
        return
    data = memoryview(text.encode(errors="replace"))
    while data:
        data = data[os.write(_kept.get() or 1, data) :]


def save(option: str, file: str, data: bytes) -> None:
    """Writes a file whole or not at all. Raises BadInputError if it cannot be written."""
    try:
        write_file(Path(file), data)
    except OSError as error:
        raise BadInputError(f"{option} {file!r}: {error.strerror}") from None


def delivered(passed: bool, *outputs: Callable[[], object]) -> int:
    """Makes the outputs of a command in order: each also if one before it cannot be written, which is told in a line.
    Returns the exit code: 1 if the result has not passed, whatever was written; else 2 if something was not, else 0.
    Raises BrokenPipeError, at the end, if nobody reads stdout."""
    code, broken = 0 if passed else 1, None
    for output in outputs:
        try:
            output()
        except BrokenPipeError as error:
            broken = error
        except (UserError, OSError) as error:
            bad_input = told(error)
            code = code or bad_input
    if broken is not None:
        raise broken
    return code
