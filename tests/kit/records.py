"""Recorded runs of small models, and two beside each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ggml_backend_npu import Backend, default_backend
from graph_runner.base.settings import Settings
from graph_runner.record import Comparison, RecordOptions, Run, compare, record

TEXT = "The capital of France is Paris, and that of Italy is Rome."
CPU = RecordOptions("CPU", steps=3, settings=Settings(flash_attention="off", threads=1))
NPU = replace(CPU, device="NPU")
A, B = Path("a.gguf"), Path("b.gguf")


def recorded(file: Path, options: RecordOptions = CPU, backend: Backend | None = None, text: str = TEXT) -> Run:
    """Returns the run of a model."""
    return record(file, text, options, backend or default_backend())


def compared(a: Run, b: Run) -> Comparison:
    """Compares two runs, of the files A and B."""
    return compare(a, b, A, B)
