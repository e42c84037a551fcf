"""Small timelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graph_runner.timeline.events import LLAMA, NODE, STEP, Event, Timeline

ABOUT: dict[str, Any] = {
    "model": "m.gguf", "description": "llama 1M", "device": "NPU", "settings": {"threads": "1"}, "tokens": 14,
    "steps": 1, "machine": "a machine", "processors": 2, "ggml": "0.25.3", "llama-cpp-python": "0.3.36",
    "times_as_long": {"wall": 1.03, "processor": 1.02}, "nodes_without_times": 0, "measured": {"NPU": "inside"},
    "roofline": {"bytes_per_second": 1e9, "operations_per_second": 2e9},  # 1 byte, 2 operations a ns
}  # fmt: skip


def node(step: int, place: int, op: str, name: str, ns: int, track: str = "NPU") -> Event:
    """A node that reads and writes a byte for each two ns."""
    args = {"id": f"step {step} node {place}, {op} {name!r}", "step": step, "bytes": ns // 2, "operations": 0}
    return Event(NODE, op, track, 10 * place, 10 * place + ns, args)


def timeline(*nodes: Event, walls: Sequence[int] = (100,), **about: Any) -> Timeline:
    """A timeline of 13 tokens, and of one in each step after it; each step takes as long as `walls` says, in ns."""
    steps = [
        Event(STEP, f"step {i}", LLAMA, 0, wall, {"step": i, "tokens": 1 if i else 13}) for i, wall in enumerate(walls)
    ]
    return Timeline(ABOUT | {"steps": len(steps)} | about, [*steps, *nodes])
