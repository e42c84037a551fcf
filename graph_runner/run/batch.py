"""What llama.cpp decodes at once: tokens of one sequence, or of several."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from llama_cpp import llama_cpp


class Batch:
    """The same number of tokens of each sequence, of which only the last has logits; llama.cpp counts positions.

    ends  the place of each sequence's last token
    """

    def __init__(self, sequences: Sequence[list[int]]) -> None:
        n, of = len(sequences[0]), len(sequences)
        self.ends = [(i + 1) * n - 1 for i in range(of)]
        tokens = [token for each in sequences for token in each]
        numbers = (ctypes.c_int32 * of)(*range(of))
        pointers = [ctypes.pointer(ctypes.c_int32.from_buffer(numbers, 4 * i)) for i in range(of)]
        self._keep = (
            (llama_cpp.llama_token * (n * of))(*tokens),
            (ctypes.c_int32 * (n * of))(*[1] * (n * of)),
            (ctypes.POINTER(ctypes.c_int32) * (n * of))(*(pointer for pointer in pointers for _ in range(n))),
            (ctypes.c_int8 * (n * of))(*(place in self.ends for place in range(n * of))),
        )
        token, n_of_each, of_each, logits = self._keep
        self.batch = llama_cpp.llama_batch(n * of, token, None, None, n_of_each, of_each, logits)


def turned(tokens: list[int], n_fixed: int, sequences: int) -> list[list[int]]:
    """Returns the tokens for each of so many sequences: the first sequence has them as they are, the others turned by
    equal parts, so that each is another text. The first n_fixed tokens stay where they are."""
    fixed, rest = tokens[:n_fixed], tokens[n_fixed:]
    shifts = [i * max(1, len(rest) // sequences) for i in range(sequences)]
    return [[*fixed, *rest[shift:], *rest[:shift]] for shift in shifts]
