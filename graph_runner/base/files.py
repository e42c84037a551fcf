"""Output files: never written over an input, and written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from graph_runner.base.endings import undone
from graph_runner.base.errors import BadInputError
from quant import folders

STDOUT = "-"


def check_outputs(outputs: Mapping[str, str | None], inputs: Mapping[str, Iterable[str | Path]] | None = None) -> None:
    """Raises BadInputError, before anything is done, if a file cannot be written, is written twice or is also read.

    outputs  the output file of each option; "-" is stdout, None is no file
    inputs   the input files of each option
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
        for other, files in (inputs or {}).items():
            if any(_same(path, Path(each)) for each in files):
                raise BadInputError(f"{option} {file!r}: is what {other} reads")
        if path.is_dir():
            raise BadInputError(f"{option} {file!r}: is a directory")
        if not path.parent.is_dir():
            raise BadInputError(f"{option} {file!r}: no such directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BadInputError(f"{option} {file!r}: may not be written")


def check_folders(folders: Mapping[str, str | None], inputs: Mapping[str, Iterable[str | Path]]) -> None:
    """Raises BadInputError if an input file lies in a folder for traces and has the name of such a trace.

    folders  the folder for traces of each option, or None
    inputs   the input files of each option
    """
    for option, folder in folders.items():
        for other, files in inputs.items():
            for file in map(Path, files):
                if folder is not None and file.match("[0-9]*-[0-9]*-*.gguf") and _same(file.parent, Path(folder)):
                    raise BadInputError(f"{option} {folder!r}: a trace could be written over what {other} reads")


def parts_of(file: Path) -> list[Path]:
    """Returns the files that are read where this one is: all parts of a model that was split, whose names llama.cpp
    takes from that of the first (m-00001-of-00003.gguf), or itself."""
    found = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file.name, re.DOTALL)
    if found is None:
        return [file]
    names = (f"{found[1]}-{number:05}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1))
    return [file, *(file.with_name(name) for name in names if name != file.name)]


def _same(a: Path, b: Path) -> bool:
    """Whether two paths are the same file, even by a link, or will be."""
    try:
        return a.samefile(b)
    except OSError:
        return a.resolve() == b.resolve()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a new file beside `path`, to be written. It replaces `path` at the end of the context, or is deleted on an
    error."""
    path = path.resolve()
    with folders.partial_file(path.parent) as (partial, handle), undone(lambda: partial.unlink(missing_ok=True)):
        os.fchmod(handle, _mode(path))
        yield partial
        partial.replace(path)


def folder_for_traces(folder: Path) -> Path:
    """Returns a folder; makes it if it is in the user's cache directory. Raises FolderError if that cannot be done, or
    if others could have made it."""
    try:
        is_kept = folder.is_relative_to(folders.cache_root())
    except folders.FolderError:
        is_kept = False
    return folders.kept(folder) if is_kept else folder


def _mode(path: Path) -> int:
    """Returns the permissions of a file, or those that a new file gets."""
    with suppress(OSError):
        return path.stat().st_mode & 0o777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all. A pipe or device is written to directly. Raises OSError."""
    if path.exists() and not path.is_file():  # a pipe or a device is written to, not replaced
        path.write_bytes(data)
    else:
        with replacing(path) as partial:
            partial.write_bytes(data)
