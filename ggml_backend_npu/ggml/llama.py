"""llama-cpp-python, which is an extra: a ggml may be another package's."""

from __future__ import annotations

import os
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from quant.errors import UserError

_MISSING = "llama-cpp-python is not installed: pip install 'ggml-backend-npu[llama]'"
_PACKAGE = "LLAMA_CPP_PACKAGE"  # the folder of another environment's package llama_cpp


def functions() -> Any:
    """The module llama_cpp.llama_cpp: llama.cpp's functions, by their C names. LLAMA_CPP_PACKAGE is the folder of the
    package if it is another environment's. Raises UserError where it is not installed, or cannot be imported."""
    try:
        if (folder := os.environ.get(_PACKAGE)) and "llama_cpp" not in sys.modules:
            _import_from(Path(folder))
        from llama_cpp import llama_cpp
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp"
        said = " ".join(str(error).split())
        raise UserError(_MISSING if missing else f"llama-cpp-python cannot be imported: {said}") from None
    return llama_cpp


def _import_from(folder: Path) -> None:
    """Imports the package in a folder, and nothing else that lies beside it."""
    spec = util.spec_from_file_location("llama_cpp", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules["llama_cpp"] = module = util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["llama_cpp"]
        raise


def version() -> str:
    """The version of llama-cpp-python. Raises UserError where it is not installed."""
    folder = os.environ.get(_PACKAGE)
    try:
        if folder:
            return next(iter(metadata.distributions(name="llama-cpp-python", path=[str(Path(folder).parent)]))).version
        return metadata.version("llama-cpp-python")
    except (metadata.PackageNotFoundError, StopIteration):
        raise UserError(_MISSING) from None
