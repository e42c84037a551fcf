"""A run in one GGUF file, a few bytes for each node and step, and two such files beside each other.

docs/record-runs.md describes the file.
"""

from __future__ import annotations

from graph_runner.record.comparing import Comparison, compare
from graph_runner.record.files import read_run, write_run
from graph_runner.record.recording import RecordOptions, record
from graph_runner.record.run import Run

__all__ = ["Comparison", "RecordOptions", "Run", "compare", "read_run", "record", "write_run"]
