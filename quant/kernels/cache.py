"""The cache of compiled kernels: numba's own, in a folder that cannot go stale, with files that are checked."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from quant import folders
from quant.kernels.kept import say_damaged
from quant.kernels.processor import lanes

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quant", "ggml_backend_npu")  # what a kernel is made of, and what it is compiled by


def cache_directory() -> Path:
    """The folder of compiled kernels: one for each content of the packages that kernels are made of, and for each value
    of `lanes`.

    numba notices a change only in the file of the cached function, not in those of the functions it calls; a folder
    named by all the sources cannot go stale. `NUMBA_CACHE_DIR`, if set, replaces the user's cache directory. Raises
    FolderError for a user without a home.
    """
    root = os.environ.get("NUMBA_CACHE_DIR") or folders.cache_root()
    return Path(root) / f"kernels-{sources(*PACKAGES, salt=bytes([lanes()]))[:16]}"


@functools.cache
def sources(*packages: str, salt: bytes = b"", root: Path = ROOT) -> str:
    """A digest of all sources of packages of this project, which lie in a folder."""
    digest = hashlib.sha256(salt)
    for source in sorted(path for name in packages for path in (root / name).rglob("*.py")):
        digest.update(f"{source.relative_to(root)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def kept_in() -> Path:
    """`cache_directory`, made if it is missing. Raises FolderError if nothing can be kept in it."""
    return folders.kept(cache_directory())


@contextmanager
def own_cache() -> Iterator[str | None]:
    """numba keeps what it compiles in `cache_directory` until the context ends. Yields why it cannot, or None."""
    before, why = numba.config.CACHE_DIR, None
    try:
        numba.config.CACHE_DIR = str(kept_in())
    except folders.FolderError as error:
        why = str(error)
    try:
        yield why
    finally:
        numba.config.CACHE_DIR = before


class _DamagedError(Exception):
    """A file of the cache does not hold what was written; the message says so."""


class _Files(IndexDataCacheFile):
    """A function's files in the cache, each with its checksum in front: LLVM aborts on a damaged file."""

    said = False

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except _DamagedError as error:
            if not _Files.said:
                _Files.said = True
                say_damaged(f"a compiled kernel in {self._cache_path} {error}")
            return None

    def _load_index(self) -> Any:
        try:
            version, stamp, overloads = self._read(self._index_path)
        except OSError:
            return {}
        return overloads if (version, stamp) == (self._version, self._source_stamp) else {}

    def _save_index(self, overloads: Any) -> None:
        self._write(self._index_path, (self._version, self._source_stamp, overloads))

    def _load_data(self, name: str) -> Any:
        return self._read(self._data_path(name))

    def _save_data(self, name: str, data: Any) -> None:
        self._write(self._data_path(name), data)

    def _write(self, path: str, data: Any) -> None:
        content = self._dump(data)
        with folders.partial_file(Path(self._cache_path)) as (partial, handle):
            with open(handle, "wb", closefd=False) as file:
                file.write(hashlib.sha256(content).digest() + content)
            partial.replace(path)

    def _read(self, path: str) -> Any:
        with open(path, "rb") as file:
            if not folders.is_ours(file.fileno()):
                raise _DamagedError("can be another user's")
            content = file.read()
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() != content[:size]:
            raise _DamagedError("is damaged")
        return pickle.loads(content[size:])

    def save(self, key: Any, data: Any) -> None:
        try:
            super().save(key, data)
        except _DamagedError:
            self.flush()
            super().save(key, data)


class Cache(FunctionCache):
    """numba's cache of one function, with checked files. If the folder cannot be written to, nothing is kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        """Without numba's hash of the function and of what it is a closure of: the folder says what the sources are."""
        return signature, codegen.magic_tuple()

    def save_overload(self, signature: Any, data: Any) -> None:
        """As numba's; if the file cannot be written, says so once on stderr instead of raising."""
        try:
            super().save_overload(signature, data)
        except OSError as error:
            if not _Files.said:
                _Files.said = True
                print(f"ggml-npu: kernels are not kept: {cache_directory()}: {error.strerror}", file=sys.stderr)
