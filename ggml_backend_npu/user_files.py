"""A user's Python files: they are programs, and run as such."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from ggml_backend_npu.ggml import modes


class _Uncached(SourceFileLoader):
    """Compiles a file each time: bytecode kept beside it would be stale after two edits within one second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def no_file(path: Path) -> str:
    """Why a path that is no file is none."""
    return "is a directory" if path.is_dir() else "no such file"


def run_file(path: Path, name: str) -> None:
    """Runs a Python file as the module `name`. It can import other files of its folder. Raises what the file raises."""
    loader = _Uncached(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[name] = module  # dataclasses look up their module
    before = modes.modes()
    try:
        loader.exec_module(module)
    finally:
        modes.put_back(before)  # a library that it loads may have changed them


def line_in(path: Path, error: BaseException) -> str:
    """Where in the file an error was raised: " line 7", or an empty string."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f" line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" line {lines[-1]}" if lines else ""
