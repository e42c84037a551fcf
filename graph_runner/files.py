"""Files that are written: never over what is read, and whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from graph_runner.endings import undone
from graph_runner.errors import BadInputError

STDOUT = "-"


def check_outputs(outputs: Mapping[str, str | None], inputs: Mapping[str, Iterable[str | Path]] | None = None) -> None:
    """Raises BadInputError, before anything is done, where a file cannot be written, is written twice or is read.

    outputs  the file of each option that writes one; "-" is stdout, None is none
    inputs   the files of each option that reads some
    """
    written: dict[str, Path] = {}
    for option, file in outputs.items():
        if file is None:
            continue
        path = Path(file)
        for other, before in written.items():
            if _same(path, before):
                raise BadInputError(f"{option} {file!r}: {other} writes there")
        written[option] = path
        if file == STDOUT:
            continue
        if path.is_dir():
            raise BadInputError(f"{option} {file!r}: is a directory")
        if not path.parent.is_dir():
            raise BadInputError(f"{option} {file!r}: no such directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadInputError(f"{option} {file!r}: may not be written")
        for other, files in (inputs or {}).items():
            if any(_same(path, Path(each)) for each in files):
                raise BadInputError(f"{option} {file!r}: is what {other} reads")


def check_folders(folders: Mapping[str, str | None], inputs: Mapping[str, Iterable[str | Path]]) -> None:
    """Raises BadInputError where a folder that traces of nodes go to, by option, holds a file of such a name that is
    read."""
    for option, folder in folders.items():
        for other, files in inputs.items():
            for file in map(Path, files):
                if folder is not None and file.match("[0-9]*-[0-9]*-*.gguf") and _same(file.parent, Path(folder)):
                    raise BadInputError(f"{option} {folder!r}: a trace could be written over what {other} reads")


def _same(a: Path, b: Path) -> bool:
    """Whether two paths are one file, be it by a link, or will be one."""
    try:
        return a.samefile(b)
    except OSError:
        return a.resolve() == b.resolve()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, to be written: it takes its place when the context ends, and goes where that fails."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    partial = Path(name)
    with undone(lambda: partial.unlink(missing_ok=True)):
        os.fchmod(handle, _mode(path))
        os.close(handle)
        yield partial
        partial.replace(path)


def _mode(path: Path) -> int:
    """Permissions of a file, or those that a new one gets."""
    with suppress(OSError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        path.write_bytes(data)
    else:
        with replacing(path) as partial:
            partial.write_bytes(data)
