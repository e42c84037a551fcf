"""llama-cpp-python, which is an extra: a ggml may be another package's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from quant.errors import UserError

_MISSING = "llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'"
_PACKAGE = "LLAMA_CPP_PACKAGE"  # the folder of another environment's package llama_cpp


FUNCTIONS = "llama_cpp.llama_cpp"  # the module


def functions() -> Any:
    """The module llama_cpp.llama_cpp: llama.cpp's functions, by their C names. LLAMA_CPP_PACKAGE is the folder of the
    package if it is another environment's. Raises UserError where it is not installed, or cannot be imported."""
    known = sys.modules.get(FUNCTIONS)
    if known is not None:
        return known
    try:
        with _alone("llama_cpp"):
            from llama_cpp import llama_cpp
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp"
        said = " ".join(str(error).split())
        raise UserError(_MISSING if missing else f"llama-cpp-python cannot be imported: {said}") from None
    return llama_cpp


@contextmanager
def _alone(package: str) -> Iterator[None]:
    """Lets modules of a package be imported without the package itself, which imports much that nobody here needs:
    templates of chats, a cache, a server. Whoever imports it later gets it whole, with these modules in it."""
    if package in sys.modules:
        yield
        return
    folder = os.environ.get(_PACKAGE)
    if folder:
        spec = spec_from_file_location(package, Path(folder) / "__init__.py", submodule_search_locations=[folder])
    else:
        spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(name=package)
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    except BaseException:
        del sys.modules[package]
        raise
    if not folder:  # of another environment there is nothing more
        del sys.modules[package]


def version() -> str:
    """The version of llama-cpp-python. Raises UserError where it is not installed."""
    from importlib import metadata  # late: it takes as long as a tenth of the rest of a start

    folder = os.environ.get(_PACKAGE)
    try:
        if folder:
            return next(iter(metadata.distributions(name="llama-cpp-python", path=[str(Path(folder).parent)]))).version
        return metadata.version("llama-cpp-python")
    except (metadata.PackageNotFoundError, StopIteration):
        raise UserError(_MISSING) from None
