"""A tiny model of whisper.cpp's format, with random weights, as pywhispercpp reads it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

N_VOCABULARY, N_WORDS = 51864, 50257  # of the English models: special tokens follow the words
N_AUDIO_CONTEXT, N_TEXT_CONTEXT = 1500, 448
N_MELS, N_FREQUENCIES = 80, 201
STATE, HEADS, LAYERS = 64, 2, 3
SAMPLE_RATE = 16000

Shape = tuple[int, ...]


def _linear(name: str, n_in: int, n_out: int, bias: bool = True) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (n_out, n_in)
    if bias:
        yield f"{name}.bias", (n_out,)


def _norm(name: str) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (STATE,)
    yield f"{name}.bias", (STATE,)


def _attention(name: str) -> Iterator[tuple[str, Shape]]:
    yield from _norm(f"{name}_ln")
    for part in ("query", "key", "value", "out"):
        yield from _linear(f"{name}.{part}", STATE, STATE, bias=part != "key")


def _tensors() -> Iterator[tuple[str, Shape]]:
    """Names and shapes, slowest dimension first."""
    yield "encoder.positional_embedding", (N_AUDIO_CONTEXT, STATE)
    yield "encoder.conv1.weight", (STATE, N_MELS, 3)
    yield "encoder.conv1.bias", (STATE, 1)
    yield "encoder.conv2.weight", (STATE, STATE, 3)
    yield "encoder.conv2.bias", (STATE, 1)
    yield from _norm("encoder.ln_post")
    yield "decoder.positional_embedding", (N_TEXT_CONTEXT, STATE)
    yield "decoder.token_embedding.weight", (N_VOCABULARY, STATE)
    yield from _norm("decoder.ln")
    for part in ("encoder", "decoder"):
        for layer in range(LAYERS):
            block = f"{part}.blocks.{layer}"
            yield from _attention(f"{block}.attn")
            if part == "decoder":
                yield from _attention(f"{block}.cross_attn")
            yield from _norm(f"{block}.mlp_ln")
            yield from _linear(f"{block}.mlp.0", STATE, 4 * STATE)
            yield from _linear(f"{block}.mlp.2", 4 * STATE, STATE)


def write_model(path: Path, seed: int = 0) -> None:
    """Writes a model whose weights are float16."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as file:
        sizes = (N_VOCABULARY, N_AUDIO_CONTEXT, STATE, HEADS, LAYERS, N_TEXT_CONTEXT, STATE, HEADS, LAYERS, N_MELS, 1)
        file.write(struct.pack("<I11i", 0x67676D6C, *sizes))
        file.write(struct.pack("<2i", N_MELS, N_FREQUENCIES))
        file.write(np.abs(rng.standard_normal((N_MELS, N_FREQUENCIES))).astype("<f4").tobytes())
        file.write(struct.pack("<i", N_WORDS))
        for number in range(N_WORDS):
            word = f" {number or ''}".encode()  # whisper.cpp looks for the word " "
            file.write(struct.pack("<I", len(word)) + word)
        for name, shape in _tensors():
            plain = len(shape) == 1 or shape[-1] == 1 or "positional" in name
            data = rng.standard_normal(shape) / np.sqrt(shape[-1] if len(shape) > 1 and not plain else 1)
            data = 1 + data / 10 if name.endswith(("ln.weight", "ln_post.weight")) else data
            file.write(struct.pack("<3i", len(shape), len(name), 0 if plain else 1))
            file.write(struct.pack(f"<{len(shape)}i", *reversed(shape)) + name.encode())
            file.write(data.astype("<f4" if plain else "<f2").tobytes())


def save_noise(path: Path, seconds: float = 1.0, seed: int = 0) -> None:
    """Writes sound to be transcribed, as np.load reads it."""
    sound = np.random.default_rng(seed).standard_normal(int(seconds * SAMPLE_RATE)) / 10
    np.save(path, sound.astype(np.float32))
