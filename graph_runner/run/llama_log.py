"""The log of llama.cpp, which has one: recorded instead of printed. Its first error says why a call failed."""

from __future__ import annotations

import os
import sys
from typing import Any

from ggml_backend_npu.ggml import llama
from graph_runner.base.console import printable

llama_cpp = llama.functions()
_lines: list[str] = []


def _add(level: int, text: bytes, _: Any) -> None:
    if os.environ.get("GGML_NPU_VERBOSE"):
        sys.stderr.write(printable(text.decode(errors="replace")))
    if level in (2, 3, 4):
        _lines.append(f"{'E' if level == 4 else ' '}{text.decode(errors='replace').strip()}")


_callback = llama_cpp.llama_log_callback(_add)


def reason() -> str:
    """Returns the first error since `forget` in one line, without the C function's name."""
    errors = [" ".join(line[1:].split()) for line in _lines if line[0] == "E"]
    return errors[0].split(": ", 1)[-1] if errors else "llama.cpp gave no reason"


def find(word: str) -> str | None:
    """Returns the last line since `forget` that contains a word, or None."""
    return next((line[1:] for line in reversed(_lines) if word in line), None)


def forget() -> None:
    """Forgets all lines, and records those that follow, whoever has had the log since: llama_cpp takes it when it is
    imported."""
    _lines.clear()
    llama_cpp.llama_log_set(_callback, None)


forget()
