"""Other processes of this Python: they import what this process imports, and nothing of the folder that it is in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_COMMAND = (
    "from ggml_backend_npu.ggml.guard import end_with_parent; end_with_parent()\n"
    "from graph_runner.cli import main; main()"
)


def python(*arguments: str | Path) -> list[str]:
    """Returns the command that starts this Python with arguments. -P: neither the current folder nor a script's is
    looked through for modules, where a file beside a model may be called numpy.py."""
    return [sys.executable, "-P", *map(str, arguments)]


def command(*words: str | Path) -> list[str]:
    """Returns the command that runs ggml-npu with words, in a process that ends with this one."""
    return python("-c", _COMMAND, *words)


def environment(**more: str) -> dict[str, str]:
    """Returns this process's environment with additions, in which a new Python finds the same modules: those of
    sys.path, without the current folder unless this package lies there."""
    own = Path(__file__).resolve().parents[2]
    found = [path for path in sys.path if path and (not _is_here(path) or _is_here(own))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found), **more}


def _is_here(path: str | Path) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:
        return False
