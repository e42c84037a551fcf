"""Two runs of one model in step, each node judged."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_runner.diff.result import DiffResult as DiffResult
    from graph_runner.diff.run import DiffOptions as DiffOptions
    from graph_runner.diff.run import diff as diff
    from graph_runner.diff.run import run_in_step as run_in_step

__all__ = ["DiffOptions", "DiffResult", "diff", "run_in_step"]


def __getattr__(name: str) -> Any:
    """Returns a public name from its module, so that a report of a replay loads no llama.cpp."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("graph_runner.diff.run"), name)
