"""The log of llama.cpp."""

from __future__ import annotations

import os
import sys
from typing import Any

from llama_cpp import llama_cpp

from graph_runner.base.console import printable


class Log:
    """llama.cpp's log, recorded instead of printed: its first error says why a call failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.callback = llama_cpp.llama_log_callback(self._add)
        llama_cpp.llama_log_set(self.callback, None)

    def _add(self, level: int, text: bytes, _: Any) -> None:
        if os.environ.get("GGML_NPU_VERBOSE"):
            sys.stderr.write(printable(text.decode(errors="replace")))
        if level in (2, 3, 4):
            self.lines.append(f"{'E' if level == 4 else ' '}{text.decode(errors='replace').strip()}")

    def reason(self) -> str:
        """Returns the first error since `clear`, without the C function's name."""
        errors = [line[1:] for line in self.lines if line[0] == "E"]
        return errors[0].split(": ", 1)[-1] if errors else "llama.cpp gave no reason"

    def find(self, word: str) -> str | None:
        """Returns the last line since `clear` that contains a word, or None."""
        return next((line[1:] for line in reversed(self.lines) if word in line), None)

    def clear(self) -> None:
        """Forgets all lines."""
        self.lines.clear()
