"""Small random models whose graphs move data in ways a llama's does not; sizes are in ggml's order `ne`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from llama_cpp import llama_cpp

from graph_runner.base import tiny
from graph_runner.base.tiny import TinyModel, Vocabulary, spm_vocabulary, write_tiny_llama


def rwkv_vocabulary() -> Vocabulary:
    """257 tokens of the RWKV tokenizer: <s> and 256 bytes, escaped (lower-case digits are all it reads)."""
    tokens = ["<s>", *(f"\\x{byte:02x}" for byte in range(256))]
    types = [TokenType.CONTROL, *[TokenType.NORMAL] * 256]
    return Vocabulary("rwkv", tokens, types, slice(1 + 0x20, 1 + 0x7F))


def add_experts(model: TinyModel, block: str, n_expert: int, *, bias: bool = False) -> None:
    """The routed feed-forward network of a layer: router {n_embd, n_expert}, then the stacked experts."""
    model.linear(f"{block}.ffn_gate_inp", model.n_embd, n_expert, bias=bias)
    model.linear(f"{block}.ffn_gate_exps", model.n_embd, model.n_ff, n_expert, bias=bias)
    model.linear(f"{block}.ffn_up_exps", model.n_embd, model.n_ff, n_expert, bias=bias)
    model.linear(f"{block}.ffn_down_exps", model.n_ff, model.n_embd, n_expert, bias=bias)


def write_tiny_moe(path: Path, *, n_expert: int = 8, n_expert_used: int = 2) -> Path:
    """A llama of 2 layers whose tokens are routed to `n_expert_used` of `n_expert` networks.

    Exercises SOFT_MAX -> ARGSORT -> VIEW -> GET_ROWS(probs {1, E, T}, ids {K, T}), ids strided while K < E.
    """
    model = TinyModel(path, "llama", spm_vocabulary())
    model.attention_heads()
    model.writer.add_expert_count(n_expert)
    model.writer.add_expert_used_count(n_expert_used)
    model.embeddings()
    for block in model.blocks():
        model.attention(block)
        model.norm(f"{block}.ffn_norm")
        add_experts(model, block, n_expert)
    return model.save()


def write_tiny_olmoe(path: Path) -> Path:
    """An OLMoE of 2 layers, 2 of 8 experts, whose weights stay as the softmax has them.

    Exercises SOFT_MAX -> ARGSORT -> VIEW -> GET_ROWS with nothing behind it.
    """
    model = TinyModel(path, "olmoe", spm_vocabulary())
    model.attention_heads(n_head=2, n_head_kv=2)
    model.writer.add_expert_count(8)
    model.writer.add_expert_used_count(2)
    model.embeddings()
    for block in model.blocks():
        model.attention(block)
        model.norm(f"{block}.attn_q_norm")
        model.norm(f"{block}.attn_k_norm")
        model.norm(f"{block}.ffn_norm")
        add_experts(model, block, 8)
    return model.save()


def write_tiny_gpt_oss(path: Path) -> Path:
    """A gpt-oss of 2 layers: a window of 8 tokens in the first, all in the second; sinks {4}; 2 of 8 experts.

    Exercises two KV caches and masks, sinks in SOFT_MAX and FLASH_ATTN_EXT, SOFT_MAX over selected experts.
    """
    n_expert = 8
    model = TinyModel(path, "gpt-oss", spm_vocabulary())
    model.attention_heads()
    model.writer.add_sliding_window(8)
    model.writer.add_expert_count(n_expert)
    model.writer.add_expert_used_count(2)
    model.writer.add_expert_feed_forward_length(model.n_ff)
    model.embeddings()
    for block in model.blocks():
        model.attention(block, bias=True)
        model.weight(f"{block}.attn_sinks.weight", model.random(model.n_head, std=1.0))
        model.norm(f"{block}.post_attention_norm")
        add_experts(model, block, n_expert, bias=True)
    return model.save()


def write_tiny_mpt(path: Path) -> Path:
    """An MPT of 2 layers, 4 heads of 16, whose attention knows the places of tokens by ALiBi alone.

    Exercises SOFT_MAX with max_bias, which no fusion takes.
    """
    model = TinyModel(path, "mpt", spm_vocabulary())
    model.writer.add_head_count(4)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_max_alibi_bias(8.0)
    model.embeddings()
    for block in model.blocks():
        model.norm(f"{block}.attn_norm")
        model.linear(f"{block}.attn_qkv", model.n_embd, 3 * model.n_embd)
        model.linear(f"{block}.attn_output", model.n_embd, model.n_embd)
        model.norm(f"{block}.ffn_norm")
        model.linear(f"{block}.ffn_up", model.n_embd, model.n_ff)
        model.linear(f"{block}.ffn_down", model.n_ff, model.n_embd)
    return model.save()


def write_tiny_rwkv7(path: Path) -> Path:
    """An RWKV-7 of 2 layers: n_embd 128, 2 heads (ggml's kernel takes multiples of 64), n_ff 512, ranks 32.

    Exercises GET_ROWS and CPY of the recurrent states, token shift by CONCAT, and empty tensors at one token.
    """
    rank = 32
    model = TinyModel(path, "rwkv7", rwkv_vocabulary(), n_embd=128, n_ff=512)
    n_embd, n_ff = model.n_embd, model.n_ff
    model.writer.add_head_count(0)
    model.writer.add_wkv_head_size(64)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_decay_lora_rank(rank)
    model.writer.add_iclr_lora_rank(rank)
    model.writer.add_value_residual_mix_lora_rank(rank)
    model.writer.add_gate_lora_rank(rank)
    model.embeddings(bias=True)
    model.norm("token_embd_norm", bias=True)
    for block in model.blocks():
        model.norm(f"{block}.attn_norm", bias=True)
        model.norm(f"{block}.attn_norm_2", bias=True)
        for lora in "wavg":
            model.linear(f"{block}.time_mix_{lora}1", n_embd, rank)
            model.linear(f"{block}.time_mix_{lora}2", rank, n_embd)
        for vector in ("w0", "a0", "v0", "k_k", "k_a", "r_k"):
            model.weight(f"{block}.time_mix_{vector}.weight", model.random(n_embd, std=0.5))
        for matrix in ("key", "value", "receptance", "output"):
            model.linear(f"{block}.time_mix_{matrix}", n_embd, n_embd)
        model.norm(f"{block}.time_mix_ln", bias=True)
        model.weight(f"{block}.time_mix_lerp_fused.weight", model.random(n_embd, 1, 1, 6, mean=0.5))
        model.weight(f"{block}.channel_mix_lerp_k.weight", model.random(n_embd, 1, 1, mean=0.5))
        model.linear(f"{block}.channel_mix_key", n_embd, n_ff)
        model.linear(f"{block}.channel_mix_value", n_ff, n_embd)
    return model.save()


def write_lora(path: Path, sizes: Mapping[str, tuple[int, int]]) -> Path:
    """A LoRA adapter of rank 4 for a llama: of some matrices {n_in, n_out}, by their names."""
    rng, writer = np.random.default_rng(0), GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, (n_in, n_out) in sizes.items():
        writer.add_tensor(f"{name}.weight.lora_a", 0.1 * rng.standard_normal((4, n_in), np.float32))
        writer.add_tensor(f"{name}.weight.lora_b", 0.1 * rng.standard_normal((n_out, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny_mamba(path: Path) -> Path:
    """A mamba of 2 layers: n_embd 64, inner size 128, state 16, convolution over 4 tokens.

    Exercises GET_ROWS of the recurrent states, CPY of strided views into them (convolution), CONT of slices.
    """
    d_conv, d_state, dt_rank = 4, 16, 8
    model = TinyModel(path, "mamba", spm_vocabulary(), n_ff=0)
    d_inner = 2 * model.n_embd
    model.writer.add_head_count(0)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_ssm_conv_kernel(d_conv)
    model.writer.add_ssm_inner_size(d_inner)
    model.writer.add_ssm_state_size(d_state)
    model.writer.add_ssm_time_step_rank(dt_rank)
    model.embeddings()
    for block in model.blocks():
        model.norm(f"{block}.attn_norm")
        model.linear(f"{block}.ssm_in", model.n_embd, 2 * d_inner)
        model.weight(f"{block}.ssm_conv1d.weight", model.random(d_conv, d_inner, std=d_conv**-0.5))
        model.weight(f"{block}.ssm_conv1d.bias", model.random(d_inner))
        model.linear(f"{block}.ssm_x", d_inner, dt_rank + 2 * d_state)
        model.linear(f"{block}.ssm_dt", dt_rank, d_inner, bias=True)
        model.weight(f"{block}.ssm_a", model.random(d_state, d_inner, mean=-1.0))
        model.weight(f"{block}.ssm_d", model.random(d_inner))
        model.linear(f"{block}.ssm_out", d_inner, model.n_embd)
    return model.save()


def write_tiny_mamba2(path: Path) -> Path:
    """A mamba2 of 2 layers: n_embd 64, 8 heads of 16 in 2 groups, state 32, convolution over 4 tokens.

    Exercises SSM_SCAN with a decay for a whole head, x, B and C parts of the same rows, and a grouped RMS_NORM.
    """
    d_conv, d_state, n_head, n_group = 4, 32, 8, 2
    model = TinyModel(path, "mamba2", spm_vocabulary(), n_ff=0)
    d_inner = 2 * model.n_embd
    d_xbc = d_inner + 2 * n_group * d_state
    model.writer.add_head_count(0)
    model.writer.add_layer_norm_rms_eps(1e-5)
    model.writer.add_ssm_conv_kernel(d_conv)
    model.writer.add_ssm_inner_size(d_inner)
    model.writer.add_ssm_state_size(d_state)
    model.writer.add_ssm_time_step_rank(n_head)
    model.writer.add_ssm_group_count(n_group)
    model.embeddings()
    for block in model.blocks():
        model.norm(f"{block}.attn_norm")
        model.linear(f"{block}.ssm_in", model.n_embd, d_inner + d_xbc + n_head)
        model.weight(f"{block}.ssm_conv1d.weight", model.random(d_conv, d_xbc, std=d_conv**-0.5))
        model.weight(f"{block}.ssm_conv1d.bias", model.random(d_xbc))
        model.weight(f"{block}.ssm_dt.bias", model.random(n_head))
        model.weight(f"{block}.ssm_a", model.random(1, n_head, mean=-1.0))
        model.weight(f"{block}.ssm_d", model.random(1, n_head))
        model.weight(f"{block}.ssm_norm.weight", model.random(d_inner // n_group, n_group, mean=1.0))
        model.linear(f"{block}.ssm_out", d_inner, model.n_embd)
    return model.save()


def write_tiny_rwkv6(path: Path) -> Path:
    """An RWKV-6 of 2 layers: n_embd 128, 2 heads of 64, n_ff 256, ranks 32.

    Exercises RWKV_WKV6 and token shift by CONCAT with a mix that the tokens themselves decide.
    """
    rank = 32
    model = TinyModel(path, "rwkv6", rwkv_vocabulary(), n_embd=128, n_ff=256)
    n_embd, n_ff = model.n_embd, model.n_ff
    model.writer.add_head_count(0)
    model.writer.add_wkv_head_size(64)
    model.writer.add_layer_norm_eps(1e-5)
    model.writer.add_rescale_every_n_layers(6)
    model.writer.add_time_mix_extra_dim(rank)
    model.writer.add_time_decay_extra_dim(rank)
    model.embeddings(bias=True)
    model.norm("token_embd_norm", bias=True)
    for block in model.blocks():
        model.norm(f"{block}.attn_norm", bias=True)
        model.norm(f"{block}.attn_norm_2", bias=True)
        model.linear(f"{block}.time_mix_w1", n_embd, 5 * rank)
        model.linear(f"{block}.time_mix_w2", rank, n_embd, 5)
        model.weight(f"{block}.time_mix_lerp_x.weight", model.random(n_embd, 1, 1, mean=0.5))
        model.weight(f"{block}.time_mix_lerp_fused.weight", model.random(n_embd, 1, 1, 5, mean=0.5))
        model.weight(f"{block}.time_mix_first.weight", model.random(64, n_embd // 64, std=0.5))
        model.weight(f"{block}.time_mix_decay.weight", model.random(n_embd, std=0.5))
        model.linear(f"{block}.time_mix_decay_w1", n_embd, rank)
        model.linear(f"{block}.time_mix_decay_w2", rank, n_embd)
        for matrix in ("key", "value", "receptance", "gate", "output"):
            model.linear(f"{block}.time_mix_{matrix}", n_embd, n_embd)
        model.norm(f"{block}.time_mix_ln", bias=True)
        model.weight(f"{block}.channel_mix_lerp_k.weight", model.random(n_embd, 1, 1, mean=0.5))
        model.weight(f"{block}.channel_mix_lerp_r.weight", model.random(n_embd, 1, 1, mean=0.5))
        model.linear(f"{block}.channel_mix_key", n_embd, n_ff)
        model.linear(f"{block}.channel_mix_value", n_ff, n_embd)
        model.linear(f"{block}.channel_mix_receptance", n_embd, n_embd)
    return model.save()


def write_tiny_qwen35(path: Path) -> Path:
    """A qwen35 of 2 layers: a gated delta net of 2 key and 4 value heads of 32, then attention with a gate.

    Exercises GATED_DELTA_NET, and ROPE in sections.
    """
    d_conv, d_state, n_key_head, n_value_head = 4, 32, 2, 4
    model = TinyModel(path, "qwen35", spm_vocabulary())
    model.attention_heads(n_head=4, n_head_kv=2)
    n_q, n_kv = model.n_head * model.head_size, model.n_head_kv * model.head_size
    d_inner = n_value_head * d_state
    d_qkv = 2 * n_key_head * d_state + d_inner
    model.writer.add_rope_dimension_sections([8, 4, 4, 0])
    model.writer.add_full_attention_interval(2)
    model.writer.add_ssm_conv_kernel(d_conv)
    model.writer.add_ssm_inner_size(d_inner)
    model.writer.add_ssm_state_size(d_state)
    model.writer.add_ssm_time_step_rank(n_value_head)
    model.writer.add_ssm_group_count(n_key_head)
    model.embeddings()
    net, attention = model.blocks()
    for block in (net, attention):
        model.norm(f"{block}.attn_norm")
        model.norm(f"{block}.post_attention_norm")
        model.linear(f"{block}.ffn_gate", model.n_embd, model.n_ff)
        model.linear(f"{block}.ffn_up", model.n_embd, model.n_ff)
        model.linear(f"{block}.ffn_down", model.n_ff, model.n_embd)
    model.linear(f"{net}.attn_qkv", model.n_embd, d_qkv)
    model.linear(f"{net}.attn_gate", model.n_embd, d_inner)
    model.weight(f"{net}.ssm_conv1d.weight", model.random(d_conv, d_qkv, std=d_conv**-0.5))
    model.weight(f"{net}.ssm_dt.bias", model.random(n_value_head))
    model.weight(f"{net}.ssm_a", model.random(n_value_head, mean=-1.0))
    model.linear(f"{net}.ssm_beta", model.n_embd, n_value_head)
    model.linear(f"{net}.ssm_alpha", model.n_embd, n_value_head)
    model.weight(f"{net}.ssm_norm.weight", model.random(d_state, mean=1.0))
    model.linear(f"{net}.ssm_out", d_inner, model.n_embd)
    model.linear(f"{attention}.attn_q", model.n_embd, 2 * n_q)
    model.linear(f"{attention}.attn_k", model.n_embd, n_kv)
    model.linear(f"{attention}.attn_v", model.n_embd, n_kv)
    model.linear(f"{attention}.attn_output", n_q, model.n_embd)
    for norm in ("attn_q_norm", "attn_k_norm"):
        model.weight(f"{attention}.{norm}.weight", model.random(model.head_size, mean=1.0))
    return model.save()


def requantized(model: Path, type: str, path: Path) -> Path:
    """A model with its matrices as q8_0 or q4_0, written by llama.cpp."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[type]
    params.allow_requantize = True
    assert llama_cpp.llama_model_quantize(str(model).encode(), str(path).encode(), ctypes.byref(params)) == 0
    return path


def add_gpt2_block(model: TinyModel, block: str) -> None:
    """Adds a block whose q, k and v are one matrix, with biases everywhere."""
    model.norm(f"{block}.attn_norm", bias=True)
    model.linear(f"{block}.attn_qkv", model.n_embd, 3 * model.n_embd, bias=True)
    model.linear(f"{block}.attn_output", model.n_embd, model.n_embd, bias=True)
    model.norm(f"{block}.ffn_norm", bias=True)
    model.linear(f"{block}.ffn_up", model.n_embd, model.n_ff, bias=True)
    model.linear(f"{block}.ffn_down", model.n_ff, model.n_embd, bias=True)


def write_tiny_gpt2(path: Path) -> Path:
    """A gpt2 of 2 layers: positions are embedded, q, k and v are one matrix; GELU stands where a llama has SWIGLU."""
    model = TinyModel(path, "gpt2", spm_vocabulary())
    model.attention_heads(n_head=2, n_head_kv=2)
    model.writer.add_layer_norm_eps(1e-5)
    model.embeddings(bias=True)
    model.weight("position_embd.weight", model.random(model.n_embd, 512))
    for block in model.blocks():
        add_gpt2_block(model, block)
    return model.save()


def write_quantised(path: Path) -> Path:
    """A tiny llama with its matrices in the type that the file's name ends with."""
    return requantized(write_tiny_llama(path.with_name(f"float-{path.name}")), path.stem.split("-")[1], path)


def write_floats(path: Path) -> Path:
    """A tiny llama with its matrices as floats of 32 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "F16", tiny.F32)
        return write_tiny_llama(path)


Models = Callable[[str], Path]  # the file of a model by name: `demo`, or one of WRITERS, OTHERS, VARIED or kit.encoders

WRITERS: dict[str, Callable[[Path], Path]] = {
    "llama": write_tiny_llama,
    "moe": write_tiny_moe,
    "olmoe": write_tiny_olmoe,
    "gpt-oss": write_tiny_gpt_oss,
    "rwkv7": write_tiny_rwkv7,
    "mamba": write_tiny_mamba,
}

# more of them, for tests of their own ops; those of WRITERS go through everything
OTHERS: dict[str, Callable[[Path], Path]] = {
    "mamba2": write_tiny_mamba2,
    "rwkv6": write_tiny_rwkv6,
    "qwen35": write_tiny_qwen35,
    "mpt": write_tiny_mpt,
}

# and others of the first, for tests of wrong kernels
VARIED: dict[str, Callable[[Path], Path]] = {
    "gpt2": write_tiny_gpt2,
    "llama-q4_0": write_quantised,
    "llama-q8_0": write_quantised,
    "llama f32": write_floats,
}
