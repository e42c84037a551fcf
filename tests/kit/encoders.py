"""Small random models that encode, or make embeddings; sizes are in ggml's order `ne`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from gguf import PoolingType, TokenType

from graph_runner.base import tiny
from graph_runner.base.tiny import TinyModel, Vocabulary, spm_vocabulary


def write_tiny_bert(path: Path, pooling: PoolingType = PoolingType.MEAN) -> Path:
    """A BERT of 2 layers, which makes embeddings and no logits."""
    letters = [*map(chr, range(33, 127))]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"\u2581{letter}" for letter in letters), *letters]
    types = [*[TokenType.CONTROL] * 4, *[TokenType.NORMAL] * 2 * len(letters)]
    vocabulary = Vocabulary("bert", tokens, types, slice(4, None))
    model = TinyModel(path, "bert", vocabulary)
    n_embd, n_ff = model.n_embd, model.n_ff
    model.writer.add_head_count(2)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_causal_attention(False)
    model.writer.add_pooling_type(pooling)
    model.writer.add_token_type_count(2)
    for add, token in (("pad", 0), ("unk", 1), ("bos", 2), ("eos", 3), ("sep", 3)):
        getattr(model.writer, f"add_{add}_token_id")(token)
    model.weight("token_embd.weight", model.random(n_embd, len(vocabulary.tokens)))
    model.weight("position_embd.weight", model.random(n_embd, 512))
    model.weight("token_types.weight", model.random(n_embd, 2))
    model.norm("token_embd_norm", bias=True)
    for block in model.blocks():
        for name in ("q", "k", "v", "output"):
            model.linear(f"{block}.attn_{name}", n_embd, n_embd, bias=True)
        model.norm(f"{block}.attn_output_norm", bias=True)
        model.linear(f"{block}.ffn_up", n_embd, n_ff, bias=True)
        model.linear(f"{block}.ffn_down", n_ff, n_embd, bias=True)
        model.norm(f"{block}.layer_output_norm", bias=True)
    return model.save()


def write_tiny_t5(path: Path, *, has_decoder: bool = True) -> Path:
    """A T5 of 2 layers: 4 heads of 16, 8 buckets of relative positions, gated GELU; the decoder begins with token 0.

    Exercises a graph that encodes, and one that decodes with attention to what was encoded, without a cache.
    """
    letters = ["\u2581", *map(chr, range(33, 127))]
    types = [TokenType.CONTROL, TokenType.CONTROL, TokenType.UNKNOWN, *[TokenType.NORMAL] * len(letters)]
    vocabulary = Vocabulary("t5", ["<pad>", "</s>", "<unk>", *letters], types, slice(3, None))
    model = TinyModel(path, "t5" if has_decoder else "t5encoder", vocabulary)
    n_embd, n_ff = model.n_embd, model.n_ff
    model.writer.add_token_scores([0.0, 0.0, 0.0, *[-1.0] * len(letters)])
    model.writer.add_add_space_prefix(True)
    model.writer.add_head_count(4)
    model.writer.add_layer_norm_rms_eps(1e-6)
    model.writer.add_relative_attn_buckets_count(8)
    model.writer.add_decoder_start_token_id(0)
    for add, token in (("pad", 0), ("eos", 1), ("unk", 2)):
        getattr(model.writer, f"add_{add}_token_id")(token)
    model.writer.add_add_bos_token(False)
    model.writer.add_add_eos_token(True)
    model.weight("token_embd.weight", model.random(n_embd, len(vocabulary.tokens), std=1.0), tiny.Q8_0)
    model.linear("output", n_embd, len(vocabulary.tokens))
    for part, attentions in (("enc", ("attn",)), *([("dec", ("attn", "cross_attn"))] if has_decoder else [])):
        model.norm(f"{part}.output_norm")
        model.weight(f"{part}.blk.0.attn_rel_b.weight", model.random(4, 8, std=1.0))
        for block in model.blocks():
            for attention in attentions:
                model.norm(f"{part}.{block}.{attention}_norm")
                for name in "qkvo":
                    model.linear(f"{part}.{block}.{attention}_{name}", n_embd, n_embd)
            model.norm(f"{part}.{block}.ffn_norm")
            model.linear(f"{part}.{block}.ffn_gate", n_embd, n_ff)
            model.linear(f"{part}.{block}.ffn_up", n_embd, n_ff)
            model.linear(f"{part}.{block}.ffn_down", n_ff, n_embd)
    return model.save()


def write_tiny_embedder(path: Path, pooling: int = PoolingType.LAST) -> Path:
    """A llama of 2 layers, as write_tiny_llama's, that makes embeddings: the model says how they are pooled."""
    model = TinyModel(path, "llama", spm_vocabulary())
    model.writer.add_uint32("llama.pooling_type", pooling)
    model.llama()
    return model.save()


ENCODERS: dict[str, Callable[[Path], Path]] = {
    "bert": write_tiny_bert,
    "bert of tokens": partial(write_tiny_bert, pooling=PoolingType.NONE),
    "bert of the first": partial(write_tiny_bert, pooling=PoolingType.CLS),
    "t5": write_tiny_t5,
    "t5encoder": partial(write_tiny_t5, has_decoder=False),
    "embedder": write_tiny_embedder,
    "embedder of means": partial(write_tiny_embedder, pooling=PoolingType.MEAN),
}
