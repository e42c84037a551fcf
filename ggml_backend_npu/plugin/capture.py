"""What GGML_NPU_CAPTURE asks for, and who does it. This package writes no files; a package that writes traces says so
in its metadata, by an entry point of the group `ggml_backend_npu.capture`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from ggml_backend_npu.backend.options import DeviceError

if TYPE_CHECKING:
    from ggml_backend_npu.plugin.plugin import Plugin

GROUP = "ggml_backend_npu.capture"


@dataclass(frozen=True)
class Capture:
    """What to capture, and where to.

    path   of the trace
    nodes  which nodes go into it, in the syntax of `ggml-npu capture --nodes`; "*": all
    """

    path: Path
    nodes: str = "*"


def wanted() -> Capture | None:
    """What GGML_NPU_CAPTURE and GGML_NPU_CAPTURE_NODES ask for; None where the first is not set."""
    path = os.environ.get("GGML_NPU_CAPTURE")
    return Capture(Path(path), os.environ.get("GGML_NPU_CAPTURE_NODES") or "*") if path else None


def begin(plugin: Plugin, capture: Capture) -> None:
    """Starts recording the nodes that a plugin is given. Raises DeviceError where no installed package writes traces,
    and what that package raises for a path."""
    found = next(iter(entry_points(group=GROUP)), None)
    if found is None:
        raise DeviceError(f"GGML_NPU_CAPTURE={str(capture.path)!r}: no installed package writes traces")
    record: Callable[[Plugin, Capture], None] = found.load()
    record(plugin, capture)
