"""What llama.cpp decodes at once: tokens of one sequence, or of several."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from ggml_backend_npu.ggml import llama

llama_cpp = llama.functions()


class Batch:
    """Tokens of each sequence, in some of which there may be none. The last of each has logits; llama.cpp counts
    positions, and makes embeddings of all tokens.

    n        how many tokens
    ends     the place of the last token of each sequence that has one
    outputs  how many of the last tokens have logits too
    """

    def __init__(self, sequences: Sequence[list[int]], outputs: int = 0) -> None:
        of = len(sequences)
        pairs = [(token, i) for i, tokens in enumerate(sequences) for token in tokens]
        self.n = n = len(pairs)
        self.ends = [place for place in range(n) if place + 1 == n or pairs[place][1] != pairs[place + 1][1]]
        numbers = (ctypes.c_int32 * of)(*range(of))
        pointers = [ctypes.pointer(ctypes.c_int32.from_buffer(numbers, 4 * i)) for i in range(of)]
        self._keep = (
            (llama_cpp.llama_token * n)(*(token for token, _ in pairs)),
            (ctypes.c_int32 * n)(*[1] * n),
            (ctypes.POINTER(ctypes.c_int32) * n)(*(pointers[i] for _, i in pairs)),
            (ctypes.c_int8 * n)(*(place in self.ends or place >= n - outputs for place in range(n))),
        )
        token, n_of_each, of_each, logits = self._keep
        self.batch = llama_cpp.llama_batch(n, token, None, None, n_of_each, of_each, logits)


def together(sequences: Sequence[list[int]], n_batch: int) -> Iterator[list[list[int]]]:
    """Yields what is decoded at once of sequences of any lengths, at most n_batch tokens if there are no more sequences
    than that: as many tokens of each that takes part, for llama.cpp puts no others into one graph. Those with the most
    tokens left come first, so that all end together."""
    left = [len(tokens) for tokens in sequences]
    while any(left):
        most = max(left)
        taken = [i for i, n in enumerate(left) if n == most]
        n = min(most - max((n for n in left if n < most), default=0), max(1, n_batch // len(taken)))
        begins = [len(tokens) - n_left for tokens, n_left in zip(sequences, left, strict=True)]
        yield [
            tokens[begin : begin + n * (i in taken)]
            for i, (tokens, begin) in enumerate(zip(sequences, begins, strict=True))
        ]
        left = [n_left - n * (i in taken) for i, n_left in enumerate(left)]


def turned(tokens: list[int], n_fixed: int, sequences: int) -> list[list[int]]:
    """Returns the tokens for each of so many sequences: the first sequence has them as they are, the others turned by
    equal parts, and each fewer of them than the one before, as long as there are any: so each is another text of
    another length. The first n_fixed tokens stay where they are."""
    fixed, rest = tokens[:n_fixed], tokens[n_fixed:]
    least = 0 if fixed else 1
    found = []
    for i in range(sequences):
        shift = i * max(1, len(rest) // sequences)
        found.append([*fixed, *[*rest[shift:], *rest[:shift]][: max(least, len(rest) - max(i, shift // 2))]])
    return found
