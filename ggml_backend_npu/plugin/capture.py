"""What GGML_NPU_CAPTURE asks for, and who does it. This package writes no files; a package that writes some says so in
its metadata, by an entry point of the group `ggml_backend_npu.capture` that has the name of the kind: trace, record."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ggml_backend_npu.backend.options import DeviceError

if TYPE_CHECKING:
    from ggml_backend_npu.plugin.plugin import Plugin

GROUP = "ggml_backend_npu.capture"


@dataclass(frozen=True)
class Capture:
    """What to capture, and where to.

    path   of the file
    nodes  which nodes go into it with their bytes, in the syntax of `ggml-npu capture --nodes`; None: as its kind does
    kind   of the file
    """

    path: Path
    nodes: str | None = None
    kind: str = "trace"


def wanted() -> Capture | None:
    """What GGML_NPU_CAPTURE, GGML_NPU_CAPTURE_NODES and GGML_NPU_CAPTURE_AS ask for; None where the first is not
    set."""
    path, nodes, kind = (os.environ.get(f"GGML_NPU_CAPTURE{each}") for each in ("", "_NODES", "_AS"))
    return Capture(Path(path), nodes or None, kind or "trace") if path else None


def begin(plugin: Plugin, capture: Capture) -> None:
    """Starts recording the nodes that a plugin is given. Raises DeviceError where no installed package writes files of
    this kind, and what that package raises for a path."""
    from importlib.metadata import entry_points  # late, as it is slow

    found = {each.name: each for each in entry_points(group=GROUP)}
    if capture.kind not in found:
        known = " ".join(sorted(found)) or "none"
        raise DeviceError(f"GGML_NPU_CAPTURE_AS={capture.kind!r}: no such kind of file; there are: {known}")
    start: Callable[[Plugin, Capture], None] = found[capture.kind].load()
    start(plugin, capture)
