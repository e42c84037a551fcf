"""The output files of commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from graph_runner.base.errors import BadInputError
from graph_runner.base.files import STDOUT, write_file


def json_text(data: Any) -> str:
    """Returns data as standard JSON."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write(option: str, file: str, text: str) -> None:
    """Writes the output file of an option; - is stdout."""
    if file == STDOUT:
        sys.stdout.write(text)
    else:
        save(option, file, text.encode())


def save(option: str, file: str, data: bytes) -> None:
    """Writes a file whole or not at all. Raises BadInputError if it cannot be written."""
    try:
        write_file(Path(file), data)
    except OSError as error:
        raise BadInputError(f"{option} {file!r}: {error.strerror}") from None
