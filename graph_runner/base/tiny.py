"""Small random GGUF models: a llama to try things without a download, and the parts to build other models.

Sizes are in ggml's order `ne`, the fastest axis first. Load such models with `use_extra_bufts = False`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize

F16, F32, Q8_0 = GGMLQuantizationType.F16, GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a model: the kind of tokenizer, tokens and their types, and which tokens are ASCII."""

    tokenizer: str
    tokens: list[str]
    types: list[TokenType]
    printable: slice


def spm_vocabulary() -> Vocabulary:
    """354 tokens of the SPM tokenizer: <unk>, <s>, </s>, 256 bytes, 95 printable ASCII characters."""
    special = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    raw = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    pieces = {"▁" if char == " " else char: TokenType.NORMAL for char in map(chr, range(0x20, 0x7F))}
    types = special | raw | pieces
    return Vocabulary("llama", list(types), list(types.values()), slice(len(special) + len(raw), None))


class TinyModel:
    """A GGUF file of random weights: 1-D ones F32, matrices F16, the token embedding Q8_0.

    Hyperparameters beyond the common ones are added through `writer`.
    Matrices are scaled by the square root of their fan-in, so that activations stay near one at any size.
    """

    def __init__(
        self,
        path: Path,
        arch: str,
        vocabulary: Vocabulary,
        *,
        n_embd: int = 64,
        n_layer: int = 2,
        n_ff: int = 128,
        seed: int = 0,
    ) -> None:
        self.path = path
        self.writer = GGUFWriter(path, arch)
        self.vocabulary = vocabulary
        self.n_embd, self.n_layer, self.n_ff = n_embd, n_layer, n_ff
        self.rng = np.random.default_rng(seed)
        self.writer.add_context_length(512)
        self.writer.add_embedding_length(n_embd)
        self.writer.add_block_count(n_layer)
        self.writer.add_feed_forward_length(n_ff)
        self.writer.add_tokenizer_model(vocabulary.tokenizer)
        self.writer.add_token_list(vocabulary.tokens)
        self.writer.add_token_types(vocabulary.types)

    def blocks(self) -> Iterator[str]:
        """The name prefixes of the layers: blk.0, blk.1, ..."""
        return (f"blk.{layer}" for layer in range(self.n_layer))

    def random(self, *ne: int, mean: float = 0.0, std: float = 0.1) -> np.ndarray:
        """Returns normally distributed F32 values of size `ne`."""
        return (mean + std * self.rng.standard_normal(ne[::-1])).astype(np.float32)

    def weight(self, name: str, values: np.ndarray, qtype: GGMLQuantizationType = F32) -> None:
        """Adds the tensor `name` with `values`, encoded as `qtype`."""
        self.writer.add_tensor(name, quantize(values, qtype), raw_dtype=qtype)

    def norm(self, name: str, *, bias: bool = False) -> None:
        """Adds a normalisation: weights {n_embd} near one and, if asked for, biases {n_embd} near zero."""
        self.weight(f"{name}.weight", self.random(self.n_embd, mean=1.0))
        if bias:
            self.weight(f"{name}.bias", self.random(self.n_embd))

    def linear(self, name: str, n_in: int, *n_out: int, bias: bool = False) -> None:
        """Adds a matrix {n_in, *n_out} and, if asked for, biases {*n_out}; a second output size stacks experts."""
        self.weight(f"{name}.weight", self.random(n_in, *n_out, std=n_in**-0.5), F16)
        if bias:
            self.weight(f"{name}.bias", self.random(*n_out))

    def embeddings(self, *, bias: bool = False) -> None:
        """Adds token_embd and output {n_embd, n_vocab}, output_norm {n_embd}.

        Output rows of unprintable tokens, and so their logits, are zero: greedy decoding writes plain ASCII.
        """
        n_vocab = len(self.vocabulary.tokens)
        self.weight("token_embd.weight", self.random(self.n_embd, n_vocab, std=1.0), Q8_0)
        self.norm("output_norm", bias=bias)
        output = np.zeros((n_vocab, self.n_embd), np.float32)
        printable = output[self.vocabulary.printable]
        printable[:] = self.random(self.n_embd, len(printable), std=self.n_embd**-0.5)
        self.weight("output.weight", output, F16)

    def attention_heads(self, n_head: int = 4, n_head_kv: int = 2, head_size: int = 32) -> None:
        """Sets up grouped-query attention; heads are whole blocks of 32, so that the KV cache can be Q8_0 or Q4_0."""
        self.n_head, self.n_head_kv, self.head_size = n_head, n_head_kv, head_size
        self.writer.add_head_count(n_head)
        self.writer.add_head_count_kv(n_head_kv)
        self.writer.add_key_length(head_size)
        self.writer.add_value_length(head_size)
        self.writer.add_rope_dimension_count(head_size)
        self.writer.add_layer_norm_rms_eps(1e-5)

    def attention(self, block: str, *, bias: bool = False) -> None:
        """Adds attn_norm and the q, k, v and output projections of one layer."""
        n_q, n_kv = self.n_head * self.head_size, self.n_head_kv * self.head_size
        self.norm(f"{block}.attn_norm")
        self.linear(f"{block}.attn_q", self.n_embd, n_q, bias=bias)
        self.linear(f"{block}.attn_k", self.n_embd, n_kv, bias=bias)
        self.linear(f"{block}.attn_v", self.n_embd, n_kv, bias=bias)
        self.linear(f"{block}.attn_output", n_q, self.n_embd, bias=bias)

    def llama(self) -> None:
        """Adds all of a llama: heads, embeddings, attention and feed-forward of each layer."""
        self.attention_heads()
        self.embeddings()
        for block in self.blocks():
            self.attention(block)
            self.norm(f"{block}.ffn_norm")
            self.linear(f"{block}.ffn_gate", self.n_embd, self.n_ff)
            self.linear(f"{block}.ffn_up", self.n_embd, self.n_ff)
            self.linear(f"{block}.ffn_down", self.n_ff, self.n_embd)

    def save(self) -> Path:
        """Writes the file and returns its path."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path


def write_tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Writes a llama of 2 layers: n_embd 64, 4 heads of 32 over 2 KV heads, n_ff 128, 354 tokens (about 0.3 MB).

    It uses GET_ROWS of Q8_0 and F32, SET_ROWS into the KV cache and CONT; greedy text is printable ASCII.
    """
    model = TinyModel(path, "llama", spm_vocabulary(), seed=seed)
    model.llama()
    return model.save()
