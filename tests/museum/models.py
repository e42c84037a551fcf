"""Models that some exhibits need: heads that are rotated in part, factors of RoPE, weights that make large numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from gguf import GGUFReader
from kit.models import add_gpt2_block, write_tiny_gpt2, write_tiny_moe
from kit.shapes import feed_forward

from graph_runner.base.tiny import TinyModel, spm_vocabulary, write_tiny_llama


def write_gptneox(path: Path) -> Path:
    """A gptneox of 2 layers, 2 heads of 32, of which 8 elements are rotated; q, k and v are parts of one result."""
    model = TinyModel(path, "gptneox", spm_vocabulary())
    model.writer.add_head_count(2)
    model.writer.add_rope_dimension_count(8)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_parallel_residual(False)
    model.embeddings(bias=True)
    for block in model.blocks():
        add_gpt2_block(model, block)
    return model.save()


def write_factors(path: Path) -> Path:
    """A llama whose RoPE has factors of frequency, as Llama 3.1 has."""
    model = TinyModel(path, "llama", spm_vocabulary())
    model.attention_heads()
    model.embeddings()
    model.weight("rope_freqs.weight", model.random(model.head_size // 2, mean=4.0, std=1.0))
    for block in model.blocks():
        model.attention(block)
        feed_forward(model, block)
    return model.save()


def write_qwen3(path: Path) -> Path:
    """A qwen3 of 2 layers whose q, k and v are parts of one result, of which q and k are normalised."""
    model = TinyModel(path, "qwen3", spm_vocabulary())
    model.attention_heads()
    model.embeddings()
    for block in model.blocks():
        model.norm(f"{block}.attn_norm")
        model.linear(f"{block}.attn_qkv", model.n_embd, (model.n_head + 2 * model.n_head_kv) * model.head_size)
        model.linear(f"{block}.attn_output", model.n_head * model.head_size, model.n_embd)
        for norm in ("attn_q_norm", "attn_k_norm"):
            model.weight(f"{block}.{norm}.weight", model.random(model.head_size, mean=1.0))
        feed_forward(model, block)
    return model.save()


def scaled(path: Path, factors: Mapping[str, float]) -> Path:
    """A model whose weights of some names are so many times as large."""
    for tensor in GGUFReader(path, "r+").tensors:
        for name, factor in factors.items():
            if name in tensor.name:
                tensor.data[...] *= tensor.data.dtype.type(factor)
    return path


LOUD: dict[str, Callable[[Path], Path]] = {
    "gptneox": write_gptneox,
    "llama with factors": write_factors,
    "qwen3 of one matrix": write_qwen3,
    "moe of 6": lambda path: write_tiny_moe(path, n_expert=6),
    "loud llama": lambda path: scaled(write_tiny_llama(path), {"attn_q": 60, "attn_k": 60}),
    "louder llama": lambda path: scaled(write_tiny_llama(path), {"attn_q": 200, "attn_k": 200}),
    "loud gpt2": lambda path: scaled(write_tiny_gpt2(path), {"ffn_up.bias": 200}),
}
