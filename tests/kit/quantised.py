"""Two quantisations of a small random llama, and a text for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from graph_runner.base.settings import Settings
from graph_runner.base.tiny import write_tiny_llama
from graph_runner.quantdiff.files import ModelFile, Weights
from graph_runner.quantdiff.weights import encoded
from quant import codec

TEXT = "The quick brown fox jumps over the lazy dog. " * 4
SETTINGS = Settings(n_ctx=64, threads=1)


def write_with(path: Path, big: Path, changed: Mapping[str, Callable[[Weights], Weights]]) -> Path:
    """A copy of a model in which tensors of these names are changed."""
    model = ModelFile(big)
    tensors = [changed[name](each) if name in changed else each for name, each in model.tensors.items()]
    with model.with_tensors(tensors) as made:
        path.write_bytes(made.read_bytes())
    return path


def in_type(type: str) -> Callable[[Weights], Weights]:
    return lambda weights: encoded(weights, type)


def scaled(by: float) -> Callable[[Weights], Weights]:
    """The same in f16, times a number."""

    def change(weights: Weights) -> Weights:
        values = weights.rows(0, weights.n_weights // weights.ne[0]) * np.float32(by)
        return replace(weights, type="f16", data=values.astype(np.float16).reshape(-1).view(np.uint8))

    return change


def write_pair(folder: Path, type: str = "q4_0", mark: str = "") -> tuple[Path, Path]:
    """A tiny llama, and the same with every matrix in another type."""
    big = write_tiny_llama(folder / f"{mark}big.gguf")
    matrices = [name for name, each in ModelFile(big).tensors.items() if len(each.ne) > 1]
    return big, write_with(folder / f"{mark}small.gguf", big, dict.fromkeys(matrices, in_type(type)))


def write_decoded(path: Path, small: Path) -> Path:
    """A copy of a model whose quantised tensors are decoded: f32."""
    tensors = ModelFile(small).tensors.items()
    return write_with(path, small, {name: in_type("f32") for name, each in tensors if codec(each.type).is_quantized})
