"""The message and the exit code of a command that failed."""

from __future__ import annotations

import os
import re
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from graph_runner.base.errors import BlindError
from quant.errors import UserError, say

BAD_INPUT, OURS = 2, 3
VERBOSE = "GGML_NPU_VERBOSE"

UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # click's, of which typer may have a copy


def told(error: BaseException) -> int:
    """Prints on stderr, in one line, what went wrong; with GGML_NPU_VERBOSE also where. Returns the exit code."""
    with suppress(OSError):
        if os.environ.get(VERBOSE):
            traceback.print_exception(error)
        if isinstance(error, UserError):
            say(str(error))
        elif isinstance(error, UsageError):
            _say_usage(error)
        elif isinstance(error, OSError) and error.strerror:
            say(f"{error.filename or 'stdout or a file'}: {error.strerror}")
        elif isinstance(error, BlindError):
            say(str(error))
            return OURS
        else:
            say(f"internal error: {_where(error)}; --verbose shows the traceback")
            return OURS
    return BAD_INPUT


def _say_usage(error: Any) -> None:
    """Prints a usage error. Without a command, help was printed, and there is no message."""
    if message := usage(error):
        say(message if error.ctx is None else f"{message.rstrip('.')}; see {error.ctx.command_path} -h")


def usage(error: Any) -> str:
    """Returns the message of a usage error, in which the value is named."""
    return _with_value(error.format_message(), error.__cause__)


def _with_value(message: str, cause: Any) -> str:
    """Returns a message that names the value. Typer's newer versions have pydantic convert values: it says "Input"."""
    if not hasattr(cause, "errors"):
        return message
    value = repr(cause.errors()[0]["input"])
    message = re.sub(", unable to parse string as .*|Value error, ", "", message)
    return message.replace("Input should be", f"{value} is not", 1)


def _where(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name} line {frame.lineno})"
