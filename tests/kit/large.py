"""A llama of 1.1 billion random weights, as large as TinyLlama, in blocks of Q4_0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, TokenType

from graph_runner.base.tiny import TinyModel, Vocabulary, spm_vocabulary

_N_VOCAB = 32000
_OF_UNIFORM = np.sqrt(np.square(np.arange(-7, 8)).mean())  # root mean square of -7 to 7


def _vocabulary() -> Vocabulary:
    """That of a tiny llama, and 31,646 tokens that no text has."""
    tiny = spm_vocabulary()
    more = _N_VOCAB - len(tiny.tokens)
    tokens = tiny.tokens + [f"<{number}>" for number in range(more)]
    return replace(tiny, tokens=tokens, types=tiny.types + [TokenType.UNUSED] * more)


class _Large(TinyModel):
    """Matrices are drawn as blocks: a scale, and quants of -7 to 7."""

    def __init__(self, path: Path, n_layer: int) -> None:
        super().__init__(path, "llama", _vocabulary(), n_embd=2048, n_layer=n_layer, n_ff=5632)

    def attention_heads(self, n_head: int = 32, n_head_kv: int = 4, head_size: int = 64) -> None:
        super().attention_heads(n_head, n_head_kv, head_size)

    def blocks_of(self, name: str, n_in: int, n_out: int, std: float) -> None:
        """Adds a matrix {n_in, n_out} of Q4_0."""
        n = n_out * n_in // 32
        blocks = np.empty((n, 18), np.uint8)
        blocks[:, :2] = np.array([std / _OF_UNIFORM], np.float16).view(np.uint8)
        low, high = self.rng.integers(1, 16, (2, n, 16), np.uint8)
        blocks[:, 2:] = low | high << 4
        rows = blocks.reshape(n_out, -1)
        self.writer.add_tensor(f"{name}.weight", rows, raw_dtype=GGMLQuantizationType.Q4_0)

    def linear(self, name: str, n_in: int, *n_out: int, bias: bool = False) -> None:
        (rows,) = n_out
        self.blocks_of(name, n_in, rows, n_in**-0.5)

    def embeddings(self, *, bias: bool = False) -> None:
        self.blocks_of("token_embd", self.n_embd, _N_VOCAB, 1.0)
        self.norm("output_norm")
        self.blocks_of("output", self.n_embd, _N_VOCAB, self.n_embd**-0.5)


def write_large(path: Path, n_layer: int = 22) -> Path:
    """Writes 620 MB: 22 layers, n_embd 2048, 32 heads of 64 over 4 KV heads, n_ff 5632, 32,000 tokens."""
    model = _Large(path, n_layer)
    model.llama()
    return model.save()
