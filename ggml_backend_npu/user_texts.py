"""A user's paths and texts: prompts, profiles, tolerances. A text may come out of a pipe, which is not waited for for
ever."""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LONGEST = 1 << 26
"""Bytes of the longest text that is read."""

_PATIENCE = 10.0  # seconds that a pipe may be silent
_DEEPEST = 100  # tables and arrays within each other


_KINDS = {
    stat.S_IFDIR: "is a directory",
    stat.S_IFIFO: "is a pipe, and must be a file",
    stat.S_IFCHR: "is a device, and must be a file",
    stat.S_IFBLK: "is a device, and must be a file",
    stat.S_IFSOCK: "is a socket, and must be a file",
}


class TextError(Exception):
    """A text that cannot be used: the message says why, without the file's name."""


def read_text(path: Path) -> str:
    """The text of a file, in UTF-8, with its line ends as \\n. A pipe is read to its end.

    Raises TextError for a file that cannot be read or has more than LONGEST bytes, and for a pipe that stays silent for
    10 seconds; UnicodeDecodeError.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(LONGEST + 1) if is_regular else b"".join(_pieces(file.fileno()))
    except OSError as error:
        raise TextError(error.strerror or str(error)) from None
    if len(data) > LONGEST:
        raise TextError(f"has more than {LONGEST:,} bytes")
    return data.decode().replace("\r\n", "\n").replace("\r", "\n")


def _pieces(file: int) -> Iterator[bytes]:
    """Yields what comes out of a pipe or a device, up to its end, or until it is too much."""
    is_pipe, is_terminal = stat.S_ISFIFO(os.fstat(file).st_mode), os.isatty(file)
    size, heard = 0, time.monotonic()
    while size <= LONGEST:
        try:
            piece = os.read(file, 1 << 20)
        except BlockingIOError:
            piece = None
        if piece:
            yield piece
            size, heard = size + len(piece), time.monotonic()
        elif piece is not None and (size or not is_pipe):  # before anybody writes, a pipe seems to end
            return
        elif not is_terminal and time.monotonic() - heard > _PATIENCE:
            raise TextError(f"is a pipe, and nothing came out of it for {_PATIENCE:g} s")
        elif piece is None:
            select.select([file], [], [], 0.1)
        else:
            time.sleep(0.01)


def read_toml(text: str) -> dict[str, Any]:
    """The data of a TOML document. Raises TextError for what is nested more than 100 deep, and ValueError for what is
    no TOML: a TOMLDecodeError, or of a number with thousands of digits."""
    import tomllib  # late, as it is slow

    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise TextError("is nested too deeply") from None
    level: list[Any] = [data]
    for _ in range(_DEEPEST):
        parts = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [value for part in parts for value in part]
    if level:
        raise TextError("is nested too deeply")
    return data


def no_file(path: Path) -> str:
    """Why a path that is no file is none."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "is no file")
    except FileNotFoundError:
        return "no such file"
    except OSError as error:
        return error.strerror or "no such file"
