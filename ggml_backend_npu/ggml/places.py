"""Finds a ggml that is not llama-cpp-python's: in another Python package, in a library, in a running program.

A package may hold several copies of ggml's libraries and load one of them: it is imported, and then searched for what
it has loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from ggml_backend_npu.ggml import structs
from ggml_backend_npu.user_texts import no_file
from quant.errors import UserError

if TYPE_CHECKING:
    from importlib import metadata

_REGISTERS = "ggml_backend_register"


class PlaceError(UserError):
    """A package or library without a ggml that a device can be registered with: one line that says why."""


def library_of(where: str | os.PathLike[str]) -> ctypes.CDLL:
    """The loaded library that exports the ggml of a Python package, by name, or of a library, by path.

    Raises PlaceError.
    """
    path = Path(where)
    if path.suffix == ".so" or len(path.parts) > 1 or ".so." in path.name:
        return _at(path)
    found = distribution(str(where))
    if found is None:
        raise PlaceError(f"into={str(where)!r}: no such package is installed, and no library has this path")
    _import_all(str(where), found)
    own = {os.path.realpath(str(file.locate())) for file in found.files or ()}
    if found.name == "llama_cpp_python" and (folder := os.environ.get("LLAMA_CPP_LIB_PATH")):
        own |= {os.path.realpath(file) for file in Path(folder).glob("*.so*")}
    libraries = [file for file in loaded() if str(file) in own]
    for file in libraries:
        library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD)
        if hasattr(library, _REGISTERS):
            return library
    names = ", ".join(file.name for file in libraries) or "it has loaded none"
    raise PlaceError(f"into={str(where)!r}: none of its libraries exports ggml's functions ({names})")


def _at(path: Path) -> ctypes.CDLL:
    if not path.is_file():
        raise PlaceError(f"into={str(path)!r}: {no_file(path)}")
    try:
        library = ctypes.CDLL(os.path.realpath(path))
    except OSError as error:
        raise PlaceError(f"into={str(path)!r}: cannot be loaded: {error}") from None
    if not hasattr(library, _REGISTERS):
        raise PlaceError(f"into={str(path)!r}: does not export ggml's functions, and no library does that it needs")
    registry, base = (file_at(ctypes.cast(library[name], ctypes.c_void_p)) for name in (_REGISTERS, "ggml_version"))
    if registry.parent != base.parent:
        raise PlaceError(
            f"into={str(path)!r}: this process had {base} before, which stands in for its own: "
            "load it before ggml_backend_npu is imported"
        )
    return library


def file_at(address: ctypes.c_void_p) -> Path:
    """The file that the code at an address was loaded from."""
    place = structs.Place()
    ctypes.CDLL(None).dladdr(address, ctypes.byref(place))
    return Path(os.fsdecode(place.file or b""))


def distribution(name: str) -> metadata.Distribution | None:
    """The installed distribution of this name, or the one that has a module of this name; None where there is none."""
    from importlib import metadata  # late here and below, as it is slow

    for known in (name, *metadata.packages_distributions().get(name, [])):
        with suppress(metadata.PackageNotFoundError):
            return metadata.distribution(known)
    return None


def _import_all(name: str, found: metadata.Distribution) -> None:
    """Imports a package and its extension modules, and so loads the libraries that it uses."""
    extensions = {
        str(file).removesuffix(suffix).replace("/", ".")
        for file in found.files or ()
        for suffix in EXTENSION_SUFFIXES
        if str(file).endswith(suffix) and not file.name.startswith("lib")
    }
    from importlib import metadata

    its_own = {module for module, names in metadata.packages_distributions().items() if found.name in names}
    for module in (name.replace("-", "_"), *sorted(its_own | extensions)):
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)


def loaded(pid: int | None = None) -> list[Path]:
    """The files that are mapped as code into this process, or into another one. Raises OSError where that is not
    allowed."""
    maps = os.fsdecode(Path(f"/proc/{'self' if pid is None else pid}/maps").read_bytes())
    lines = [line.split(maxsplit=5) for line in maps.split("\n")]
    files = dict.fromkeys(line[5] for line in lines if len(line) == 6 and "x" in line[1])
    return [Path(file) for file in files if file.startswith("/")]


def already_loaded() -> ctypes.CDLL | None:
    """The library of a ggml that this process has loaded; None where it has none."""
    for file in loaded():
        if "ggml" in file.name:
            with suppress(OSError):  # a program, or what is mapped as data
                library = ctypes.CDLL(str(file), mode=os.RTLD_NOLOAD)
                if hasattr(library, _REGISTERS):
                    return library
    return None


def has_ggml(file: Path) -> bool:
    """Whether a file's bytes contain the name ggml_backend_register: it defines or calls that function."""
    with suppress(OSError):
        return _REGISTERS.encode() in file.read_bytes()
    return False


def packages() -> list[str]:
    """Names of the installed distributions that hold a shared library with a ggml."""
    from importlib import metadata

    names = []
    for found in metadata.distributions():
        libraries = [file for file in found.files or () if ".so" in file.name and found.name not in names]
        if any(has_ggml(Path(str(file.locate()))) for file in libraries):
            names.append(found.name)
    return sorted(names)
