"""Compiled kernels on disk: machine code that a later process loads without numba. Of most, a linker makes a shared
object, which is loaded without LLVM too."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from quant.folders import FolderError, temporary_folder
from quant.kernels.cache import kept_in
from quant.kernels.kept import DamagedError, say_damaged, unsealed, write_sealed
from quant.kernels.processor import release_of, target

SYMBOL = "kernel"  # the name of the function in its object file

_C_TYPES: dict[str, Any] = {
    "void": None,
    "boolean": ctypes.c_bool,
    "uint8": ctypes.c_uint8,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "intp": ctypes.c_ssize_t,
}


def prototype(names: tuple[str, ...]) -> Callable[[int], Callable[..., Any]]:
    """Makes of the address of a C function one that Python calls. names: of its types, as in `Signature.names`."""
    result, *arguments = (_C_TYPES[name] for name in names)
    return ctypes.CFUNCTYPE(result, *arguments)


@dataclass(frozen=True)
class Loaded:
    """A function in memory: its address, and what has to live as long as it."""

    address: int
    owner: object


@functools.cache
def linker() -> str | None:
    """The path of the C compiler that links kernels: CC, or cc; None if there is none."""
    return shutil.which(os.environ.get("CC") or "cc")


def how_kept() -> str:
    """How compiled kernels are kept here, in words."""
    command = linker()
    if command is None:
        return "for LLVM: no C compiler (CC, or cc) links them, so each process takes 80 MB more"
    return f"as shared objects, linked by {command}"


@functools.cache
def _made_by() -> str:
    """What else decides which code is made of a kernel."""
    return f"{release_of('numba')} {release_of('llvmlite')} {target()}"


class _Said:
    """Whether it was said that a kernel is made anew or cannot be kept."""

    yet = False


def _say_once(say: Callable[[str], None], what: str) -> None:
    if not _Said.yet:
        _Said.yet = True
        say(what)


class Kept:
    """Where a function is kept, or will be: in a shared object or, where none can be made, in an object file.

    names  of its types, as in `Signature.names`
    """

    def __init__(self, function: Callable[..., Any], names: tuple[str, ...]) -> None:
        name = f"{function.__module__}.{function.__qualname__}-{function.__code__.co_firstlineno}"
        digest = xxhash.xxh3_64_hexdigest(f"{names} {_made_by()}".encode())
        self._name = f"{name.replace('.<locals>', '')}-{digest}"

    def loaded(self) -> Loaded | None:
        """The function, if it is kept. Says so on stderr if a file is damaged, or can be another user's."""
        try:
            folder = kept_in()
        except FolderError:
            return None
        for suffix, load in (".so", _shared), (".o", _in_memory):
            path = folder / f"{self._name}{suffix}"
            try:
                return load(path, unsealed(path))
            except FileNotFoundError:
                continue
            except (DamagedError, OSError) as error:
                _say_once(say_damaged, f"a compiled kernel, {str(path)!r}, {error}")
        return None

    def keep(self, code: bytes) -> Loaded:
        """Loads the function of an object file, and keeps it if that is possible. Says on stderr if it cannot be
        written."""
        path = Path(f"{self._name}.o")
        try:
            path = kept_in() / path
            return _linked(path.with_suffix(".so"), code) or _written(path, code)
        except FolderError:
            pass
        except OSError as error:
            _say_once(_say_not_kept, f"{path.parent}: {error.strerror}")
        return _in_memory(path, code)


def _say_not_kept(why: str) -> None:
    print(f"ggml-npu: kernels are not kept: {why}", file=sys.stderr)


def _linked(path: Path, code: bytes) -> Loaded | None:
    """Links an object file and loads what comes of it. None: there is no linker, the code needs what neither C's
    library nor its mathematics have, or the folder may hold no programs. Raises OSError."""
    import subprocess  # late, as it is slow

    command = linker()
    if command is None:
        return None
    with temporary_folder() as folder:
        made, source = folder / "kernel.so", folder / "kernel.o"
        source.write_bytes(code)
        words: list[str | Path] = [command, "-shared", "-nostdlib", "-Wl,-z,defs,-Bsymbolic,-s", "-o", made, source]
        words += ["-lm", "-lc"]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            return None
        write_sealed(path, made.read_bytes())
    try:
        return _shared(path, code)
    except OSError:
        path.unlink(missing_ok=True)
        return None


def _written(path: Path, code: bytes) -> Loaded:
    write_sealed(path, code)
    return _in_memory(path, code)


def _shared(path: Path, _: bytes) -> Loaded:
    library = ctypes.CDLL(str(path))
    return Loaded(ctypes.cast(getattr(library, SYMBOL), ctypes.c_void_p).value or 0, library)


def _in_memory(_: Path, code: bytes) -> Loaded:
    from quant.kernels import llvm  # late: it imports LLVM

    return Loaded(*llvm.loaded(code, SYMBOL))
