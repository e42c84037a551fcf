"""Folders for what is kept between runs, and for what is not: the user's own, and nobody else's.

What is kept is code (compiled kernels, a plugin, programs). So a folder in which somebody else could have put it is not
used. What a process that was killed left behind is known by its lock, which nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from quant.errors import UserError

_FOLDER = "ggml-npu-", ".tmp"  # how names of temporary folders begin and end
_FILE = ".ggml-npu-", ".part"  # and those of files that are not whole yet
_PRIVATE = 0o700
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class FolderError(UserError):
    """Nothing can be kept in a folder: one line that names it, says why, and which variable to set."""


def cache_root() -> Path:
    """The folder for all that is kept between runs: XDG_CACHE_HOME, or .cache in the user's home, and in it ggml-npu.
    Raises FolderError for a user without a home."""
    return _base() / "ggml-npu"


def kernels_root() -> Path:
    """The folder for what is kept of compiled kernels: NUMBA_CACHE_DIR, if set, or `cache_root`. Raises FolderError."""
    return Path(os.environ.get("NUMBA_CACHE_DIR") or cache_root())


def _base() -> Path:
    told = os.environ.get("XDG_CACHE_HOME", "").strip()
    if os.path.isabs(told):  # a relative one is to be ignored, says the XDG specification
        return Path(told)
    home = os.environ.get("HOME") or _home_of_the_user()
    if not home:
        raise FolderError(f"user {os.geteuid()} has no home; set XDG_CACHE_HOME to a folder")
    return Path(home, ".cache")


def _home_of_the_user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return ""


def kept(folder: Path) -> Path:
    """Makes a folder for what is kept, with all above it, for this user alone (mode 0700). Returns it.

    Raises FolderError if it cannot be made or written to, and if it, or a folder above it up to the one that a
    variable names, belongs to somebody else or can be written by others.
    """
    variable, top = _named_by_a_variable(folder)
    below = [each for each in (folder, *folder.parents) if each != top and each.is_relative_to(top)]
    remedy = f"set {variable} to a folder of your own"
    try:
        top.mkdir(_PRIVATE, parents=True, exist_ok=True)
        for each in (top, *reversed(below)):
            each.mkdir(_PRIVATE, exist_ok=True)
            why = _why_not(each.stat(), is_shared=each == top)
            if why is not None:
                raise FolderError(f"{str(each)!r} {why}; {remedy}")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FolderError(f"{str(folder)!r}: Permission denied; {remedy}")
    except OSError as error:
        raise FolderError(f"{str(folder)!r}: {error.strerror}; {remedy}") from None
    return folder


def _named_by_a_variable(folder: Path) -> tuple[str, Path]:
    """The variable that says where a folder is, and the folder that it names."""
    numba = os.environ.get("NUMBA_CACHE_DIR")
    if numba and folder.is_relative_to(numba):
        return "NUMBA_CACHE_DIR", Path(numba)
    with suppress(FolderError):
        if folder.is_relative_to(_base()):
            return "XDG_CACHE_HOME", _base()
    return "XDG_CACHE_HOME", folder


def _why_not(found: os.stat_result, *, is_shared: bool = False) -> str | None:
    """Why a file or folder may hold what somebody else wrote; None if it cannot.

    is_shared  whether it may be a folder like /tmp, in which nobody can replace what is another's
    """
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}"
    if found.st_mode & _OTHERS and not (is_shared and found.st_mode & stat.S_ISVTX):
        return "can be written by others"
    return None


def is_ours(file: int) -> bool:
    """Whether nobody else can have written the file with this descriptor."""
    return _why_not(os.fstat(file)) is None


def _is_locked(descriptor: int) -> bool:
    """Locks a file or folder until its descriptor is closed; False if somebody else has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def temporary_folder(inside: Path | None = None) -> Iterator[Path]:
    """Yields a folder, in the system's folder for temporary ones or inside another one, that is deleted at the end of
    the context. If the process is killed before, `tidy` deletes it."""
    tidy(inside)
    folder, descriptor = _made_and_locked(partial(_new_folder, inside))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def partial_file(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yields the path of a new file in a folder, and its descriptor. The file is deleted at the end of the context if
    it is still there; if the process is killed before, `tidy` deletes it. Raises OSError."""
    tidy(folder)
    path, descriptor = _made_and_locked(partial(tempfile.mkstemp, prefix=_FILE[0], suffix=_FILE[1], dir=folder))
    try:
        yield path, descriptor
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _new_folder(inside: Path | None) -> tuple[int, str]:
    name = tempfile.mkdtemp(prefix=_FOLDER[0], suffix=_FOLDER[1], dir=inside)
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY), name


def _made_and_locked(make: Callable[[], tuple[int, str]]) -> tuple[Path, int]:
    """What `make` makes, and its descriptor, locked. It is made again if `tidy` of another process took it for a stale
    one before it was locked."""
    while True:
        try:
            descriptor, name = make()
        except FileNotFoundError as error:
            if error.filename is None or not Path(error.filename).parent.is_dir():
                raise
            continue  # deleted between its making and its opening
        with suppress(OSError):  # on a file system without locks `tidy` deletes nothing
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.path.exists(name):
            return Path(name), descriptor
        os.close(descriptor)


def tidy(folder: Path | None = None) -> None:
    """Deletes what killed processes of this user left in a folder: temporary folders and partial files that nobody has
    locked. None is the system's folder for temporary ones."""
    try:
        entries = [*os.scandir(tempfile.gettempdir() if folder is None else folder)]
    except OSError:
        return
    for entry in entries:
        if any(entry.name.startswith(begin) and entry.name.endswith(end) for begin, end in (_FOLDER, _FILE)):
            with suppress(OSError):
                _delete_if_stale(entry)


def _delete_if_stale(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink() or entry.stat(follow_symlinks=False).st_uid != os.geteuid():
        return
    is_folder = entry.is_dir(follow_symlinks=False)
    descriptor = os.open(entry.path, os.O_NOFOLLOW | (os.O_DIRECTORY if is_folder else os.O_RDWR))
    try:
        if _is_locked(descriptor):
            shutil.rmtree(entry.path, ignore_errors=True) if is_folder else os.unlink(entry.path)
    finally:
        os.close(descriptor)


def tidy_all() -> None:
    """`tidy` for the system's temporary folder and for the folders of what is kept."""
    tidy()
    with suppress(FolderError, OSError):
        root = cache_root()
        for folder in (root, *root.glob("*/"), *root.glob("*/*/")):
            tidy(folder)
