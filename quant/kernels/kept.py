"""What is built once and kept: files sealed with a checksum, and folders with the sizes and checksums of their files.
Damage is noticed before anything of it is used."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import xxhash

from quant import folders

_SEAL = "contents.json"
_CHECKSUM = 16  # bytes of xxh3-128


class DamagedError(Exception):
    """A file does not hold what was written; the message says so."""


def sealed(content: bytes) -> bytes:
    """What a file holds for `unsealed`: the content, and then its checksum."""
    return content + xxhash.xxh3_128_digest(content)


def unsealed(path: Path) -> bytes:
    """The content of a sealed file. Raises DamagedError if it is another one or can be another user's, and OSError."""
    with path.open("rb") as file:
        if not folders.is_ours(file.fileno()):
            raise DamagedError("can be another user's")
        content = file.read()
    content, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
    if xxhash.xxh3_128_digest(content) != checksum:
        raise DamagedError("is damaged")
    return content


def write_sealed(path: Path, content: bytes) -> None:
    """Writes a sealed file, all of it or nothing. Raises OSError."""
    with folders.partial_file(path.parent) as (partial, handle):
        with open(handle, "wb", closefd=False) as file:
            file.write(sealed(content))
        partial.replace(path)


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
    import hashlib  # late: it loads OpenSSL

    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
