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
from tempfile import TemporaryFile
from typing import Any

import numba
import platformdirs
from numba.core.caching import FunctionCache, IndexDataCacheFile

from quant.kernels.kept import say_damaged
from quant.kernels.processor import lanes


def cache_directory() -> Path:
    """The folder of compiled kernels: one for each content of the modules that hold kernels, and for each value of
    `lanes`.

    numba notices a change only in the file of the cached function, not in those of the functions it calls; a folder
    named by all their sources cannot go stale. `NUMBA_CACHE_DIR`, where set, replaces the user's cache directory.
    """
    return _directory(lanes())


@functools.cache
def _directory(n_lanes: int) -> Path:
    root = os.environ.get("NUMBA_CACHE_DIR") or platformdirs.user_cache_dir("ggml-npu")
    root_of_sources = Path(__file__).resolve().parents[2]
    sources = sorted(path for name in ("quant", "ggml_backend_npu") for path in (root_of_sources / name).rglob("*.py"))
    digest = hashlib.sha256(bytes([n_lanes]))
    for text in (source.read_bytes() for source in sources):
        if b"quant.kernels.jit" in text or b"@intrinsic" in text:
            digest.update(text)
    return Path(root) / f"kernels-{digest.hexdigest()[:16]}"


def is_kept() -> bool:
    """Whether `cache_directory` can be written to. Where it cannot, numba would choose another folder by itself."""
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=cache_directory()).close()
    except OSError:
        return False
    return True


@contextmanager
def own_cache() -> Iterator[None]:
    """numba keeps what it compiles in `cache_directory` until the context ends."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_directory())
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


class _DamagedError(Exception):
    """A file of the cache does not hold what was written."""


class _Files(IndexDataCacheFile):
    """A function's files in the cache, each with its checksum in front: LLVM aborts on a damaged file."""

    said = False

    def load(self, key: Any) -> Any:
        try:
            return super().load(key)
        except _DamagedError:
            if not _Files.said:
                _Files.said = True
                say_damaged(f"a compiled kernel in {self._cache_path} is damaged")
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
        with self._open_for_write(path) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def _read(self, path: str) -> Any:
        content = Path(path).read_bytes()
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() != content[:size]:
            raise _DamagedError(path)
        return pickle.loads(content[size:])

    def save(self, key: Any, data: Any) -> None:
        try:
            super().save(key, data)
        except _DamagedError:
            self.flush()
            super().save(key, data)


class Cache(FunctionCache):
    """numba's cache of one function, with checked files. Where the folder cannot be written to, nothing is kept."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        """Without numba's hash of the function and of what it is a closure of: the folder says what the sources are."""
        return signature, codegen.magic_tuple()

    def save_overload(self, signature: Any, data: Any) -> None:
        """As numba's; where the file cannot be written, says so once on stderr instead of raising."""
        try:
            super().save_overload(signature, data)
        except OSError as error:
            if not _Files.said:
                _Files.said = True
                print(f"ggml-npu: kernels are not kept: {cache_directory()}: {error.strerror}", file=sys.stderr)
