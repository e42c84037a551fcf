"""Models of random weights with the attention of real ones: sizes of heads, how many share a head of K and V, windows,
sinks, soft caps, norms of q and k. Two layers each, so that they take a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kit.models import add_experts

from graph_runner.base.tiny import Q8_0, TinyModel, spm_vocabulary

Write = Callable[[Path], Path]


def write_llama(path: Path, n_head: int, n_head_kv: int, head_size: int) -> Path:
    """A llama: every query sees all cells before it."""
    model = TinyModel(path, "llama", spm_vocabulary())
    model.attention_heads(n_head, n_head_kv, head_size)
    model.embeddings()
    for block in model.blocks():
        model.attention(block)
        feed_forward(model, block)
    return model.save()


def write_gemma(path: Path, arch: str, n_head: int, n_head_kv: int, head_size: int, *, window: int = 32) -> Path:
    """A gemma2, with a soft cap of scores and logits, or a gemma3, with norms of q and k whose weights are large, as
    Gemma's are. A window in the first layer; no layer without one in gemma3, whose sixth would be that."""
    model = TinyModel(path, arch, spm_vocabulary())
    model.attention_heads(n_head, n_head_kv, head_size)
    model.writer.add_sliding_window(window)
    if arch == "gemma2":
        model.writer.add_attn_logit_softcapping(50.0)
        model.writer.add_final_logit_softcapping(30.0)
    model.weight("token_embd.weight", model.random(model.n_embd, len(model.vocabulary.tokens), std=0.5), Q8_0)
    model.norm("output_norm")
    for block in model.blocks():
        model.attention(block)
        model.norm(f"{block}.post_attention_norm")
        if arch == "gemma3":
            for norm in ("attn_q_norm", "attn_k_norm"):
                model.weight(f"{block}.{norm}.weight", model.random(head_size, mean=2.0, std=0.5))
        feed_forward(model, block)
        model.norm(f"{block}.post_ffw_norm")
    return model.save()


def write_gpt_oss(path: Path, n_head: int, n_head_kv: int, head_size: int, *, window: int = 24) -> Path:
    """A gpt-oss: sinks, and a window in the first layer."""
    model = TinyModel(path, "gpt-oss", spm_vocabulary())
    model.attention_heads(n_head, n_head_kv, head_size)
    model.writer.add_sliding_window(window)
    model.writer.add_expert_count(4)
    model.writer.add_expert_used_count(2)
    model.writer.add_expert_feed_forward_length(model.n_ff)
    model.embeddings()
    for block in model.blocks():
        model.attention(block, bias=True)
        model.weight(f"{block}.attn_sinks.weight", model.random(n_head, std=1.0))
        model.norm(f"{block}.post_attention_norm")
        add_experts(model, block, 4, bias=True)
    return model.save()


def feed_forward(model: TinyModel, block: str) -> None:
    """Adds the feed-forward part of a llama's block."""
    model.norm(f"{block}.ffn_norm")
    model.linear(f"{block}.ffn_gate", model.n_embd, model.n_ff)
    model.linear(f"{block}.ffn_up", model.n_embd, model.n_ff)
    model.linear(f"{block}.ffn_down", model.n_ff, model.n_embd)


# by name: the kind, heads of q, heads of k and v, the size of a head
SHAPES: dict[str, Write] = {
    "shape-llama-4-4-64": lambda path: write_llama(path, 4, 4, 64),
    "shape-llama-9-3-64": lambda path: write_llama(path, 9, 3, 64),
    "shape-llama-8-2-80": lambda path: write_llama(path, 8, 2, 80),
    "shape-llama-16-1-128": lambda path: write_llama(path, 16, 1, 128),
    "shape-llama-4-2-192": lambda path: write_llama(path, 4, 2, 192),
    "shape-llama-16-1-576": lambda path: write_llama(path, 16, 1, 576),
    "shape-gemma2-8-4-128": lambda path: write_gemma(path, "gemma2", 8, 4, 128),
    "shape-gemma2-4-1-256": lambda path: write_gemma(path, "gemma2", 4, 1, 256),
    "shape-gemma3-4-1-256": lambda path: write_gemma(path, "gemma3", 4, 1, 256),
    "shape-gemma3-8-8-64": lambda path: write_gemma(path, "gemma3", 8, 8, 64, window=8),
    "shape-gpt-oss-8-1-64": lambda path: write_gpt_oss(path, 8, 1, 64),
    "shape-gpt-oss-4-2-128": lambda path: write_gpt_oss(path, 4, 2, 128, window=64),
}


def written(folder: Path) -> list[Path]:
    """The files of all shapes in a folder, written unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in SHAPES.items():
        if not (folder / f"{name}.gguf").exists():
            write(folder / f"{name}.part").rename(folder / f"{name}.gguf")
    return [folder / f"{name}.gguf" for name in SHAPES]
