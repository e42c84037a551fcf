"""Diffs of small models: their prompt and settings, and kernels that are planted in them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ggml_backend_npu.ops import OWN
from ggml_backend_npu.registry.entry import Op
from graph_runner.diff.run import DiffOptions, DiffResult, diff
from graph_runner.judging.results import NodeResult
from graph_runner.run.session import Settings

PROMPT = "The capital of France is"
CELLS = 26  # tokens of the prompt
N_CELLS = 256
FLASH_OFF = Settings(flash_attention="off", threads=1)
FLASH_ON = Settings(flash_attention="on", threads=1)
QUANTISED = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0", threads=1)


def planted(name: str, kernel: Callable[..., None]) -> Op:
    return Op(name, kernel, OWN[name].types, OWN[name].refuse, params=OWN[name].params)


def run(file: Path, settings: Settings = FLASH_OFF, steps: int = 2, **options: Any) -> DiffResult:
    return diff(file, PROMPT, DiffOptions(steps=steps, settings=settings, **options))


def is_off(node: NodeResult) -> bool:
    return node.cumulative is not None and not node.cumulative


def beside_another() -> Callable[[], bool]:
    """Returns a function for kernels: whether the node runs in one graph with the node for which it was last called."""
    last = -1  # how many graphs had run when a node of one did

    def is_beside_another() -> bool:
        nonlocal last
        npu = next((f.frame.f_locals["self"] for f in inspect.stack(0) if f.function == "graph_compute"), None)
        if npu is None:
            return False
        before, last = last, int(npu.statistics.graphs)
        return before == last

    return is_beside_another
