"""Runs models through llama.cpp with the backend, compares their nodes with ggml's CPU, and is the command ggml-npu.

The public interface, besides the command: `Session` and `generate` run a model, `graph_runner.diff.diff` compares two
devices node by node, `capture` and `replay` save nodes in a file and compute them again, `cover` says which nodes the
NPU takes. Bad input from a user raises `SessionError`, `TraceError` and the like, each with a message of one line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_runner.base.errors import SessionError as SessionError
    from graph_runner.base.errors import TraceError as TraceError
    from graph_runner.hazards import assert_no_hazards as assert_no_hazards
    from graph_runner.quantdiff.run import QuantOptions as QuantOptions
    from graph_runner.quantdiff.run import quantisation as quantisation
    from graph_runner.run.session import Sampler as Sampler
    from graph_runner.run.session import Session as Session
    from graph_runner.run.session import Settings as Settings
    from graph_runner.run.session import generate as generate
    from graph_runner.tools.coverage import cover as cover
    from graph_runner.trace import capture as capture
    from graph_runner.trace import replay as replay

_PUBLIC = {
    "QuantOptions": "quantdiff.run",
    "SessionError": "base.errors",
    "TraceError": "base.errors",
    "Sampler": "run.session",
    "Session": "run.session",
    "Settings": "base.settings",
    "assert_no_hazards": "hazards",
    "capture": "trace",
    "cover": "tools.coverage",
    "generate": "run.session",
    "quantisation": "quantdiff.run",
    "replay": "trace",
}
__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    """Returns a public name from its module, so that llama.cpp is loaded only by the names that need it."""
    if name == "__version__":
        from importlib.metadata import version  # late, as it is slow

        return version("ggml-backend-npu")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
