"""Nodes of a run in one GGUF file, each with the bytes that it reads and those that it writes: captured, and replayed.

docs/traces.md describes the file. A replay on the NPU needs neither the model nor llama.cpp.
"""

from __future__ import annotations

from graph_runner.trace.capturing import Captured, CaptureOptions, Selection, capture, taken_by_the_npu
from graph_runner.trace.format import FORMAT, NPU, Origin, Recorded
from graph_runner.trace.reading import Trace, is_trace, read_trace
from graph_runner.trace.replaying import ReplayResult, replay
from graph_runner.trace.writing import TraceWriter, check_output, save_nodes, write_trace

__all__ = [
    "FORMAT",
    "NPU",
    "CaptureOptions",
    "Captured",
    "Origin",
    "Recorded",
    "ReplayResult",
    "Selection",
    "Trace",
    "TraceWriter",
    "capture",
    "check_output",
    "is_trace",
    "read_trace",
    "replay",
    "save_nodes",
    "taken_by_the_npu",
    "write_trace",
]
