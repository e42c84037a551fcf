"""llama-cpp-python, which is an extra: a ggml may be another package's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec
from typing import Any

from quant.errors import UserError

_MISSING = "llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'"


FUNCTIONS = "llama_cpp.llama_cpp"  # the module


def functions() -> Any:
    """The module llama_cpp.llama_cpp: llama.cpp's functions, by their C names. Raises UserError where it is not
    installed, or cannot be imported."""
    known = sys.modules.get(FUNCTIONS)
    if known is not None:
        return known
    try:
        with _alone("llama_cpp"):
            from llama_cpp import llama_cpp
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp"
        raise UserError(_MISSING if missing else f"llama-cpp-python cannot be imported: {error}") from None
    return llama_cpp


@contextmanager
def _alone(package: str) -> Iterator[None]:
    """Lets modules of a package be imported without the package itself, which imports much that nobody here needs:
    templates of chats, a cache, a server. Whoever imports it later gets it whole, with these modules in it."""
    if package in sys.modules:
        yield
        return
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(name=package)
    sys.modules[package] = module_from_spec(spec)
    try:
        yield
    finally:
        del sys.modules[package]


def version() -> str:
    """The version of llama-cpp-python. Raises UserError where it is not installed."""
    from importlib import metadata  # late: it takes as long as a tenth of the rest of a start

    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        raise UserError(_MISSING) from None
