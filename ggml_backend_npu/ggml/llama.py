"""llama-cpp-python, which is an extra: a ggml may be another package's."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from quant.errors import UserError

_MISSING = "llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'"


def functions() -> Any:
    """The module llama_cpp.llama_cpp: llama.cpp's functions, by their C names. Raises UserError where it is not
    installed, or cannot be imported."""
    try:
        from llama_cpp import llama_cpp
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp"
        raise UserError(_MISSING if missing else f"llama-cpp-python cannot be imported: {error}") from None
    return llama_cpp


def version() -> str:
    """The version of llama-cpp-python. Raises UserError where it is not installed."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        raise UserError(_MISSING) from None
