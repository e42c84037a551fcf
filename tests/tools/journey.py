"""The way of a graph through our modules: from `graph_compute` until its first kernel runs.

    python tests/tools/journey.py        prints the modules, and how often the way comes back to one

The graph has one node. First it has the form of one that has been planned before, then another one; nothing is
imported, compiled or measured on the way. A stay is a row of calls in one module; a return, a stay in a module where
the way has been. What is only asked for is no part of the way: properties, records that are made, and what tensors and
types say of themselves (`WORDS`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from itertools import groupby
from types import FrameType
from typing import Any

import numpy as np

from ggml_backend_npu import Backend, Node, Options, Tensor
from ggml_backend_npu.ggml import lib
from ggml_backend_npu.plugin.plugin import Plugin
from ggml_backend_npu.plugin.registration import alone
from ggml_backend_npu.plugin.replica import Replica

PACKAGES = ("graph_runner", "ggml_backend_npu", "quant")
WORDS = ("ggml_backend_npu.ir", "quant.codec")
FIRST, LAST = (
    ("ggml_backend_npu.plugin.plugin", "Plugin.graph_compute"),
    ("ggml_backend_npu.plugin.forms", "Formed.run"),
)


def calls(width: int) -> Iterator[tuple[str, str]]:
    """Yields module and name of each function of ours that is called for a graph, until a kernel is. The rows of its
    node have so many elements; one with rows of 32 has been planned before."""
    found: list[tuple[str, str]] = []

    def seen(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.partition(".")[0] in PACKAGES and not _is_asked_for(frame, module):
            found.append((module, frame.f_code.co_qualname))

    ggml = lib.ggml()
    plugin = Plugin(ggml, Backend("NPU", options=Options(ops="all")))
    with alone(ggml, plugin), Replica(ggml, ctypes.addressof(plugin.device)) as device:
        planned, node = _node(32), _node(width)  # both at once: a graph at the same addresses is run by C alone
        device.compute(planned)
        sys.setprofile(seen)
        device.compute(node)
        sys.setprofile(None)
    return iter(found[found.index(FIRST) : found.index(LAST) + 1])


def _node(width: int) -> Node:
    a, b, dst = (Tensor.of(np.ones((4, width), np.float32)) for _ in range(3))
    return Node("MUL", dst, (a, b))


def _is_asked_for(frame: FrameType, module: str) -> bool:
    at: Any = sys.modules[module]
    if f"{module}.".startswith(tuple(f"{word}." for word in WORDS)) or frame.f_code.co_filename.startswith("<"):
        return True
    for name in frame.f_code.co_qualname.split("."):
        at = vars(at).get(name)
        if at is None or isinstance(at, property):
            break
    return isinstance(at, property)


def stays(width: int) -> list[tuple[str, list[str]]]:
    """Returns the modules in the order of the way, each with the functions that are called there."""
    return [(module, [name for _, name in row]) for module, row in groupby(calls(width), lambda call: call[0])]


if __name__ == "__main__":
    for title, width in (("a known form", 32), ("a new form", 64)):
        print(title)
        way = stays(width)
        for module, names in way:
            print(f"{module:40}", " ".join(dict.fromkeys(name.partition(".<locals>")[0] for name in names)))
        print(f"{len(way)} stays, {len(way) - len({module for module, _ in way})} of them returns")
