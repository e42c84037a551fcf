"""Folders of built files that are kept: sealed with the size and checksum of each file, so that damage is noticed."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

_SEAL = "contents.json"


def seal(folder: Path) -> None:
    """Writes down what a folder holds, in a file of the folder itself."""
    contents = {path.name: _contents(path) for path in sorted(folder.iterdir()) if path.name != _SEAL}
    (folder / _SEAL).write_text(json.dumps(contents, indent=1))


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder: a file's name and how it differs; None if nothing is."""
    try:
        contents = json.loads((folder / _SEAL).read_text())
        for name, expected in contents.items():
            if _contents(folder / name) != expected:
                return f"{name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"{_SEAL} cannot be read: {type(error).__name__}"
    return None


def say_damaged(what: str) -> None:
    """Says on stderr that something that was kept is made again."""
    print(f"ggml-npu: {what}: made anew", file=sys.stderr)


def _contents(path: Path) -> list[str | int]:
    """A link's target, or a file's size and checksum."""
    if path.is_symlink():
        return [str(path.readlink())]
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
