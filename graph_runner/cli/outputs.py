"""Files that commands write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from graph_runner.errors import BadInputError


def check_outputs(files: dict[str, str | None]) -> None:
    """Files to write, by option: each in a folder that exists, no two the same."""
    seen: dict[Path, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        path = Path(file).resolve()
        if path in seen:
            raise BadInputError(f"{option} {file!r}: {seen[path]} writes there")
        seen[path] = option
        if file == "-":
            continue
        if path.is_dir():
            raise BadInputError(f"{option} {file!r}: is a directory")
        if not path.parent.is_dir():
            raise BadInputError(f"{option} {file!r}: no such directory")


def json_text(data: dict[str, Any]) -> str:
    """Data as standard JSON."""
    """Data as standard JSON."""
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def write(option: str, file: str, text: str) -> None:
    """Writes what an option asks for; - is stdout."""
    """Writes what an option asks for; - is stdout."""
    if file == "-":
        sys.stdout.write(text)
    else:
        save(option, file, text.encode())


def save(option: str, file: str, data: bytes) -> None:
    """Writes a file whole or not at all."""
    """Writes a file whole or not at all."""
    path = Path(file)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
            path.write_bytes(data)
        else:
            partial = path.with_name(path.name + ".part")
            partial.write_bytes(data)
            partial.replace(path)
    except OSError as error:
        raise BadInputError(f"{option} {file!r}: {error.strerror}") from None
