"""Errors that a user can cause, in all packages: one base class, which commands print as one line."""

from __future__ import annotations

import re
import sys

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOT_UTF8 = re.compile(r"[\udc80-\udcff]")  # bytes of a path, as os.fsdecode has them


class UserError(Exception):
    """Something that a user gave cannot be used: one line that says what, with its value, and why."""


def printable(text: str) -> str:
    """The text with control characters, but for tabs and line ends, written as escapes: \\x1b; and so are bytes that
    are no UTF-8."""
    return encodable(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text))


def encodable(text: str) -> str:
    """The text with bytes of a path that are no UTF-8 written as escapes: \\xe9."""
    return _NOT_UTF8.sub(lambda found: f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def say(text: str) -> None:
    """Prints a text on stderr, in one line, as the command's."""
    print(printable(f"ggml-npu: {' '.join(text.split())}"), file=sys.stderr)
