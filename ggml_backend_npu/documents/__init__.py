"""Operators of four documents on NumPy arrays, under their own names and interfaces; `ops` has the nodes of ggml."""

from __future__ import annotations

from collections.abc import Callable

from ggml_backend_npu.default import default_backend


def run(call: Callable[[], None]) -> None:
    """Runs a call in the threads of the default backend."""
    with default_backend().team.working():
        call()
